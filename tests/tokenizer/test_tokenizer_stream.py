"""Incremental detokenization gives whole characters, and stop strings are found wherever they are cut."""

from collections.abc import Callable, Sequence
from functools import cache

import pytest
from byte_level import byte_level
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from foretell.tokenizer.codec import TextCodec
from foretell.tokenizer.stream import Detokenizer, StopStrings


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


@cache
def byte_fallback(strip: bool) -> TextCodec:
    """A tokenizer as SentencePiece models have: words, and a token per byte for all else; token 2 is left out of
    text.
    """
    words = ["<unk>", "▁", "<end>", "▁a", "b", "▁▁", "é", *(f"<0x{i:02X}>" for i in range(256))]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens(["<end>"])
    return TextCodec(tokenizer)


LONE_BYTES = [7 + b for b in (0x0A, 0x0A, 0x41, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0xFF, 0x20)]
cuts = st.lists(st.integers(0, 5), max_size=40)


@pytest.mark.parametrize("strip", [False, True])
@given(tokens=st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, *LONE_BYTES]), max_size=25), sizes=cuts)
@example(tokens=LONE_BYTES[-2:-5:-1] + LONE_BYTES[:1] + LONE_BYTES[-2:] + [3, 4], sizes=[1] * 8)
@settings(max_examples=150, deadline=None)
def test_bytes_that_are_no_character_stream_as_they_decode(strip: bool, tokens: list[int], sizes: list[int]) -> None:
    codec = byte_fallback(strip)
    assert "".join(streamed(codec.detokenizer(), tokens, sizes)) == codec.decode(tokens)


@given(st.binary(max_size=25), cuts)
@settings(max_examples=150, deadline=None)
def test_a_byte_level_tokenizer_streams_any_bytes_as_they_decode(text: bytes, sizes: list[int]) -> None:
    codec = byte_level()
    letters = {
        b: codec.tokenizer.token_to_id(c) for b, c in zip(text, pre_tokenizers.ByteLevel.alphabet(), strict=False)
    }
    tokens = [token for b in text if (token := letters.get(b)) is not None]
    assert "".join(streamed(codec.detokenizer(), tokens, sizes)) == codec.decode(tokens)


@pytest.mark.parametrize("strip", [False, True])
@given(tokens=st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, *LONE_BYTES]), max_size=25), at=st.integers(0, 25))
@settings(max_examples=150, deadline=None)
def test_a_continuation_keeps_its_first_blank(strip: bool, tokens: list[int], at: int) -> None:
    codec, prompt = byte_fallback(strip), [4, 3, *tokens[:at], 3, 4]
    detokenizer = codec.detokenizer()
    detokenizer.follow(prompt)
    assert (
        "".join(streamed(detokenizer, tokens[at:], []))
        == codec.decode(prompt + tokens[at:])[len(codec.decode(prompt)) :]
    )


def test_what_follows_no_text_begins_a_text() -> None:
    for prompt in ([], [2], [2] * 20, [7 + 0xE2]):
        detokenizer = byte_fallback(True).detokenizer()
        detokenizer.follow(prompt)
        assert detokenizer.push([3]) + detokenizer.finish() == "a"


def test_a_run_of_bytes_is_shown_when_another_token_ends_it() -> None:
    detokenizer, (newline, euro) = byte_fallback(False).detokenizer(), (17, [7 + b for b in "€".encode()])
    assert [detokenizer.push([t]) for t in (4, newline, 4, *euro, 4)] == ["b", "", "\nb", "", "", "", "€b"]


parts = st.lists(st.text("ab.", max_size=3), max_size=12)


@given(parts, st.lists(st.text("ab.", min_size=1, max_size=3), max_size=3))
@settings(max_examples=200, deadline=None)
def test_text_ends_before_the_first_stop_string_however_it_arrives(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    hits = [whole.find(s) for s in stops if s in whole]
    watch, shown, stop = StopStrings(stops), "", None
    for piece in pieces:
        part, stop = watch.push(piece)
        shown += part
        assert whole.startswith(shown)
        if stop is not None:
            break
    shown += "" if stop is not None else watch.finish()
    assert stop in stops if hits else stop is None
    # Two stop strings may overlap: which ends the text first depends on which is complete first.
    assert shown == whole if not hits else shown in {whole[:h] for h in hits}


def test_only_the_beginning_of_a_stop_string_is_held_back() -> None:
    watch = StopStrings(["END"])
    assert watch.push("the E") == ("the ", None)
    assert watch.push("N") == ("", None)
    assert watch.push("T") == ("ENT", None)
    assert watch.push(" END more") == (" ", "END")


def test_the_stop_string_is_shown_if_asked_for() -> None:
    watch = StopStrings(["END", "ENDING", "DI"], include=True)
    assert watch.push("the EN") == ("the ", None)
    assert watch.push("DING") == ("END", "END")


def run_aware(tokens: Sequence[int]) -> str:
    return "".join("\ufffd" if token < 0 else chr(token) for token in tokens)


@pytest.mark.parametrize(
    ("decode", "text", "run"),
    [
        (as_bytes, list("plain text, ünd 北京 🙂. ".encode()), frozenset()),
        (as_bytes, [0xFF], frozenset()),
        (as_bytes, [0xE2, 0x82], frozenset()),
        (as_bytes, [0xF0, 0x9F, 0x98], frozenset()),
        (as_bytes, list("\ufffd".encode()), frozenset()),
        (run_aware, [-1], frozenset()),
        (run_aware, [-1], frozenset({-1})),
    ],
)
def test_the_work_of_a_stream_grows_with_its_text(
    decode: Callable[[Sequence[int]], str], text: list[int], run: frozenset[int]
) -> None:
    works = list[int]()
    for size in (1000, 2000, 4000):
        tokens, work = (text * size)[:size], 0

        def counted(some: Sequence[int]) -> str:
            nonlocal work
            work += len(some)
            return decode(some)

        shown = streamed(Detokenizer(counted, run), tokens, [1] * size)
        assert "".join(shown) == decode(tokens)
        works.append(work)
    assert works[2] - works[1] <= 2.2 * (works[1] - works[0]) + 100 and works[2] <= 60 * 4000


@given(st.lists(st.integers(0, 255) | st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0x41]), max_size=60))
def test_bytes_that_are_no_text_are_streamed_as_they_are_decoded(tokens: list[int]) -> None:
    assert "".join(streamed(Detokenizer(as_bytes), tokens, [1] * len(tokens))) == as_bytes(tokens)
