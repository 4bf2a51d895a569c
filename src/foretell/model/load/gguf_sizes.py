"""Writes the sizes of a model into the metadata of a GGUF file."""

from typing import Any

from foretell.model.config.model import ModelConfig


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
