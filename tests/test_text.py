"""Streaming text: whole characters, stop strings wherever they fall, chat templates."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from foretell.text import Detokenizer, StopStrings, TextCodec


def as_bytes(tokens: Sequence[int]) -> str:
    """A tokenizer with one token per byte."""
    return bytes(tokens).decode("utf-8", errors="replace")


def streamed(detokenizer: Detokenizer, tokens: Sequence[int], sizes: Sequence[int]) -> list[str]:
    shown, at = list[str](), 0
    for size in [*sizes, len(tokens)]:
        shown.append(detokenizer.push(tokens[at : at + size]))
        at = min(at + size, len(tokens))
    return [*shown, detokenizer.finish()]


TEXTS = ["plain", "größer als 5 € — ja", "日本語のテキスト", "👩‍👩‍👧 und 🇩🇪!", "e\u0301a\u0300"]


@pytest.mark.parametrize("text", TEXTS)
@given(sizes=st.lists(st.integers(0, 4), max_size=12))
@settings(max_examples=30, deadline=None)
def test_characters_are_never_split_and_nothing_is_lost(text: str, sizes: list[int]) -> None:
    shown = streamed(Detokenizer(as_bytes), list(text.encode()), sizes)
    assert "".join(shown) == text
    assert all("\ufffd" not in part for part in shown)


def test_a_byte_of_a_character_is_held_until_the_rest_comes() -> None:
    detokenizer, euro = Detokenizer(as_bytes), list("€".encode())
    assert [detokenizer.push([b]) for b in [65, *euro, 66]] == ["A", "", "", "€", "B"]


def test_what_never_becomes_a_character_is_shown_at_the_end() -> None:
    detokenizer = Detokenizer(as_bytes)
    assert detokenizer.push([65, 0xE2]) + detokenizer.finish() == "A\ufffd"


def byte_level() -> TextCodec:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("Ġt", "h"), ("Ã", "¤")]
    vocabulary = {t: i for i, t in enumerate([*alphabet, *("".join(m) for m in merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    return TextCodec(tokenizer, turns + "{% if add_generation_prompt %}<assistant>{% endif %}")


@pytest.mark.parametrize("text", [*TEXTS, " the thäte  that"])
def test_a_byte_level_tokenizer_streams_its_own_text(text: str) -> None:
    codec = byte_level()
    tokens = codec.encode(text)
    assert "".join(streamed(codec.detokenizer(), tokens, [1] * len(tokens))) == codec.decode(tokens) == text


def test_spaces_between_words_survive_a_decoder_that_strips_the_first() -> None:
    words = ["the", "cat", "sat"]

    def decode(tokens: Sequence[int]) -> str:
        return " ".join(words[t] for t in tokens)

    assert "".join(streamed(Detokenizer(decode), [0, 1, 2, 1], [1, 1, 1, 1])) == "the cat sat cat"


parts = st.lists(st.text("ab.", max_size=3), max_size=12)


@given(parts, st.lists(st.text("ab.", min_size=1, max_size=3), max_size=3))
@settings(max_examples=200, deadline=None)
def test_text_ends_before_the_first_stop_string_however_it_arrives(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    hits = [whole.find(s) for s in stops if s in whole]
    watch, shown, stopped = StopStrings(stops), "", False
    for piece in pieces:
        part, stopped = watch.push(piece)
        shown += part
        assert whole.startswith(shown)
        if stopped:
            break
    shown += "" if stopped else watch.finish()
    assert stopped == bool(hits)
    # Two stop strings may overlap: which ends the text first depends on which is complete first.
    assert shown == whole if not hits else shown in {whole[:h] for h in hits}


def test_only_the_beginning_of_a_stop_string_is_held_back() -> None:
    watch = StopStrings(["END"])
    assert watch.push("the E") == ("the ", False)
    assert watch.push("N") == ("", False)
    assert watch.push("T") == ("ENT", False)
    assert watch.push(" END more") == (" ", True)


def test_a_conversation_is_rendered_by_the_models_template() -> None:
    codec = byte_level()
    tokens = codec.chat([{"role": "user", "content": "hi"}])
    assert codec.decode(tokens) == "<user>hi<assistant>"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('no system turn') }}", "refuses this conversation: no system turn"),
        ("{% if %}", "chat template"),
    ],
)
def test_a_template_that_is_missing_or_refuses_is_one_sentence(template: str | None, words: str) -> None:
    codec = TextCodec(byte_level().tokenizer, template)
    with pytest.raises(ValueError, match=words) as error:
        codec.chat([{"role": "system", "content": "x"}])
    assert "\n" not in str(error.value)
