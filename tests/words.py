"""A tokenizer for tests: whole words, in the order given."""

from tokenizers import Tokenizer, models, pre_tokenizers

from foretell.tokenizer.codec import TextCodec


def word_codec(*names: str) -> TextCodec:
    """Token 0 is any other word; the names count from 1."""
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(("?", *names))}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return TextCodec(tokenizer)
