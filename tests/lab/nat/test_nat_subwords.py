"""Parts of words, BLEU, and the grammar of the comparison."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command import expect_error, run_foretell
from foretell.lab.nat.checkpoint import load_model, require_same_words
from foretell.lab.nat.evaluate import bleu
from foretell.lab.nat.pairs import UNKNOWN, Pair, Subwords, write_pairs

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))
import english_to_german as grammar  # type: ignore[import-not-found]
import measure_nat  # type: ignore[import-not-found]

TEXTS = ["Gartentür Haustür Haus Garten", "Garten Haus", "Schultür"]


def test_parts_of_words_come_back_and_are_shared() -> None:
    learned = Subwords.learn(TEXTS, 30)
    for text in [*TEXTS, "Schulhaus"]:
        ids = learned.encode(text)
        assert learned.decode(ids) == text and min(ids) > UNKNOWN and max(ids) < len(learned)
    assert len(learned.encode("Haus")) < 4, "a frequent word is few parts"
    assert len(Subwords.learn(TEXTS, 15).encode("Haus")) >= len(learned.encode("Haus"))
    again = Subwords(learned.table)
    assert again.words == learned.words and again.encode(TEXTS[0]) == learned.encode(TEXTS[0])
    assert learned.unknown_words("Haus raus") == [] and learned.unknown_words("Haus Zug") == ["Zug"]
    assert learned.decode([*learned.encode("Haus"), UNKNOWN, 0, 2]) == "Haus <unk> </s>"


def test_models_on_parts_of_words_share_them(tmp_path: Path) -> None:
    train, out = tmp_path / "train.tsv", tmp_path / "ar"
    write_pairs(train, grammar.generate_pairs(60, 0))
    sizes = ("--data", train, "--steps", "2", "--hidden", "16", "--heads", "2", "--ffn", "32", "--layers", "1")
    assert run_foretell("nat", "train", "autoregressive", *sizes, "--subwords", "120", "--out", out).exit_code == 0
    assert run_foretell("nat", "train", "cmlm", *sizes, "--words-of", out, "--out", tmp_path / "c").exit_code == 0
    one, other = load_model(out), load_model(tmp_path / "c")
    assert len(one.config.target) == 120
    require_same_words(one, other, out)
    both = ("--words-of", out, "--subwords", "9")
    assert "leave --subwords out" in expect_error("nat", "train", "glat", *sizes, *both, "--out", tmp_path / "g")
    run_foretell("nat", "train", "cmlm", *sizes, "--subwords", "60", "--out", tmp_path / "d")
    drafted = ("nat", "evaluate", out, "--data", train, "--drafter", tmp_path / "d")
    assert "--words-of" in expect_error(*drafted)


def test_bleu_is_that_of_a_formula() -> None:
    pytest.importorskip("sacrebleu")
    pairs = [
        Pair("a", ("der alte Mann sieht ein Haus", "ein Haus sieht der alte Mann heute")),
        Pair("b", ("das ist gut ja",)),
    ]
    assert bleu([p.references[0] for p in pairs], pairs) == pytest.approx(100)
    texts = ["der alte Mann sah ein Haus", "das ist gut ja"]
    # Matches of 1 to 4 words, clipped by either reference, of all that there are; equal lengths, so no penalty.
    matched, total = np.array([9, 6, 3, 1]), np.array([10, 8, 6, 4])
    assert bleu(texts, pairs) == pytest.approx(100 * np.exp(np.log(matched / total).mean()))


def clause(**parts: object) -> Any:
    given = {"tense": "present", "company": None, "adverb": None, **parts}
    return grammar._Clause(**given)


def noun(name: str, determiner: str, plural: bool = False, adjective: str = "", modifier: str = "") -> object:
    tables = (grammar._NOUNS, grammar._ADJECTIVES, grammar._MODIFIERS)
    at = [
        next((i for i, row in enumerate(t) if row[0] == w), None)
        for t, w in zip(tables, (name, adjective, modifier), strict=True)
    ]
    return grammar._Noun(at[0], determiner, plural, at[1], at[2])


def verb(third: str) -> int:
    return next(i for i, row in enumerate(grammar._VERBS) if row[0] == third)


def test_german_is_what_a_speaker_wrote() -> None:
    plain, other = grammar.Wording(), grammar.Wording(True, True, True)
    invite = clause(
        subject=noun("friend", "this", True), verb=verb("invites"), tense="future",
        what=noun("doctor", "a", adjective="tired"), adverb=3,
    )  # fmt: skip
    assert " ".join(invite.english()) == "these friends will invite a tired doctor soon"
    assert " ".join(invite.german(plain, False)) == "diese Freunde werden bald einen müden Arzt einladen"
    assert " ".join(invite.german(other, False)) == "bald werden diese Freunde einen müden Mediziner einladen"
    fetch = clause(
        subject=noun("woman", "the"), verb=verb("fetches"), tense="past", what=noun("car", "my", adjective="red"),
        company=noun("child", "a", True),
    )  # fmt: skip
    assert " ".join(fetch.german(plain, False)) == "die Frau holte mein rotes Auto mit Kindern ab"
    assert " ".join(fetch.german(plain, True)) == "die Frau mein rotes Auto mit Kindern abholte"
    assert " ".join(fetch.german(other, True)) == "die Frau meinen roten Wagen mit Kindern abgeholt hat"
    paint = clause(subject=noun("child", "a"), verb=verb("paints"), what=noun("door", "the", modifier="garden"))
    assert " ".join(paint.english()) == "a child paints the garden door"
    assert " ".join(paint.german(other, True)) == "ein Kind die Gartenpforte malt"


def test_pairs_are_reproducible_and_held_out() -> None:
    train = list(grammar.generate_pairs(300, 0))
    assert train == list(grammar.generate_pairs(300, 0)) and {len(p.references) for p in train} == {1}
    known = {p.source for p in train}
    test = list(grammar.generate_pairs(300, 0, True, known))
    assert not known & {p.source for p in test} and {len(p.references) for p in test} <= {1, 2, 4, 8}
    assert np.mean([len(p.references) for p in test]) > 3


@pytest.mark.exhaustive
def test_the_comparison_trains_measures_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {
        "pairs": 120,
        "test-pairs": 4,
        "timed-pairs": 2,
        "minutes": 0.005,
        "subwords": 120,
        "hidden": 32,
        "layers": 1,
    }
    given = [*(f"--{name}={value}" for name, value in sizes.items()), "--out", str(tmp_path)]
    for name, pairs in (("train.tsv", 120), ("distilled.tsv", 60)):
        write_pairs(tmp_path / name, grammar.generate_pairs(pairs, 0))
    measure_nat.main(given)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(measure_nat._ROWS) + len(measure_nat._DRAFTERS)
    assert rows[1].startswith("| autoregressive |  |") and rows[1].endswith("| 1.00 | 1.00 |")
    assert all("100.0% greedy's" in row for row in rows if "drafted by" in row)
    written = (tmp_path / "cmlm" / "model.safetensors").read_bytes()
    measure_nat.prepare(measure_nat.parse(given), tmp_path)
    assert (tmp_path / "cmlm" / "model.safetensors").read_bytes() == written, "a finished training is not repeated"
