"""The lab reads a prompt once for all of its seeds, and decodes each of them as it would be decoded alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from command import tiny_draft, tiny_target
from foretell.core.sampling import SamplingParams
from foretell.engine.engine import Engine
from foretell.engine.request import Completion
from foretell.lab.reproduce import Lab, LabRun, LabSettings, Run
from foretell.lab.reproduce.counts import Counts
from foretell.load import load
from foretell.utils.store import RunStore
from helpers import unchecked

PROMPTS = tuple(f"{word} " * 20 for word in ("one", "two", "three"))
SEEDS, TOKENS = 3, 12
OPTIONS = {"num_speculative_tokens": 3}


@pytest.mark.parametrize("method", ["draft_model", "lenience_lossy"])
def test_seeds_of_a_prompt_share_its_reading_and_change_no_answer(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete, done = Engine.complete, list[Completion]()

    def kept(engine: Engine, requests: Sequence[Any]) -> list[Completion]:
        done.extend(answers := complete(engine, requests))
        return answers

    monkeypatch.setattr(Engine, "complete", kept)
    settings = LabSettings(model="tiny", dtype="float32", draft_models=(), new_tokens=TOKENS, prompts="")
    with unchecked(), RunStore(tmp_path, settings, LabRun) as store:
        model, draft = load(str(tiny_target()), dtype="float32"), load(str(tiny_draft()), dtype="float32")
        run = Lab(model, store, settings, PROMPTS, (draft,)).run(Run(method, OPTIONS, temperature=1.0, repeat=SEEDS))
        engine = model.engine(model.method(method, OPTIONS, drafts=(draft,)), rows=1)
        alone = [
            complete(engine, [model.request(text, SamplingParams(1.0, seed=seed), max_new_tokens=TOKENS)])[0]
            for seed in range(SEEDS)
            for text in PROMPTS
        ]
    assert run.tokens == tuple(answer.tokens for answer in alone) and len(set(run.tokens)) == len(alone)
    assert run.prompts == tuple(Counts.of(alone[i :: len(PROMPTS)]) for i in range(len(PROMPTS)))
    read = [len(model.request(text).prompt) for text in PROMPTS for _ in range(SEEDS)]
    cached = [answer.statistics.cached_tokens for answer in done]
    assert [length - 1 for length in read[1::SEEDS]] == cached[1::SEEDS] == cached[2::SEEDS]
