"""`foretell assess` from end to end on small random models, and the invariants of its measures."""

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch

from command import expect_error, run_foretell, save_tiny_model, tiny_target
from foretell.api import Model
from foretell.lab.assess.answers import agreement, repeated_share
from foretell.lab.assess.choices import Choice, score_choices
from foretell.lab.assess.confidence import TokenCalibrationSums, calibration_error, reliability
from foretell.lab.assess.intervals import PairedSums, share_interval
from foretell.lab.assess.noise import NOISES
from foretell.lab.assess.probes import CLEAN, Probe, conditions, read_probes
from foretell.lab.assess.report import broken_budgets
from foretell.lab.assess.run import AssessSettings, assess
from foretell.load import load
from foretell.model.load.transforms import fake_quantize
from foretell.verify.comparison import compare_logits
from foretell.verify.logits import target_logits
from helpers import all_logits, random_tokens, target

PROBES = Path(mkdtemp()) / "probes.jsonl"
PROBES.write_text("\n".join(p.model_dump_json() for p in read_probes()[::40]))
TEXT = Path(mkdtemp()) / "text.txt"
TEXT.write_text(" ".join(prompt for p in read_probes()[:12] for prompt in p.prompts))
SMALL = ("--quick", "--answers", "1", "--max-new-tokens", "6", "--tokens", "192", "--length", "96",
         "--probes", str(PROBES), "--text", str(TEXT), "--recall-facts", "4")  # fmt: skip


@cache
def other() -> Path:
    return save_tiny_model(Path(mkdtemp()) / "other", seed=3)


@cache
def reported(*arguments: str | Path) -> tuple[Path, dict[str, dict[str, Any]]]:
    """The folder of a report, and the results."""
    folder = Path(mkdtemp()) / "report"
    result = run_foretell("assess", *arguments, *SMALL, "--json", "--out", folder)
    assert result.exit_code == 0, (result.output, result.exception)
    return folder, json.loads(result.stdout)


def assessed(*arguments: str | Path) -> dict[str, dict[str, Any]]:
    return reported(*arguments)[1]


def measures(*arguments: str | Path) -> dict[str, float]:
    return assessed(*arguments)["measures"]


@pytest.mark.exhaustive
def test_a_model_beside_itself_changes_nothing_and_beside_another_one_does() -> None:
    same = measures(tiny_target(), "--dtype", "float32", "--against", tiny_target())
    changes = ("kl", "total_variation", "changed_tokens", "probe_flips", "new_errors", "changed_answers", "ece_change")
    assert all(abs(same[name]) < 1e-6 for name in changes) and same["perplexity_ratio"] == 1
    different = measures(other(), "--dtype", "float32", "--against", tiny_target())
    assert all(different[name] > 0.02 for name in ("kl", "total_variation", "changed_tokens", "changed_answers"))


@pytest.mark.exhaustive
def test_changes_have_intervals_by_paired_bootstrap() -> None:
    options = ("--dtype", "float32", "--against", tiny_target())
    found = assessed(other(), *options)
    for name, (low, high) in found["intervals"].items():
        assert low <= found["measures"][name] <= high, name
    assert set(found["intervals"]) == {
        "kl", "total_variation", "changed_tokens", "perplexity_ratio", "probe_flips", "new_errors",
    }  # fmt: skip
    assert found["intervals"]["kl"][0] > 0 and found["intervals"]["kl"][0] < found["intervals"]["kl"][1]
    same = assessed(tiny_target(), *options)["intervals"]
    assert same["probe_flips"] == [0, 0] and same["perplexity_ratio"] == [1, 1]


def test_an_interval_covers_the_truth_as_often_as_it_says() -> None:
    random_numbers = np.random.default_rng(0)
    covered = 0
    for seed in range(100):
        low, high = share_interval(random_numbers.random(200) < 0.3, seed)
        covered += low <= 0.3 <= high
    assert 88 <= covered <= 99


def test_two_halves_of_one_model_do_not_differ() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(1280, 30, generator=generator), torch.randint(30, (1280,), generator=generator)
    noisy = logits + 0.3 * torch.randn(1280, 30, generator=generator)
    paired = PairedSums()
    paired.add(logits + 0.3 * torch.randn(1280, 30, generator=generator), noisy, targets)
    low, high = paired.intervals()["perplexity_ratio"]
    assert low < 1 < high and high - low < 0.1


@pytest.mark.exhaustive
def test_a_smaller_cache_costs_something_where_it_evicts() -> None:
    found = measures(tiny_target(), "--kv-cache-policy", "streaming_llm@8", "--dtype", "float32", "--against",
                     tiny_target(), "--length", "200", "--tokens", "200")  # fmt: skip
    assert found["kl"] > 1e-3


def test_the_report_is_written_and_a_budget_ends_with_status_one() -> None:
    folder, _ = reported(other(), "--dtype", "float32", "--against", tiny_target())
    names = {p.name for p in folder.iterdir()}
    assert {"assess.json", "report.md", "report.html", "kl-divergence-by-text.png"} <= names
    assert "Knowledge probes" in (folder / "report.md").read_text()
    assert broken_budgets({"kl": 0.5}, {"kl": 0.5}) == []
    (sentence,) = broken_budgets({"kl": 0.5}, {"kl": 0.1})
    assert "0.5" in sentence and "0.1" in sentence


def test_alone_it_needs_no_other_model() -> None:
    found = measures(tiny_target())
    assert "kl" not in found and 1 < found["perplexity"] < 5000 and 0 <= found["ece"] <= 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--budget", "kl"), "NAME=VALUE was expected"),
        (("--budget", "kl=low"), "a number was expected, found 'low'"),
        (("--budget", "speed=1"), "unknown measure 'speed'"),
        (("--budget", "kl=1"), "beside another model"),
        (("--recall-facts", "2"), "4 to 60 facts, found 2"),
        (("--out", str(TEXT)), "a file is where a folder is to be written"),
        (("--text", "nowhere.txt"), "no such file"),
        (("--probes", __file__), "no probe"),
    ],
)
def test_bad_input_is_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    assert sentence in expect_error("assess", tiny_target(), *SMALL, *arguments)


def test_progress_is_told_from_the_start_to_the_end() -> None:
    told = list[tuple[str, float]]()
    model, other_model = load(str(tiny_target()), "float32"), load(str(other()), "float32")
    settings = AssessSettings(96, 192, 2, 6, 2, 4)
    for against in (None, other_model):
        told.clear()
        assess(model, against, [TEXT], read_probes(PROBES), settings, lambda what, share: told.append((what, share)))
        shares = [share for _, share in told]
        assert shares == sorted(shares) and shares[0] == 0 and 0.9 < shares[-1] <= 1 and len(shares) > 20
        assert max(b - a for a, b in pairwise(shares)) < 0.25
        assert told[0][0] == "reading texts" and told[-1][0] == "writing answers"


@pytest.mark.exhaustive
def test_progress_is_printed_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretell.cli.progress.PROGRESS_INTERVAL", 0.0)
    result = run_foretell("assess", tiny_target(), *SMALL)
    assert "reading texts: 0% of the assessment done" in result.stderr and "writing answers: " in result.stderr
    assert "Knowledge probes" in result.stdout


def test_a_quick_assessment_does_less(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*arguments: str | Path) -> tuple[int, AssessSettings]:
        found = list[tuple[int, AssessSettings]]()

        def stop(model: Model, against: None, texts: object, probes: Sequence[Probe], *rest: Any) -> None:
            found.append((len(probes), rest[0]))
            raise ValueError("stop")

        monkeypatch.setattr(sys.modules["foretell.lab.assess.run"], "assess", stop)
        assert "stop" in expect_error("assess", tiny_target(), *arguments)
        return found[0]

    (probes, whole), (some, quick) = asked(), asked("--quick")
    assert some == (probes + 2) // 3 and (quick.tokens, quick.answers, quick.recall_texts) == (512, 4, 4)
    assert (whole.tokens, whole.answers, whole.recall_texts) == (2048, 12, 12)
    own = asked("--quick", "--answers", "12", "--tokens", "192", "--probes", PROBES)
    assert own == (len(read_probes(PROBES)), replace(quick, answers=12, tokens=192)), "what is given counts"


def test_what_cannot_be_asked_is_said_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts that do not fit into the context are refused before texts are read and probes are asked."""

    def read(*arguments: object) -> None:
        pytest.fail("texts were read")

    monkeypatch.setattr("foretell.lab.assess.run.assess_texts", read)
    assert "ask for fewer facts" in expect_error("assess", tiny_target(), *SMALL, "--recall-facts", "60")
    monkeypatch.setattr(sys.modules["foretell.load"], "load", read)
    assert "4 to 60 facts" in expect_error("assess", tiny_target(), *SMALL, "--recall-facts", "61")


def test_a_text_that_is_too_short_and_another_vocabulary_are_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Too short.")
    assert "32 are needed" in expect_error("assess", tiny_target(), "--text", tmp_path / "short.txt", *SMALL)
    wider = save_tiny_model(tmp_path / "wider", vocab=300)
    assert "cannot be compared" in expect_error("assess", wider, "--against", tiny_target(), *SMALL)


def test_a_model_that_says_its_true_frequency_has_no_calibration_error() -> None:
    confidence = [0.25] * 4 + [0.75] * 4
    right = [True, False, False, False, True, True, True, False]
    assert calibration_error(reliability(confidence, right)) == pytest.approx(0)
    assert calibration_error(reliability([0.8] * 5, [False] * 5)) == pytest.approx(0.8)


def test_fewer_bits_cost_more() -> None:
    tokens = random_tokens(120)
    exact = torch.from_numpy(all_logits(target(), tokens))
    rounded = [torch.from_numpy(all_logits(fake_quantize(target(), bits, 4), tokens)) for bits in (8, 5, 4, 3)]
    found = [compare_logits([(exact, logits, exact.argmax(-1))]).kl for logits in rounded]
    assert found == sorted(found) and 0 < found[0] < found[-1] / 20


@pytest.mark.parametrize("bits", [5, 4])
def test_what_blocks_cost_alone_nearly_adds_up_to_what_they_cost_together(bits: int) -> None:
    tokens, whole = random_tokens(120), target()
    exact = torch.from_numpy(all_logits(whole, tokens))

    def cost(rounded: tuple[int, ...]) -> float:
        first, *others = ((coarse if i in rounded else whole) for i in range(whole.config.layers))
        mixed = first.followed_by(1, [model.block(i) for i, model in enumerate(others, 1)])
        logits = torch.from_numpy(all_logits(mixed, tokens))
        return compare_logits([(exact, logits, exact.argmax(-1))]).kl

    coarse = fake_quantize(whole, bits, 4)
    alone = [cost((i,)) for i in range(whole.config.layers)]
    assert all(kl > 0 for kl in alone) and cost(()) < 1e-9
    assert 1 / 3 < sum(alone) / cost(tuple(range(whole.config.layers))) < 3


def test_calibration_and_perplexity_agree_with_the_comparison() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(64, 11, generator=generator)
    targets = torch.randint(11, (64,), generator=generator)
    sums = TokenCalibrationSums()
    for part in (slice(0, 40), slice(40, 64)):
        sums.add(logits[part], targets[part])
    found, compared = sums.result(), compare_logits([(logits, logits, targets)])
    assert found.perplexity == pytest.approx(compared.perplexity) and compared.total_variation == 0
    p = logits.softmax(-1)
    truth = torch.nn.functional.one_hot(targets, 11)
    assert found.brier == pytest.approx(float((p - truth).square().sum(-1).mean()), rel=1e-5)
    assert found.accuracy == pytest.approx(float((logits.argmax(-1) == targets).double().mean()))


def test_candidates_are_scored_whole_in_one_pass() -> None:
    model = load(str(tiny_target()), "float32")
    texts = [("The capital of France is", ("Paris", "Par", "Lyon")), ("Two", ("words", "more words"))]
    choices = [Choice.of(model.codec, prompt, candidates) for prompt, candidates in texts]
    for choice, scores in zip(choices, score_choices(model.runner(), choices, 512), strict=True):
        for candidate, score in zip(choice.candidates, scores, strict=True):
            logits = target_logits(model.runner(), [*choice.prompt, *candidate], len(candidate) + 1, True)
            rows = torch.log_softmax(logits, -1)[:-1]
            assert score == pytest.approx(float(rows[range(len(candidate)), list(candidate)].sum()), abs=1e-4)
    with pytest.raises(ValueError, match="the model reads 8"):
        score_choices(model.runner(), choices, 8)


def test_noise_changes_a_prompt_in_the_same_way_every_time() -> None:
    prompt = "The capital of France is a large city"
    for name, change in NOISES.items():
        first = change(prompt, random.Random(1))
        assert first != prompt and first == change(prompt, random.Random(1)), name
    probes = read_probes()
    made = dict(conditions(probes))
    assert made == dict(conditions(probes)) and all(len(prompts) == len(probes) for prompts in made.values())
    assert made[CLEAN] == [p.prompts[0] for p in probes]


def test_the_probes_of_the_package_are_sound() -> None:
    probes = read_probes()
    assert len({p.id for p in probes}) == len(probes) > 100
    for probe in probes:
        assert len(set(probe.candidates)) == 4 and len(set(probe.prompts)) == 2, probe.id
        assert not any(probe.answer.lower() in prompt.lower().split() for prompt in probe.prompts), probe.id


def test_agreement_of_answers() -> None:
    assert agreement([[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 6]]) == (0.5, 0.8, 1.0)
    assert agreement([[1]], [[1]]) == (1.0, 1.0, None)
    assert repeated_share([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(0.2) and repeated_share([1]) == 0
    assert np.isclose(repeated_share([7] * 8), 0.8)


def test_scores_do_not_depend_on_the_order_of_the_probes() -> None:
    model = load(str(tiny_target()), "float32")
    choices = [Choice.of(model.codec, p.prompts[0][:40], p.candidates) for p in read_probes()[:6]]
    forward = list(score_choices(model.runner(), choices, 512))
    backward = list(score_choices(model.runner(), choices[::-1], 512))[::-1]
    for one, other in zip(forward, backward, strict=True):
        assert list(one) == pytest.approx(list(other), abs=1e-5)
