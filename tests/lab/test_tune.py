"""The search for a skip set: what it counts, that it resumes, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from command import expect_error, run_foretell, tiny_target
from foretell.accept import Match
from foretell.catalogue import BuildContext, build
from foretell.catalogue.config import SpeculativeConfig
from foretell.draft import DraftModel
from foretell.engine.engine import Engine
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.lab.tune.skip import DraftingOptions, GreedyAnswer, _count_rounds, count_passes, greedy_answers, tune_skip
from foretell.model.block.decoder import Decoder, SkipSet
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.skip import SkipFile, SkipTrial, default_skip, kept_weight_share, read_skip
from foretell.shape import Chain
from foretell.testing import TINY, tiny_decoder
from helpers import VOCAB, random_tokens

pytest.importorskip("optuna")
CONFIG = replace(TINY, vocab=VOCAB, layers=3)
EVERYTHING = SkipSet(frozenset(range(3)), frozenset(range(3)))


def model(seed: int = 0) -> Decoder:
    return tiny_decoder(CONFIG, seed)


def samples() -> list[GreedyAnswer]:
    return greedy_answers(model(), [random_tokens(n, seed=n) for n in (5, 8)], 20)


def test_counts_are_those_of_a_real_run_where_confidence_plays_no_part() -> None:
    skip = SkipSet(attention=frozenset({1}), mlp=frozenset({2}))
    found = count_passes(model(), skip, samples(), DraftingOptions(3, 0.0))
    method = Method(DraftModel(DecoderRunner(model().without_sublayers(skip))), Chain(3, draw=False), Match())
    engine = Engine(DecoderRunner(model()), method, rows=1)
    completions = engine.complete([Request(sample.prompt, max_new_tokens=20) for sample in samples()])
    real = [completion.statistics for completion in completions]
    assert found.tokens == sum(s.new_tokens for s in real) == 40
    assert found.passes == sum(s.target_passes for s in real)
    assert found.drafted == sum(s.drafted for s in real)


def test_rounds_end_with_an_unsure_token() -> None:
    answer, sure = np.arange(8), np.array([0.9, 0.4, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9])
    counts = _count_rounds(answer, np.array([0, 1, 7, 3, 4, 5, 6, 7]), sure, DraftingOptions(4, 0.5))
    # Round 1 drafts 0, 1 (unsure) and gains 3 tokens; round 2 drafts 3..6 and gains 5.
    assert (counts.passes, counts.drafted, counts.tokens) == (2, 6, 8)


def test_nothing_skipped_is_always_right_and_everything_skipped_still_decodes() -> None:
    assert count_passes(model(), SkipSet(), samples(), DraftingOptions(4, 0.0)).passes == 8
    none = count_passes(model(), EVERYTHING, samples(), DraftingOptions(4, 0.0))
    assert none.tokens == 40 and none.passes > 8


def test_the_share_of_weights_falls_with_every_part_left_out() -> None:
    shares = [
        kept_weight_share(CONFIG, s)
        for s in (SkipSet(), SkipSet(frozenset({0})), SkipSet(frozenset({0}), frozenset({1})), EVERYTHING)
    ]
    assert shares[0] == 1 and shares == sorted(shares, reverse=True) and shares[-1] > 0


def test_the_default_leaves_out_attention_parts_only() -> None:
    for layers in (1, 2, 30, 80):
        skip = default_skip(layers)
        assert skip.attention and not skip.mlp and max(skip.attention) < layers


def test_a_search_is_saved_resumed_and_deterministic(tmp_path: Path) -> None:
    work, told = samples(), list[SkipTrial]()
    whole = tune_skip(model(), "m", work, tmp_path / "whole.json", trials=14)
    tune_skip(model(), "m", work, tmp_path / "parts.json", trials=5)
    assert len(SkipFile.read(tmp_path / "parts.json", "m", 3).trials) == 5
    parts = tune_skip(model(), "m", work, tmp_path / "parts.json", trials=14, on_trial=told.append)
    assert len(told) == 9 and parts.trials[:5] == whole.trials[:5]
    assert len({t.skip_set for t in whole.trials[:6]}) == 6
    assert tune_skip(model(), "m", work, tmp_path / "again.json", trials=14) == whole
    assert read_skip(tmp_path / "whole.json", "m", 3) == whole.best.skip_set
    assert whole.best.value == max(t.value for t in whole.trials)


def test_a_search_by_time_runs(tmp_path: Path) -> None:
    assert tune_skip(model(), "m", samples(), tmp_path / "time.json", trials=2, objective="time").best.value > 0


def test_the_method_uses_the_file(tmp_path: Path) -> None:
    out = tmp_path / "skip.json"
    SkipFile("m", 3, "counts", "w", (SkipTrial((0, 2), (1,), 2.0), SkipTrial((), (), 1.0))).save(out)
    method = build("self_speculative", BuildContext(VOCAB, model()), SpeculativeConfig(skip_set=str(out)))
    network = method.draft.runner.network
    assert network.skip == SkipSet(frozenset({0, 2}), frozenset({1}))


def test_files_of_another_model_or_search_are_refused(tmp_path: Path) -> None:
    out, work = tmp_path / "skip.json", samples()
    tune_skip(model(), "m", work, out, trials=1)
    before = out.read_text()
    with pytest.raises(ValueError, match=r"tuned on another model \(3 layers, fingerprint"):
        read_skip(out, "other", 3)
    with pytest.raises(ValueError, match="other prompts or settings"):
        tune_skip(model(), "m", work[:1], out, trials=2)
    with pytest.raises(ValueError, match="other prompts or settings"):
        tune_skip(model(), "m", work, out, trials=2, objective="time")
    assert out.read_text() == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "a JSON object was expected"),
        ('{"kind": "foretell skip set", "trials": 3}', "damaged skip set"),
        ('{"kind": "foretell skip set", "model": "m", "layers": 2, "objective": "counts", "workload": "w",'
         ' "trials": [{"attention": [2], "mlp": [], "value": 1}]}', "names a layer outside"),
    ],
)  # fmt: skip
def test_broken_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "skip.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_skip(path, "m", 3)


def test_missing_and_empty_searches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        read_skip(tmp_path / "none.json", "m", 3)
    SkipFile("m", 3, "counts", "w").save(tmp_path / "empty.json")
    with pytest.raises(ValueError, match="before its first trial"):
        read_skip(tmp_path / "empty.json", "m", 3)
    with pytest.raises(ValueError, match="no prompts"):
        greedy_answers(model(), [], 4)


def tuned(prompts: Path, out: Path, *more: str) -> dict[str, Any]:
    """What a search of one trial on the tiny model writes."""
    result = run_foretell(
        "tune", "skip", "--prompts", prompts, "--out", out, "--model", tiny_target(), "--trials", "1", *more
    )
    assert result.exit_code == 0, (result.output, result.exception)
    assert "best of 1:" in result.stdout
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_prompts_are_lines_or_json_lines(tmp_path: Path) -> None:
    text, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text("one\n\ntwo\n")
    lines.write_text(json.dumps({"prompt": "one"}) + "\n" + json.dumps({"turns": ["two", "more"]}) + "\n")
    short = ("--new-tokens", "4", "--device", "cpu")
    assert tuned(text, tmp_path / "a.json", *short) == tuned(lines, tmp_path / "b.json", *short)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"prompt": "one"}\n{"other": 1}\n', "line 2: give one of 'prompt', 'messages' and 'turns'"),
        ("a.jsonl", b"\n", "no prompts here"),
        ("a.txt", b"\n", "no prompts here"),
        ("a.txt", b"\xff\n", "not UTF-8 text"),
    ],
)
def test_files_without_prompts_are_refused_in_a_sentence(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    assert message in expect_error(
        "tune", "skip", "--prompts", tmp_path / name, "--out", tmp_path / "o", "--model", tiny_target()
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so asking for one is no mistake")
def test_a_device_that_is_not_there_is_refused_in_a_sentence(tmp_path: Path) -> None:
    assert "none.jsonl: no such file" in expect_error(
        "tune", "skip", "--prompts", tmp_path / "none.jsonl", "--out", tmp_path / "o"
    )
    (tmp_path / "a.txt").write_text("one\n")
    asked = ("--prompts", tmp_path / "a.txt", "--out", tmp_path / "o", "--model", tiny_target(), "--device", "cuda")
    assert "finds no CUDA GPU here" in expect_error("tune", "skip", *asked)
