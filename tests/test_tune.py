"""The search for a skip set: what it counts, that it resumes, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from foretell.accept import Match
from foretell.catalogue import Parts, build
from foretell.cli.tune import app, read_prompts
from foretell.config import SpeculativeConfig
from foretell.draft import DraftModel
from foretell.engine import Engine, Request
from foretell.method import Method
from foretell.model.decoder import Decoder, Skip
from foretell.model.runner import DecoderRunner
from foretell.model.skip import SkipFile, SkipTrial, default_skip, fingerprint, kept_share, read_skip
from foretell.shape import Chain
from foretell.testing import TINY, tiny_decoder
from foretell.tune import Drafting, Sample, _replay, answers, count, tune_skip
from helpers import VOCAB, random_tokens

pytest.importorskip("optuna")
CONFIG = replace(TINY, vocab=VOCAB, layers=3)
EVERYTHING = Skip(frozenset(range(3)), frozenset(range(3)))


def model(seed: int = 0) -> Decoder:
    return tiny_decoder(CONFIG, seed)


def samples() -> list[Sample]:
    return answers(model(), [random_tokens(n, seed=n) for n in (5, 8)], 20)


def test_counts_are_those_of_a_real_run_where_confidence_plays_no_part() -> None:
    skip = Skip(attention=frozenset({1}), mlp=frozenset({2}))
    found = count(model(), skip, samples(), Drafting(3, 0.0))
    method = Method(DraftModel(DecoderRunner(model().skipping(skip))), Chain(3, draw=False), Match())
    engine = Engine(DecoderRunner(model()), method, rows=1)
    done = engine.complete([Request(sample.prompt, max_new_tokens=20) for sample in samples()])
    real = [c.statistics for c in done]
    assert found.tokens == sum(s.new_tokens for s in real) == 40
    assert found.passes == sum(s.target_passes for s in real)
    assert found.drafted == sum(s.drafted for s in real)


def test_rounds_end_with_an_unsure_token() -> None:
    answer, sure = np.arange(8), np.array([0.9, 0.4, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9])
    counts = _replay(answer, np.array([0, 1, 7, 3, 4, 5, 6, 7]), sure, Drafting(4, 0.5))
    # Round 1 drafts 0, 1 (unsure) and gains 3 tokens; round 2 drafts 3..6 and gains 5.
    assert (counts.passes, counts.drafted, counts.tokens) == (2, 6, 8)


def test_nothing_skipped_is_always_right_and_everything_skipped_still_decodes() -> None:
    assert count(model(), Skip(), samples(), Drafting(4, 0.0)).passes == 8
    none = count(model(), EVERYTHING, samples(), Drafting(4, 0.0))
    assert none.tokens == 40 and none.passes > 8


def test_the_share_of_weights_falls_with_every_part_left_out() -> None:
    shares = [
        kept_share(CONFIG, s) for s in (Skip(), Skip(frozenset({0})), Skip(frozenset({0}), frozenset({1})), EVERYTHING)
    ]
    assert shares[0] == 1 and shares == sorted(shares, reverse=True) and shares[-1] > 0


def test_the_default_leaves_out_attention_parts_only() -> None:
    for layers in (1, 2, 30, 80):
        skip = default_skip(layers)
        assert skip.attention and not skip.mlp and max(skip.attention) < layers


def test_a_search_is_saved_resumed_and_deterministic(tmp_path: Path) -> None:
    work, told = samples(), list[SkipTrial]()
    whole = tune_skip(model(), work, tmp_path / "whole.json", trials=14)
    tune_skip(model(), work, tmp_path / "parts.json", trials=5)
    assert len(SkipFile.read(tmp_path / "parts.json", model()).trials) == 5
    parts = tune_skip(model(), work, tmp_path / "parts.json", trials=14, told=told.append)
    assert len(told) == 9 and parts.trials[:5] == whole.trials[:5]
    assert len({t.skip for t in whole.trials[:6]}) == 6
    assert tune_skip(model(), work, tmp_path / "again.json", trials=14) == whole
    assert read_skip(tmp_path / "whole.json", model()) == whole.best.skip
    assert whole.best.value == max(t.value for t in whole.trials)


def test_a_search_by_time_runs(tmp_path: Path) -> None:
    assert tune_skip(model(), samples(), tmp_path / "time.json", trials=2, objective="time").best.value > 0


def test_the_method_uses_the_file(tmp_path: Path) -> None:
    out = tmp_path / "skip.json"
    SkipFile(fingerprint(model()), 3, "counts", "w", (SkipTrial((0, 2), (1,), 2.0), SkipTrial((), (), 1.0))).save(out)
    method = build("self_speculative", Parts(VOCAB, model()), SpeculativeConfig(skip_set=str(out)))
    network = method.draft.runner.network
    assert network.skip == Skip(frozenset({0, 2}), frozenset({1}))


def test_files_of_another_model_or_search_are_refused(tmp_path: Path) -> None:
    out, work = tmp_path / "skip.json", samples()
    tune_skip(model(), work, out, trials=1)
    before = out.read_text()
    with pytest.raises(ValueError, match=r"tuned on another model \(3 layers, fingerprint"):
        read_skip(out, model(seed=1))
    with pytest.raises(ValueError, match="other prompts or settings"):
        tune_skip(model(), work[:1], out, trials=2)
    with pytest.raises(ValueError, match="other prompts or settings"):
        tune_skip(model(), work, out, trials=2, objective="time")
    assert out.read_text() == before


def test_the_fingerprint_ignores_precision() -> None:
    half = tiny_decoder(CONFIG, dtype=__import__("torch").bfloat16)
    assert fingerprint(half) == fingerprint(model()) != fingerprint(model(seed=1))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a skip set"),
        ("[]", "not a skip set"),
        ('{"kind": "foretell skip set", "trials": 3}', "damaged skip set"),
        ('{"kind": "foretell skip set", "model": "m", "layers": 2, "objective": "counts", "workload": "w",'
         ' "trials": [{"attention": [2], "mlp": [], "value": 1}]}', "names a layer outside"),
    ],
)  # fmt: skip
def test_broken_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "skip.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_skip(path, model())


def test_missing_and_empty_searches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read the skip set"):
        read_skip(tmp_path / "none.json", model())
    SkipFile(fingerprint(model()), 3, "counts", "w").save(tmp_path / "empty.json")
    with pytest.raises(ValueError, match="before its first trial"):
        read_skip(tmp_path / "empty.json", model())
    with pytest.raises(ValueError, match="no prompts"):
        answers(model(), [], 4)


def test_prompts_are_lines_or_json_lines(tmp_path: Path) -> None:
    text, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text("one\n\ntwo\n")
    lines.write_text(json.dumps({"prompt": "one"}) + "\n" + json.dumps({"turns": ["two", "more"]}) + "\n")
    assert read_prompts(text) == read_prompts(lines) == ["one", "two"]
    lines.write_text('{"prompt": "one"}\n{"other": 1}\n')
    with pytest.raises(ValueError, match="line 2: not a prompt"):
        read_prompts(lines)
    text.write_text("\n")
    with pytest.raises(ValueError, match="no prompts here"):
        read_prompts(text)


def test_the_command_says_what_is_wrong_in_one_sentence(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["skip", "--prompts", str(tmp_path / "none"), "--out", str(tmp_path / "o")])
    assert result.exit_code == 1 and "No such file" in result.stderr and "Traceback" not in result.output
