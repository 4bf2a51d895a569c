"""APAR's training: answers are cut at their lists, adapters compute what the written target computes."""

import json
import re
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path

import numpy as np
import pytest
import torch
from training_helpers import check_resume, settings

from command import run_foretell, save_tiny_model
from foretell.api import Model
from foretell.load import load
from foretell.plan.control_tokens import CHILD, FORK, ControlTokens, choose_control_tokens, find_control_tokens
from foretell.speculator.network.base import TargetInfo
from foretell.testing import letter_codec
from foretell.train.data.dataset import Dataset, DatasetManifest, DatasetWriter, Document, DocumentRecord
from foretell.train.data.forks import documented_answers, fork_text, forked_documents
from foretell.train.loop.settings import TrainingSettings
from foretell.train.recipe.apar import AparRecipe
from foretell.train.recipe.base import RecipeSetup
from helpers import all_logits

ANSWER = """Some tips:

1. **Plan ahead**: Make a list of what you need, and stick to it.
2. Cook at home:
It is cheaper, it is fun, and friends like it.

- Wait: no.
- Buy less: Things that nobody uses cost money every month, too.

Good luck."""
HEADS = ["Some tips:\n\n1. **Plan ahead**:", "\n2. Cook at home:", "\n\n- Wait: no.\n- Buy less:"]


def save_model_with_spare_tokens(path: Path) -> Path:
    """A tiny model with two special tokens that its chat template does not use."""
    save_tiny_model(path, vocab=259)
    state = json.loads((path / "tokenizer.json").read_text("utf-8"))
    like = state["added_tokens"][0]
    state["added_tokens"] += [like | {"id": i, "content": f"<filler {i}>"} for i in (257, 258)]
    (path / "tokenizer.json").write_text(json.dumps(state))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_with_spare_tokens(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load(str(folder), dtype="float32")


def test_lists_are_cut_at_their_heads() -> None:
    forked = fork_text(ANSWER)
    assert forked is not None and forked.whole == ANSWER
    assert [fork.text for fork in forked.forks] == HEADS and forked.rest == "\n\nGood luck."
    assert forked.forks[1].detail == "\nIt is cheaper, it is fun, and friends like it."


def test_lists_of_the_documentation_of_installed_packages_become_answers() -> None:
    sources = [text for d in distributions() if (text := d.read_text("METADATA"))]
    made = [(source, *pair) for source in sources for pair in documented_answers(source)]
    assert len(made) >= 10 and any("Typer requires only a few dependencies:\n\n1. **" in a for _, _, a in made)
    for source, question, answer in made:
        assert fork_text(answer) is not None and question.endswith("?")
        known = set(re.findall(r"[A-Za-z]{3,}", source))
        assert set(re.findall(r"[A-Za-z]{3,}", answer)) <= known, "all words are the documentation's"


REST = """Signals
-------

The ``Order`` class sends:

* :ref:`created <signal>` -- when an order is
  made for the *first* time, by anyone
* **paid**: when the money of an order has arrived

Other
=====
- no head
- here: short
"""


def test_a_list_of_restructured_text_is_written_as_chat_models_do() -> None:
    wanted = "The Order class sends:\n\n1. **created**: when an order is made for the first time, by anyone\n"
    wanted += "2. **paid**: when the money of an order has arrived"
    assert list(documented_answers(REST)) == [("What should I know about Signals?", wanted)]


PARAGRAPHS = """Bees matter. They carry pollen from one flower to the next one.

They live in hives. A hive has one queen, and she lays all of the eggs.

One sentence alone."""


def test_paragraphs_are_cut_after_their_first_sentence() -> None:
    forked = fork_text(PARAGRAPHS)
    assert forked is not None and forked.whole == PARAGRAPHS
    assert [fork.text for fork in forked.forks] == ["Bees matter.", "\n\nThey live in hives."]
    assert forked.forks[0].detail == " They carry pollen from one flower to the next one."
    assert forked.rest == "\n\nOne sentence alone."


@pytest.mark.parametrize(
    ("text", "again"), [(ANSWER, "\n\n3. Cook at home: Once more"), (PARAGRAPHS, "\n\nBees matter. Yes")]
)
def test_a_text_ends_where_a_head_comes_again(text: str, again: str) -> None:
    forked = fork_text(text + again + " with a detail of some words.")
    assert forked is not None and forked.whole == text


@pytest.mark.parametrize(
    "text",
    [
        "No list here: just a sentence with quite a few words in it.",
        "1. Only one: item with enough words to be a detail.",
        "1. A: too short\n2. B: short, too",
        ANSWER + "\n```python\nx = 1\n```",
        ANSWER + "\nSee https://example.org/.",
        "1. " + "word " * 13 + ": detail of quite a few words here\n" * 2,
    ],
)
def test_other_texts_are_not_cut(text: str) -> None:
    assert fork_text(text) is None


def test_documents_of_an_answer(model: Model) -> None:
    codec, tokens = model.codec, choose_control_tokens(model.codec, model.eos)
    assert tokens == ControlTokens(257, 258) and find_control_tokens(codec) is None
    prompt = codec.encode("question")
    answer = Document(np.array([*prompt, *codec.encode(ANSWER), 256]), len(prompt))
    main, *details = forked_documents(answer, 7, codec, tokens, model.eos)
    assert [r.number for r in (main, *details)] == [7, 8, 9, 10] and main.start == len(prompt)
    assert codec.decode(main.tokens[main.start : -1]) == "".join(HEADS) + "\n\nGood luck."
    assert main.tokens.count(257) == 3 and 258 not in main.tokens
    for i, record in enumerate(details):
        assert record.tokens[record.start - 2 : record.start] == [257, 258] and record.tokens[-1] == 256
        assert main.tokens[: record.start - 1] == record.tokens[: record.start - 1]
        forked = fork_text(ANSWER)
        assert forked is not None and codec.decode(record.tokens[record.start : -1]) == forked.forks[i].detail
    sampled = forked_documents(replace(answer, greedy=False), 0, codec, tokens, model.eos)
    assert not any(record.greedy for record in sampled)


def test_a_cut_answer_ends_before_its_last_line(model: Model) -> None:
    codec, tokens = model.codec, choose_control_tokens(model.codec, model.eos)
    cut = ANSWER.removesuffix(" month, too.\n\nGood luck.")
    main, *details = forked_documents(Document(np.array(codec.encode(cut)), 0), 0, codec, tokens, model.eos)
    assert codec.decode(main.tokens[:-1]) == "".join(HEADS[:2]) + "\n\n- Wait: no." and main.tokens[-1] == 256
    assert len(details) == 2 and all(record.tokens[-1] == 256 for record in details)
    plain = codec.encode("A plain answer that was cut")
    (same,) = forked_documents(Document(np.array(plain), 0), 0, codec, tokens, model.eos)
    assert list(same.tokens) == plain


def test_a_tokenizer_without_spare_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="two special tokens"):
        choose_control_tokens(letter_codec(7), (0,))


def answers(path: Path, model: Model) -> Path:
    """A data set of 24 answers, every second one with a list."""
    manifest = DatasetManifest.of(model, "prompts")
    with DatasetWriter(path, manifest) as writer:
        for i in range(24):
            prompt = model.tokens(f"question {i}")
            text = ANSWER if i % 2 else f"A plain answer, number {i}."
            tokens = [*prompt, *model.codec.encode(text), 256]
            writer.add(DocumentRecord(number=i, tokens=tokens, start=len(prompt)))
        writer.seal()
    return path


def test_the_commands_make_a_model_that_the_plan_decodes(folder: Path, model: Model, tmp_path: Path) -> None:
    source, forked, out = answers(tmp_path / "answers", model), tmp_path / "forked", tmp_path / "tuned"
    result = run_foretell("data", "fork", source, "--out", forked, "--model", folder)
    assert result.exit_code == 0 and "12 of 24 answers have forks, 36 in all" in result.output, result.output
    assert len(Dataset.open(forked)) == 60
    (rest := tmp_path / "signals.rst").write_text(REST)
    result = run_foretell("data", "fork", "--text", rest, "--out", tmp_path / "documented", "--model", folder)
    assert "1 of 1 answers have forks, 2 in all" in result.output, result.output
    assert len(Dataset.open(tmp_path / "documented")) == 3
    refused = run_foretell("data", "fork", "--out", tmp_path / "none", "--model", folder)
    assert refused.exit_code != 0 and "documentation with --text PATH" in refused.output + refused.stderr
    sizes = ("--steps", "30", "--lr", "0.01", "--warmup", "2", "--draft-vocab", "0", "--batch-tokens", "1024")
    measured = ("--measure-prompts", "2", "--measure-tokens", "12", "--precision", "no", "--set", "rank=8")
    result = run_foretell("train", "apar", "--data", forked, "--out", out, "--model", folder, *sizes, *measured)
    assert result.exit_code == 0, result.output
    curve = [float(line.split(",")[2]) for line in (out / "curve.csv").read_text().splitlines()[1:]]
    assert curve[-1] < curve[0] - 0.3
    tuned = load(str(out / "target"), dtype="float32")
    assert find_control_tokens(tuned.codec) == ControlTokens(257, 258)
    assert tuned.codec.decode([257], skip_special_tokens=False) == FORK
    assert tuned.codec.decode([258], skip_special_tokens=False) == CHILD
    (answer,) = tuned.generate("question 3", max_new_tokens=20, plan="apar")
    assert answer.plan is not None and answer.plan.type == "apar" and not answer.lossless
    assert (out / "README.md").read_text().startswith("# apar for ")


def test_a_resumed_training_ends_with_the_same_weights(folder: Path, model: Model, tmp_path: Path) -> None:
    source, forked = answers(tmp_path / "answers", model), tmp_path / "forked"
    assert run_foretell("data", "fork", source, "--out", forked, "--model", folder).exit_code == 0

    def wanted(name: str) -> TrainingSettings:
        return settings(
            tmp_path / name, forked, recipe="apar", options={"rank": "2"}, model=str(folder), draft_vocab=0,
            measure_every=0, measure_prompts=2, measure_tokens=6, features="stream",
        )  # fmt: skip

    check_resume(tmp_path, wanted, 5)


def test_the_merged_target_computes_what_was_trained(model: Model) -> None:
    c = model.config
    card = TargetInfo(name="toy", hidden=c.hidden, vocab=c.vocab, layers=c.layers)
    ends = model.checkpoint.embedding_and_head(torch.float32)
    recipe = AparRecipe.build(RecipeSetup(card, c, ends, model.checkpoint, None, 0, {"rank": "4"}, model.codec))
    torch.manual_seed(0)
    for parameter in recipe.network.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    tokens = [*model.codec.encode("hello"), 257, 258, *model.codec.encode("x")]
    token = torch.tensor([tokens])
    with torch.no_grad():
        trained = recipe.module(token, torch.ones_like(token, dtype=torch.bool))
    merged = recipe.network.merge(model.checkpoint.decoder(torch.float32))
    np.testing.assert_allclose(trained.numpy(), all_logits(merged, tokens), rtol=1e-3, atol=1e-3)
