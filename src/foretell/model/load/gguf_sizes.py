"""Writes GGUF files: the sizes of a model, the metadata of another file, and all that a writer holds."""

from typing import Any

from foretell.model.config.model import ModelConfig
from foretell.model.load.gguf_header import GGUFHeader


def write_sizes(writer: Any, config: ModelConfig, vocab: int) -> None:
    """Write the sizes of a model; `vocab`: that of its tokenizer, padding included."""
    writer.add_vocab_size(vocab)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.hidden)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.ffn)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)


def copy_metadata(writer: Any, source: GGUFHeader, *replaced: str) -> None:
    """Copy the metadata of a file but its architecture, how many parts it is in, and the keys `replaced`."""
    from gguf import GGUFReader, GGUFValueType

    for name, field in GGUFReader(source.path).fields.items():
        if not name.startswith(("GGUF.", "split.")) and name not in ("general.architecture", *replaced):
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)


def write_whole(writer: Any) -> None:
    """Write the file with the metadata and tensors that `writer`, of the `gguf` package, holds."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
