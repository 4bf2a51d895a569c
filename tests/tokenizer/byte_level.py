"""A small byte-level tokenizer for tests."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from foretell.tokenizer.codec import TextCodec


def byte_level() -> TextCodec:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("Ġt", "h"), ("Ã", "¤")]
    vocabulary = {t: i for i, t in enumerate([*alphabet, *("".join(m) for m in merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    return TextCodec(tokenizer, turns + "{% if add_generation_prompt %}<assistant>{% endif %}")
