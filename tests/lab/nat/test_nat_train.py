"""Losses and training of sequence-to-sequence models, their folders and their commands."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from nat_helpers import WORDS, config, model, seeded, targets
from safetensors.torch import load_file
from typer.testing import CliRunner

from foretell.cli.app import app
from foretell.lab.nat.align import fertilities
from foretell.lab.nat.checkpoint import load_model, save_model
from foretell.lab.nat.evaluate import edit_distance
from foretell.lab.nat.network import Decoded, Kind, NatModel
from foretell.lab.nat.number_words import STYLES, Style, generate_pairs, spell
from foretell.lab.nat.objective import KINDS, PairBatch, corrupt, glance, loss_of
from foretell.lab.nat.pairs import PAD, Pair, read_pairs, write_pairs
from foretell.lab.nat.train import NatSettings, NatTrainer


def batch(kind: Kind) -> PairBatch:
    target, length = targets()
    source = torch.tensor([[5, 6, 7], [8, 9, 6], [6, PAD, PAD]])
    fertility = torch.tensor([[2, 1, 1], [3, 3, 3], [1, 0, 0]]) if kind == "fertility" else None
    return PairBatch(source, target, length, fertility, smoothing=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_falls_and_reaches_all_that_the_kind_uses(kind: Kind) -> None:
    with seeded():
        made = NatModel(config(kind).model_copy(update={"dropout": 0.0}))
        optimizer, losses = torch.optim.Adam(made.parameters(), lr=1e-2), list[float]()
        for _ in range(30):
            loss = loss_of(made, batch(kind))
            loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step()
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    unused = {n for n, p in made.named_parameters() if p.grad is None}
    assert unused == ({"length_head.weight", "length_head.bias"} if kind in ("autoregressive", "fertility") else set())


def test_glancing_reveals_a_share_of_what_is_wrong() -> None:
    target, _ = targets()
    wrong = torch.where(target == PAD, PAD, target % 10 + 5)
    wrong[1, :3] = target[1, :3]
    errors = ((wrong != target) & (target != PAD)).sum(1)
    with seeded():
        shown = glance(target, wrong, 0.5)
    assert torch.equal(shown.sum(1), (0.5 * errors).round().long()) and not shown[target == PAD].any()
    assert not glance(target, target, 0.5).any()


def test_half_of_the_tokens_are_corrupted() -> None:
    target = torch.full((4000, 10), 7)
    with seeded():
        noisy = corrupt(target, 1005)
    assert float((noisy != target).float().mean()) == pytest.approx(0.5, abs=0.02) and int(noisy.min()) >= 5
    rates = (noisy != target).float().mean(1)
    assert float((rates < 0.25).float().mean()) == pytest.approx(0.25, abs=0.05), "the rate is uniform per row"


def test_no_gradient_flows_through_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    with seeded():
        made, seen = NatModel(config("sundae")), list[torch.Tensor]()
        original = made.decode

        def decode(inputs: torch.Tensor, *rest: Any) -> Decoded:
            seen.append(inputs)
            return original(inputs, *rest)

        monkeypatch.setattr(made, "decode", decode)
        loss_of(made, batch("sundae"))
    assert len(seen) == 2
    # Both inputs are looked up in the embedding: nothing else leads to them.
    assert all("Embedding" in type(inputs.grad_fn).__name__ for inputs in seen)


def test_fertilities_add_up_to_the_target(tmp_path: Path) -> None:
    source, target = [[5, 6, 7], [8]], [[5, 6, 7, 8, 9, 10, 11], [9, 9]]
    for aligner in (None, model("autoregressive").float()):
        found = fertilities(source, target, 4, aligner)
        assert [sum(f) for f in found] == [7, 2] and max(map(max, found)) <= 4
        assert [len(f) for f in found] == [3, 1]
    with pytest.raises(ValueError, match="fertilities reach to 4"):
        fertilities([[5]], [[5] * 5], 4, None)


@pytest.mark.parametrize(
    ("number", "style", "expected"),
    [
        (0, Style(), "zero"),
        (19, Style(), "nineteen"),
        (105, Style(joined_by_and=True), "one hundred and five"),
        (1005, Style(joined_by_and=True), "one thousand and five"),
        (1984, Style(hundreds=True), "nineteen hundred eighty four"),
        (3000, Style(hundreds=True), "three thousand"),
        (100_000_170, Style(article=True), "a hundred million a hundred seventy"),
        (10**12 - 1, Style(), " ".join(["nine hundred ninety nine " + s for s in ("billion", "million", "thousand")])
         + " nine hundred ninety nine"),
    ],
)  # fmt: skip
def test_numbers_are_spelled(number: int, style: Style, expected: str) -> None:
    assert spell(number, style) == expected


def test_pairs_have_all_spellings_or_one(tmp_path: Path) -> None:
    all_styles = list(generate_pairs("number_to_words", 40, 1, all_styles=True))
    assert {len(p.references) for p in all_styles} <= set(range(1, len(STYLES) + 1))
    assert any(len(p.references) > 2 for p in all_styles)
    one = list(generate_pairs("number_to_words", 40, 2, exclude={p.source for p in all_styles}))
    assert all(len(p.references) == 1 for p in one) and not {p.source for p in one} & {p.source for p in all_styles}
    write_pairs(tmp_path / "pairs.tsv", all_styles)
    assert read_pairs(tmp_path / "pairs.tsv") == all_styles
    back = next(generate_pairs("words_to_number", 1, 2))
    assert back == Pair(one[0].references[0], (one[0].source,))


def test_distances_of_words() -> None:
    assert edit_distance(["a", "b", "c", "d"], ["a", "c", "d"]) == 1
    assert edit_distance([], ["a", "b"]) == 2 and edit_distance(["x", "y"], ["y", "x"]) == 2
    assert edit_distance(list("kitten"), list("sitting")) == 3


def settings(folder: Path, name: str, **values: object) -> NatSettings:
    data = folder / "pairs.tsv"
    if not data.is_file():
        write_pairs(data, generate_pairs("number_to_words", 60, 0))
    sizes = {"hidden": 16, "heads": 2, "layers": 1, "ffn": 16, "batch": 8, "warmup": 2}
    return NatSettings.model_validate(
        {"kind": "cmlm", "data": str(data), "out": str(folder / name), "steps": 9, **sizes, **values}
    )


def test_a_resumed_training_is_one_that_never_stopped(tmp_path: Path) -> None:
    whole = NatTrainer(settings(tmp_path, "whole"))
    whole.run()
    part = NatTrainer(settings(tmp_path, "part"))
    with pytest.raises(KeyboardInterrupt):
        part.run(lambda: len(part.curve) == 4)
    rest = NatTrainer(settings(tmp_path, "part"))
    rest.run()
    assert [r.loss for r in rest.curve] == [r.loss for r in whole.curve] and len(rest.curve) == 9
    for name, tensor in load_file(tmp_path / "whole" / "model.safetensors").items():
        torch.testing.assert_close(load_file(tmp_path / "part" / "model.safetensors")[name], tensor, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"lr was 0\.002 there and is 0\.1 here"):
        NatTrainer(settings(tmp_path, "part", lr=0.1)).run()


def test_a_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = model("fertility").float()
    save_model(tmp_path, made)
    found = load_model(tmp_path)
    assert found.config == made.config
    assert all(torch.equal(a, b) for a, b in zip(found.state_dict().values(), made.state_dict().values(), strict=True))
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match="missing or damaged"):
        load_model(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two untrained models of the same words, and pairs."""
    folder = tmp_path_factory.mktemp("nat")
    for name in ("autoregressive", "cmlm", "fertility"):
        made = config(name).model_copy(update={"source_words": WORDS, "max_target": 6})
        with seeded(1):
            save_model(folder / name, NatModel(made))
    write_pairs(folder / "pairs.tsv", [Pair("a b", ("c d", "d")), Pair("c", ("a",))])
    return folder


def run(*arguments: str | Path) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["nat", *map(str, arguments)])
    return found.exit_code, found.output


def test_commands_translate_and_evaluate(trained: Path) -> None:
    code, text = run("translate", trained / "autoregressive", "a b", "--drafter", trained / "cmlm", "--json")
    plain = run("translate", trained / "autoregressive", "a b", "--json")[1]
    assert code == 0 and json.loads(text)["target"] == json.loads(plain)["target"]
    assert "read as <unk>: zebra" in run("translate", trained / "autoregressive", "a zebra")[1]
    code, text = run(
        "evaluate",
        trained / "autoregressive",
        "--data",
        trained / "pairs.tsv",
        "--drafter",
        trained / "fertility",
        "--json",
    )
    assert code == 0 and json.loads(text)["same_as_verifier"] == 1.0
    code, text = run("evaluate", trained / "cmlm", "--data", trained / "pairs.tsv", "--iterations", "2")
    assert code == 0 and "exact match" in text and "milliseconds per source" in text and "drafter" not in text
    assert (
        "passes per batch of 4 sources"
        in run("evaluate", trained / "cmlm", "--data", trained / "pairs.tsv", "--batch", "4")[1]
    )
    measured = ("evaluate", trained / "cmlm", "--data", trained / "pairs.tsv", "--iterations", "2", "--json")
    alone, together = (json.loads(run(*measured, "--batch", n)[1])["tokens_per_pass"] for n in ("1", "4"))
    assert together == pytest.approx(alone, rel=0.1), "passes of a batch count for each of its sources"


def test_the_command_trains_and_distils(tmp_path: Path) -> None:
    pairs, few = tmp_path / "pairs.tsv", ("--hidden", "16", "--heads", "2", "--layers", "1", "--ffn", "16")
    assert run("data", "--pairs", "40", "--out", pairs)[0] == 0
    assert run("train", "autoregressive", "--data", pairs, "--steps", "2", "--out", tmp_path / "ar", *few)[0] == 0
    assert "autoregressive" in (tmp_path / "ar" / "README.md").read_text()
    assert run("data", "--from", pairs, "--teacher", tmp_path / "ar", "--out", tmp_path / "distilled.tsv")[0] == 0
    assert all(len(p.references) == 1 for p in read_pairs(tmp_path / "distilled.tsv"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "cmlm", "--data", "pairs.tsv", "--out", "x"), "give the length of the training once"),
        (("train", "xyz", "--data", "pairs.tsv", "--steps", "1", "--out", "x"), "found 'xyz'"),
        (("train", "cmlm", "--data", "pairs.tsv", "--steps", "1", "--aligner", "y", "--out", ""), "the kind fertility"),
        (("translate", "nothing", "a"), "foretell nat train writes such a folder"),
        (("translate", "cmlm", "a", "--drafter", "cmlm"), "this one is of the kind cmlm"),
        (("translate", "autoregressive", "a", "--drafter", "autoregressive"), "a drafter is of another kind"),
        (("translate", "fertility", "a", "--fertility-samples", "3"), "give --teacher"),
        (("translate", "cmlm", " "), "a source has no words"),
        (("translate", "cmlm", "a a a a a a a a"), "a source has 8 tokens"),
        (
            ("evaluate", "autoregressive", "--data", "pairs.tsv", "--drafter", "cmlm", "--batch", "2"),
            "leave --batch out",
        ),
        (("data", "--task", "numbers_to_word", "--out", "y"), "did you mean 'number_to_words'"),
        (("data", "--from", "pairs.tsv", "--out", "y"), "so it needs --teacher"),
        (("data", "--from", "pairs.tsv", "--teacher", "x", "--pairs", "3", "--seed", "1", "--out", "y"),
         "--pairs, --seed would have no effect: --from names the pairs to distil; leave them out"),
        (("data", "--teacher", "x", "--all-references", "--out", "y"), "--all-references would have no effect"),
        (("translate", "autoregressive", "a", "--iterations", "4"),
         "--iterations would have no effect: a model of the kind autoregressive decodes here"),
        (("translate", "cmlm", "a", "--temperature", "1"), "--temperature would have no effect"),
        (("translate", "cmlm", "a", "--teacher", "autoregressive"), "--teacher would have no effect"),
        (("translate", "fertility", "a", "--teacher", "autoregressive"), "several --fertility-samples, and there is"),
        (("translate", "fertility", "a", "--length-candidates", "3"), "--length-candidates would have no effect"),
        (("evaluate", "autoregressive", "--data", "pairs.tsv", "--drafter", "cmlm", "--iterations", "2"),
         "a model of the kind cmlm drafts here"),
        (("train", "cmlm", "--data", "pairs.tsv", "--steps", "1", "--hidden", "65", "--out", "x"),
         "sizes of the model: 4 heads do not divide a width of 65"),
        (("train", "cmlm", "--data", "pairs.tsv", "--steps", "1", "--out", "."), "there is something already"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(
    trained: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(trained)
    code, text = run(*arguments)
    assert code == 1 and message in " ".join(text.split()) and "Traceback" not in text


def test_damaged_pairs_are_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "pairs.tsv"
    for text, message in (("a b c\n", "line 1: a line is a source, a tab"), ("", "no pairs here"), ("a\t\n", "line 1")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_pairs(path)
    path.write_bytes(b"a\t\xff\n")
    with pytest.raises(ValueError, match=r"pairs\.tsv: not UTF-8 text \(byte 2\)"):
        read_pairs(path)


@pytest.mark.parametrize("task", ["number_to_words", "words_to_number"])
def test_numbers_that_are_all_excluded_are_refused(task: str) -> None:
    known = {pair.source for pair in generate_pairs(task, 300, 0, digits=1)}
    with pytest.raises(ValueError, match="all numbers of at most 1 digits are excluded"):
        next(generate_pairs(task, 1, 1, digits=1, exclude=known))
    assert next(generate_pairs(task, 1, 1, digits=2, exclude=known)).source not in known
