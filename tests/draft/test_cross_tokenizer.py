"""Drafting with another tokenizer: the re-encoded sequence, the alignment of drafts, and the target's answers."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from foretell.accept import Match
from foretell.catalogue import BuildContext, build
from foretell.core.context import TokenBuffer
from foretell.core.sampling import SamplingParams
from foretell.draft import CrossTokenizerDrafter, DraftModel
from foretell.draft.cross_tokenizer import RetokenizedText, decode_from, encode_after
from foretell.engine.engine import Engine
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import Trie
from foretell.testing import letter_codec
from foretell.tokenizer.codec import TextCodec
from helpers import VOCAB, generate, random_tokens, sibling, target


def pairs(vocab: int = VOCAB) -> TextCodec:
    """Letters as `letter_codec`, and some pairs of them merged: another length for the same text."""
    letters = [chr(ord("a") + i) for i in range(vocab - 4)]
    merges = [("a", "b"), ("c", "d"), ("ab", "cd"), ("e", "f")]
    vocabulary = {t: i for i, t in enumerate([*letters, *("".join(m) for m in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.decoder = decoders.Fuse()
    return TextCodec(tokenizer)


def bytewise() -> TextCodec:
    """Every byte a token: characters come in parts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TextCodec(tokenizer)


def encoded(codec: TextCodec, text: str) -> np.ndarray:
    return np.array(codec.encode(text))


def test_what_follows_is_read_in_the_other_tokens_and_where_they_end() -> None:
    codec = pairs()
    assert encode_after(codec, "uvw", "abcdef") == [(*codec.encode("abcd"), 4), (*codec.encode("ef"), 6)]
    assert encode_after(codec, "uvw", "") == []


def test_a_token_across_the_border_is_not_proposed() -> None:
    codec = pairs()
    together = codec.encode("xa" + "bcd")
    assert len(together) == 2
    assert [t for t, _ in encode_after(codec, "xa", "bcd")] == codec.encode("bcd")


def test_an_updated_sequence_equals_a_fresh_encoding() -> None:
    mine, theirs = letter_codec(VOCAB), pairs()
    tokens = mine.encode("xabcdefghabcdabefabc" * 12)
    text, retokenized = TokenBuffer(tokens[:7]), RetokenizedText()
    for end in range(8, len(tokens) + 1, 3):
        retokenized.update(text, mine, theirs, lookbehind=8)
        assert retokenized.buffer.tokens.tolist() == theirs.encode(mine.decode(text.tokens.tolist()))
        text.append(tokens[text.length : end])
    assert retokenized.settled[0] > 100, "old text is not encoded again"


def test_a_change_of_boundaries_is_reported() -> None:
    mine, theirs = letter_codec(VOCAB), pairs()
    text, retokenized = TokenBuffer(mine.encode("xab")), RetokenizedText()
    retokenized.update(text, mine, theirs, 8)
    assert (retokenized.buffer.length, retokenized.unchanged) == (2, 2)
    text.append(mine.encode("c"))
    retokenized.update(text, mine, theirs, 8)
    assert (retokenized.buffer.length, retokenized.unchanged) == (3, 3)
    text.append(mine.encode("d"))
    retokenized.update(text, mine, theirs, 8)
    assert retokenized.buffer.tokens.tolist() == theirs.encode("xabcd")
    assert retokenized.unchanged == 1, "`ab` has become part of `abcd`"


def test_a_character_in_parts_waits_until_it_is_whole() -> None:
    mine, theirs = bytewise(), bytewise()
    tokens = mine.encode("né")
    text, retokenized = TokenBuffer(tokens[:2]), RetokenizedText()
    retokenized.update(text, mine, theirs, 8)
    assert theirs.decode(retokenized.buffer.tokens.tolist()) == "n"
    text.append(tokens[2:])
    retokenized.update(text, mine, theirs, 8)
    assert theirs.decode(retokenized.buffer.tokens.tolist()) == "né"


def test_text_after_a_position() -> None:
    codec = pairs()
    tokens = encoded(codec, "uvwabcdef")
    assert decode_from(codec, tokens, 3) == "abcdef" and decode_from(codec, tokens, len(tokens)) == ""


def test_the_same_model_under_the_same_tokenizer_is_always_right() -> None:
    draft = CrossTokenizerDrafter(DraftModel(DecoderRunner(target())), letter_codec(VOCAB), letter_codec(VOCAB), 4, 0.0)
    engine = Engine(DecoderRunner(target()), Method(draft, Trie(8), Match()))
    (done,) = engine.complete([Request(random_tokens(9), max_new_tokens=40)])
    assert done.statistics.tokens_per_pass == 5


@pytest.mark.parametrize(("temperature", "confidence"), [(0.0, 0.3), (1.0, 0.0), (1.0, 1.0)])
def test_answers_are_the_targets_in_any_batch(temperature: float, confidence: float) -> None:
    requests = [
        Request(
            random_tokens(n, seed=n),
            SamplingParams(temperature=temperature, seed=n),
            max_new_tokens=12,
            eos=(5,) * (n == 9),
        )
        for n in (3, 17, 40, 9, 1)
    ]

    def method() -> Method[CrossTokenizerDrafter]:
        draft = CrossTokenizerDrafter(
            DraftModel(DecoderRunner(sibling())), letter_codec(VOCAB), pairs(), 5, confidence, lookbehind=4
        )
        return Method(draft, Trie(10), Match())

    plain = generate(build("autoregressive", BuildContext(VOCAB, target())), requests)
    assert generate(method(), requests) == plain
    assert generate(method(), requests, rows=1, chunk=512) == plain


def ending(vocab: int = VOCAB) -> TextCodec:
    """`pairs` in which every second letter is a special token, which ends a draft."""
    codec = pairs(vocab)
    codec.tokenizer.add_special_tokens([chr(ord("a") + i) for i in range(0, vocab - 4, 2)])
    return codec


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_begins_with_a_special_token_is_empty(temperature: float) -> None:
    requests = [
        Request(random_tokens(n, seed=n), SamplingParams(temperature=temperature, seed=n), max_new_tokens=12)
        for n in (3, 17, 9)
    ]
    draft = CrossTokenizerDrafter(DraftModel(DecoderRunner(sibling())), letter_codec(VOCAB), ending(), 5, 0.0)
    chains = list[int]()
    continued = draft._continue
    draft._continue = lambda inner: [chains.append(len(c)) or c for c in continued(inner)]  # type: ignore[method-assign,func-returns-value]
    plain = generate(build("autoregressive", BuildContext(VOCAB, target())), requests)
    assert generate(Method(draft, Trie(10), Match()), requests) == plain
    assert 0 in chains and max(chains) > 0


def test_both_tokenizers_are_needed() -> None:
    with pytest.raises(ValueError, match="one draft model with its tokenizer"):
        build("universal_draft", BuildContext(VOCAB, target(), drafts=(DecoderRunner(sibling()),)))
    with pytest.raises(ValueError, match="length and lookbehind of at least 1"):
        CrossTokenizerDrafter(DraftModel(DecoderRunner(sibling())), pairs(), pairs(), length=0)
