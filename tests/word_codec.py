"""A tokenizer of whole words for tests."""

from tokenizers import Tokenizer, models, pre_tokenizers

from foretell.tokenizer.codec import TextCodec


def word_codec(*names: str) -> TextCodec:
    """A tokenizer of these words, with ids from 1; token 0 is every other word."""
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(("?", *names))}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return TextCodec(tokenizer)
