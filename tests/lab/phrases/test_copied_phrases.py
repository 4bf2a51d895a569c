"""Text copied by phrases: the distribution against sums over spans one by one, and likelihoods against all cuts."""

import runpy
from itertools import pairwise
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import torch

from command import run_foretell, tiny_target
from foretell.api import Model
from foretell.engine.request import Request
from foretell.lab.phrases.encoders import (
    HALF,
    PhraseEncoders,
    Phrases,
    PhraseTable,
    generate,
    log_likelihood,
    log_total,
    phrase_log_probabilities,
    phrase_loss,
    train,
)
from foretell.lab.phrases.index import LENGTHS, PIECE, Corpus, Related, States, encode, hashes
from foretell.load import load

TOOL = Path(__file__).parents[3] / "tools" / "measure_phrases.py"
FABLES = [
    "the quick brown fox jumps over the lazy dog and the lazy dog sleeps on, ",
    "a ship sails out of the old harbour while the grey gulls cry over the old harbour wall, ",
    "seven small stones lie in the cold river where the water runs over seven small stones, ",
]


@pytest.fixture(scope="module")
def model() -> Model:
    return load(str(tiny_target()), dtype="float32")


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    return runpy.run_path(str(TOOL))


def random_table(seed: int = 0) -> PhraseTable:
    """Two documents of 12 and 9 tokens of a vocabulary of three."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, (2, 12), generator=generator)
    tokens[1, 9:] = -1
    start, end = (torch.randn(2, 12, HALF, generator=generator) / 8 for _ in range(2))
    return PhraseTable(tokens, start, end)


def queries(count: int) -> torch.Tensor:
    return torch.randn(count, 2 * HALF + 1, generator=torch.Generator().manual_seed(1)) / 4


def spans(table: PhraseTable, query: torch.Tensor) -> list[tuple[tuple[int, ...], float]]:
    """Every phrase and its score, one by one."""
    out = []
    for d, document in enumerate(table.tokens.tolist()):
        for begin in range(len(document)):
            for length in LENGTHS:
                phrase = tuple(document[begin : begin + length])
                if len(phrase) == length and -1 not in phrase:
                    last = table.end[d, begin + length - 1]
                    score = query[:HALF] @ table.start[d, begin] + query[HALF:-1] @ last + query[-1]
                    out.append((phrase, float(score)))
    return out


def test_the_score_of_a_phrase_is_that_of_its_start_and_its_end() -> None:
    table, query = random_table(), queries(1)
    expected = sorted(score for _, score in spans(table, query[0]))
    made = torch.cat(table.scores(query), 1)[0]
    assert sorted(made[made > -torch.inf].tolist()) == pytest.approx(expected, abs=1e-5)
    total = 1 + sum(torch.tensor(expected).exp().tolist())
    assert float(log_total(table.scores(query)).exp()) == pytest.approx(total, rel=1e-5)


def test_equal_runs_alone_have_equal_hashes() -> None:
    text = torch.randint(2, (400,), generator=torch.Generator().manual_seed(2))
    for length in LENGTHS:
        runs = [tuple(r) for r in text.unfold(0, length, 1).tolist()]
        assert len(set(zip(runs, hashes(text, length).tolist(), strict=True))) == len(set(runs))
        assert len(set(hashes(text, length).tolist())) == len(set(runs))


def log_sum_of_cuts(table: PhraseTable, query: torch.Tensor, text: list[int], own: torch.Tensor) -> float:
    """The log-probability of a text, cut by cut."""
    total, phrases = 0.0, [spans(table, q) for q in query]
    totals = [1 + sum(exp(s) for _, s in scored) for scored in phrases]
    for choice in range(2 ** (len(text) - 1)):
        ends = [0, *(i + 1 for i in range(len(text) - 1) if choice >> i & 1), len(text)]
        product = 1.0
        for begin, end in pairwise(ends):
            same = [s for p, s in phrases[begin] if p == tuple(text[begin:end])]
            weights = [float(own[begin])] if end - begin == 1 else same
            product *= sum(map(exp, weights)) / totals[begin]
        total += product
    return log(total)


def test_the_likelihood_is_the_sum_over_all_cuts() -> None:
    table, text = random_table(), torch.tensor([0, 1, 2, 1, 0, 2])
    query, own = queries(len(text)), torch.tensor([-1.0, -0.5, -2.0, -1.5, -1.0, -0.7])
    phrase, token = phrase_log_probabilities(table, query, text)
    expected = log_sum_of_cuts(table, query, text.tolist(), own)
    assert float(log_likelihood(phrase, token + own)) == pytest.approx(expected, abs=1e-4)


def test_repetition_counts_repeated_runs_of_words(tool: dict[str, Any]) -> None:
    assert tool["repetition"]("a b a b c", 2) == pytest.approx(1 / 4)
    assert tool["diversity"]("a b c d e") == 1
    assert tool["diversity"]("a b a b a b") == pytest.approx((2 / 5) * (2 / 4) * (2 / 3))


def test_without_phrases_the_model_writes_alone(model: Model) -> None:
    prompt = model.codec.encode("hello there")
    expected = model.engine().complete([Request([256, *prompt], max_new_tokens=12)])
    written = generate(prompt, States(model), None, 12)
    assert written == [[token] for token in expected[0].tokens]


def test_a_phrase_of_full_weight_is_copied(model: Model) -> None:
    """The bias decides alone: all phrases, or none."""
    states, encoders = States(model), PhraseEncoders(model.config.hidden).eval().requires_grad_(False)
    pieces = [model.codec.encode(text * 2)[:PIECE] for text in FABLES]
    table = encoders.encode_phrases(encode(pieces, states))
    prompt = pieces[0][:20]
    encoders.bias.bias.fill_(50)
    written = generate(prompt, states, Phrases(encoders, table), 24)
    assert sum(map(len, written)) >= 24
    for phrase in written:
        assert len(phrase) in LENGTHS and any(bytes(phrase) in bytes(piece) for piece in pieces)
    encoders.bias.bias.fill_(-100)
    plain = generate(prompt, states, None, 24)
    assert generate(prompt, states, Phrases(encoders, table), 24) == plain
    assert generate(prompt, states, Phrases(encoders, table), 24, 0.9, 3) != plain


def test_the_probabilities_of_choices_sum_to_one(model: Model) -> None:
    encoders = PhraseEncoders(model.config.hidden).eval().requires_grad_(False)
    encoders.bias.bias.fill_(-1)
    states = States(model)
    phrases = Phrases(encoders, encoders.encode_phrases(encode([model.codec.encode(FABLES[0])], states)))
    states.restart()
    logs = states.read(model.codec.encode("the"), scored=True)[2][-1]
    choices = phrases.extend(logs, states.state)
    assert float(choices.exp().sum()) == pytest.approx(1, abs=1e-4)
    assert len(choices) == len(logs) + len({tuple(t) for t in phrases.tokens})


def corpus_of(model: Model, length: int = 64) -> tuple[Corpus, list[list[int]]]:
    """Pieces of three fables, each begun elsewhere: what follows is found in pieces of the same fable."""
    pieces = [model.codec.encode((text * 4)[i : i + length]) for i in range(0, 40, 4) for text in FABLES]
    return encode(pieces, States(model)), pieces


@pytest.mark.exhaustive
def test_training_finds_the_phrases_that_come_next(model: Model) -> None:
    corpus, pieces = corpus_of(model)
    losses = list[float]()
    related = Related(pieces[3:], model.config.vocab)
    encoders = train(corpus[list(range(3, 30))], pieces[3:], related, 40, 0, lambda _, loss: losses.append(loss))
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    # A piece of no training: phrases of its own fable are likelier than those of the others in their places.
    states = States(model)
    states.restart()
    before = states.read(pieces[0])[0]
    rest, query = torch.tensor(pieces[0][32:]), encoders.encode_prefixes(before[32:])
    table = encoders.encode_phrases(corpus[list(range(3, 30))])
    other = PhraseTable(table.tokens, table.start.roll(1, 0), table.end.roll(1, 0))
    own = torch.full((len(rest),), -5.0)
    logs = []
    for one in (table, other):
        phrase, token = phrase_log_probabilities(one, query, rest)
        logs.append(float(log_likelihood(phrase, token + own)) / len(rest))
    assert logs[0] > logs[1] + 0.3 and logs[0] > -4.0


def test_no_text_of_a_batch_is_a_document_of_it(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, pieces = corpus_of(model)
    sizes = list[int]()

    def check(encoders: PhraseEncoders, texts: Corpus, documents: Corpus) -> torch.Tensor:
        own = {tuple(t) for t in texts.tokens.tolist()}
        assert not own & {tuple(t) for t in documents.tokens.tolist()}
        sizes.append(len(documents.tokens))
        loss: torch.Tensor = phrase_loss(encoders, texts, documents)
        return loss

    monkeypatch.setattr("foretell.lab.phrases.encoders.phrase_loss", check)
    train(corpus, pieces, Related(pieces, model.config.vocab), 4, 1, lambda *_: None)
    assert len(sizes) == 4 and min(sizes) >= 8


def test_the_loss_is_that_of_all_cuts_of_all_texts(model: Model) -> None:
    """Against the sum cut by cut, of a long text and of one that is shorter than the longest phrase."""
    pieces = [model.codec.encode(text) for text in ("old dog", "a fox")]
    corpus = encode([*pieces, model.codec.encode("a fox, old dog")], States(model))
    encoders = PhraseEncoders(model.config.hidden).eval().requires_grad_(False)
    encoders.bias.bias.fill_(-1)
    table, total = encoders.encode_phrases(corpus[[2]]), 0.0
    short = PhraseTable(table.tokens[:, :14], table.start[:, :14], table.end[:, :14])
    for row, piece in enumerate(pieces):
        query, own = encoders.encode_prefixes(corpus.before[row, : len(piece)]), corpus.own[row]
        total += log_sum_of_cuts(short, query, piece, own)
    loss = float(phrase_loss(encoders, corpus[[0, 1]], corpus[[2]]))
    assert loss == pytest.approx(-total / sum(map(len, pieces)), rel=1e-4)


def test_the_log_probabilities_of_documents_are_those_of_the_model(model: Model) -> None:
    piece = model.codec.encode("the old dog")
    corpus, states, logs = encode([piece], States(model)), States(model), list[float]()
    after = states.restart()
    for token in piece:
        logs.append(float(after[-1, token]))
        after = states.read([token], scored=True)[2]
    assert corpus.own[0, : len(piece)].tolist() == pytest.approx(logs, abs=1e-4)
    assert not corpus.own[0, len(piece) :].any()


def test_the_commands_train_and_write(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for i, text in enumerate(FABLES):
        (texts / f"{i}.txt").write_text(text * 14)
    asked = ("--text", texts, "--model", tiny_target(), "--tokens", "4000")
    out = tmp_path / "phrases"
    result = run_foretell("phrases", "train", *asked, "--out", out, "--steps", "3")
    assert result.exit_code == 0 and "3 steps, loss" in result.output, result.output
    assert "foretell" in (out / "README.md").read_text()
    result = run_foretell("phrases", "generate", out, "the quick", *asked, "--max-new-tokens", "9")
    assert result.exit_code == 0 and result.output.startswith("the quick"), result.output
    result = run_foretell("phrases", "generate", tmp_path, "the quick", *asked)
    assert result.exit_code == 1 and "no phrase encoders" in result.output, result.output
