"""`foretell bench frontier` on small random models, and what the roofline predicts of its ways."""

import json
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from tempfile import mkdtemp

import pytest
from matplotlib.text import Text

from command import expect_error, run_foretell, tiny_draft, tiny_target
from foretell.bench.charts import canvas
from foretell.lab.frontier.predict import Predictor
from foretell.lab.frontier.report import label_points
from foretell.lab.frontier.variants import FAMILIES, ModelOptions, VariantInputs, all_variants
from foretell.model.config.compressed import LowRank
from foretell.roofline.graph_builder import build_graph
from foretell.roofline.hardware import known_hardware
from foretell.roofline.measured import MeasuredMethod
from foretell.roofline.model_configs import find_model

QUESTIONS = Path(mkdtemp()) / "questions.txt"
QUESTIONS.write_text("Why is the sky blue?\nCount: one two three one two three one two\n")
SMALL = ("--model", str(tiny_target()), "--dtype", "float32", "--dtypes", "int8", "--methods", "ngram",
         "--per-category", "2", "--tasks", str(QUESTIONS), "--max-new-tokens", "6",
         "--repeats", "1", "--kv-budget", "8",
         "--hardware", "a100-80g", "--draft-model", str(tiny_draft()))  # fmt: skip


@cache
def pruned() -> Path:
    out, text = Path(mkdtemp()) / "pruned", Path(mkdtemp()) / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 30)
    found = run_foretell("compress", tiny_target(), "--out", out, "--method", "magnitude", "--sparsity", "0.5",
                         "--held-back-tokens", "512", "--text", text)  # fmt: skip
    assert found.exit_code == 0, found.output
    return out


def test_no_name_in_the_picture_covers_another() -> None:
    _, axes = canvas()
    points = [(f"a way of number {i}", 1 + 0.001 * i, 1 - 0.001 * i) for i in range(12)]
    axes.scatter([x for _, x, _ in points], [y for _, _, y in points], label="ways")
    axes.set(xlim=(0, 2), ylim=(0, 2))
    axes.legend()
    label_points(axes, points)
    boxes = [Text.get_window_extent(text) for text in axes.texts]
    assert [text.get_text() for text in axes.texts] == [name for name, _, _ in points]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_every_way_is_priced_and_an_ended_run_is_not_repeated(tmp_path: Path) -> None:
    arguments = ("bench", "frontier", "--out", tmp_path, *SMALL, "--checkpoint", pruned())
    found = run_foretell(*arguments, "--json")
    assert found.exit_code == 0, (found.output, found.exception)
    record = json.loads(found.stdout)
    ways = {w["price"]["way"]: w for w in record["ways"]}
    assert {"int8", "kv-int8", "snapkv@8", "ngram", "pruned", "typical_lossy"} <= set(ways)
    assert record["ways"][0]["price"]["way"] == "ngram", "lossless ways come first"
    lossless, cut = ways["ngram"]["price"], ways["pruned"]["price"]
    assert lossless["kl"] == lossless["changed_tokens"] == ways["ngram"]["changed_answers"] == 0
    assert cut["kl"] > 0.01 and cut["total_variation"] > 0.01 and not cut["lossless"]
    assert ways["int8"]["price"]["kl"] < cut["kl"] and ways["int8"]["price"]["bytes_gain"] > 1.2
    assert all(w["gain"] > 0 for w in ways.values()) and ways["int8"]["price"]["predicted_gain"] > 1
    assert "medusa_lossy" in record["unavailable"]
    assert record["fitted_to"] == (source := known_hardware()["a100-80g"].source)
    assert source in " ".join((tmp_path / "report.md").read_text("utf-8").split())
    assert {p.name for p in tmp_path.iterdir()} >= {"frontier.json", "frontier.csv", "frontier.png", "report.md"}
    before = (tmp_path / "answers" / "records.jsonl").read_bytes()
    assert run_foretell(*arguments, "--csv").stdout.startswith("way,family,lossless")
    assert (tmp_path / "answers" / "records.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--checkpoint", str(tiny_target())), "it is unknown what was done to it"),
        (("--exits", str(tiny_target())), "no calibration of exits is here"),
        (("--sparsity", str(tiny_target())), "sparsity.json: cannot be read"),
        (("--families", "speed"), "unknown family 'speed'"),
        (("--hardware", "abacus"), "unknown hardware 'abacus'"),
        (("--kv-budget", "none"), "whole numbers"),
    ],
)
def test_bad_input_is_one_sentence(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    assert sentence in expect_error("bench", "frontier", "--out", tmp_path, *SMALL, *arguments)


def test_names_of_ways_are_unique_and_families_are_listed() -> None:
    inputs = VariantInputs(
        ModelOptions(str(tiny_target()), "float32"), ("int8", "float32"), (64, 128), methods=("ngram",)
    )
    names = [variant.competitor for variant in all_variants(inputs)]
    assert len(set(names)) == len(names) and "float32/weights" not in names
    assert {name.split("/")[1] for name in names} == set(FAMILIES) - {"checkpoint", "exits", "sparsity"}


def test_predicted_gains_follow_the_bytes_of_a_pass() -> None:
    _, config = find_model("llama-2-7b")
    predict = Predictor(known_hardware()["a100-80g"], config, "bfloat16", 1024)
    assert predict.dtype("bfloat16") == pytest.approx(1)
    assert 1.7 < (predict.dtype("int8") or 0) < 2.1 < (predict.dtype("int4") or 0) < 3.6
    assert predict.dtype("float32") == pytest.approx(0.5, rel=0.1)
    half = replace(config, layers=config.layers // 2)
    assert predict.checkpoint(half, "dense") == pytest.approx(2, rel=0.05)
    assert 1.4 < predict.checkpoint(config, "2:4") < 16 / 9
    gains = [predict.kv_policy(text) or 0 for text in ("quest@128", "tova@128", "tova@8")]
    assert 1 < gains[0] < gains[1] < gains[2] and predict.kv_policy("quest@8") is None
    assert (predict.kv_dtype("int8") or 0) > 1
    assert predict.exits(1.0, ()) == pytest.approx(1) and 1.5 < predict.exits(0.5, (8,)) < 2
    assert predict.method("no_such_method") is None and (predict.method("eagle3") or 0) > 1.5


def test_predictions_are_anchored_to_the_time_of_plain_decoding() -> None:
    _, config = find_model("llama-2-7b")
    device = known_hardware()["a100-80g"]
    assert Predictor(device, config, "bfloat16", 64).anchored(1).bandwidth == 0, "not calibrated"
    rates = {"fp16": ((1.0, device.bandwidth),), "int8": ((1.0, 1.6 * device.bandwidth),)}
    fast = Predictor(replace(device, matmul_rates=rates), config, "bfloat16", 64)
    plain = fast._plain
    assert fast.anchored(plain / 2).bandwidth == device.bandwidth
    slow = fast.anchored(2 * plain)
    assert slow._plain == pytest.approx(2 * plain, rel=1e-6)
    assert slow.bandwidth == pytest.approx(device.bandwidth / 2, rel=0.05)
    assert 1.5 < (fast.dtype("int8") or 0) < 1.7 < 1.85 < (slow.dtype("int8") or 0) < 2
    assert fast.dtype("int4") == pytest.approx(fast.dtype("int8"), rel=0.02), "the arithmetic takes all of the time"
    assert 2.4 < (slow.dtype("int4") or 0) < 3.5


def test_compressed_checkpoints_are_predicted_by_the_numbers_they_read() -> None:
    _, config = find_model("llama-2-7b")
    predict = Predictor(known_hardware()["a100-80g"], config, "bfloat16", 64)
    h, rank = config.hidden, 512
    thin = replace(config, low_rank=LowRank(qkv=rank, output=rank, gate_up=rank, down=rank))
    factors = rank * ((h + 3 * h) + (h + h) + (h + 2 * config.ffn) + (config.ffn + h))
    dense = 4 * h * h + 3 * h * config.ffn
    saved = build_graph(config).parameters - build_graph(thin).parameters
    assert saved == pytest.approx(config.layers * (dense - factors), rel=1e-6)
    assert predict.checkpoint(thin, "dense") > 3
    sliced = replace(config, shortcuts=True)
    more = build_graph(sliced).parameters - build_graph(config).parameters
    assert more == 2 * config.layers * h * h
    assert predict.checkpoint(sliced, "dense") < 1 < predict.checkpoint(replace(sliced, hidden=h // 2), "dense")


def test_sparsity_and_steps_outside_the_pass_are_predicted() -> None:
    _, config = find_model("llama-2-7b")
    device = known_hardware()["a100-80g"]
    predict = Predictor(device, config, "bfloat16", 64)
    assert predict.sparsity("cats", 0.0) == pytest.approx(1) and predict.sparsity("abacus", 0.5) is None
    cats, teal = (predict.sparsity(method, 0.5) or 0 for method in ("cats", "teal"))
    assert 1.1 < cats < (predict.sparsity("matformer", 0.5) or 0) < teal < 2
    slow = replace(device, drafting={"model bfloat16": {"autoregressive": (0.1, 0.0, 0.0, 0.0)}})
    assert 1 < (Predictor(slow, config, "bfloat16", 64).sparsity("teal", 0.5) or 0) < 1.1


def test_methods_are_predicted_from_what_their_passes_accepted() -> None:
    _, config = find_model("llama-2-7b")
    device = known_hardware()["a100-80g"]
    plain = Predictor(device, config, "bfloat16", 500)
    gains = []
    for tokens in (1.2, 2.0, 3.5):
        known = MeasuredMethod("ngram", "16", tokens, 4.0, (0.9, 0.8, 0.7, 0.6), None, "a run")
        gains.append(replace(plain, measured=known).method("ngram"))
    assert all(gain is not None and 0.9 * t < gain <= t for gain, t in zip(gains, (1.2, 2.0, 3.5), strict=True))
    nothing = MeasuredMethod("ngram", "16", 1.0, 0.0, (), None, "a run")
    assert replace(plain, measured=nothing).method("ngram") is None
