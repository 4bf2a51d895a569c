"""Configurations of masked diffusion language models: LLaDA, Dream, SDAR, Fast-dLLM v2."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foretell.model.config.model import ModelConfig
from foretell.model.config.readers.hf import from_hf
from foretell.model.diffusion.attention import unsupported_part
from foretell.utils.validation import Fields

_SDAR_BLOCK, _SDAR_MASK = 4, 151669
"""Block length and mask token of SDAR's authors, where a checkpoint does not state them."""
_FAST_DLLM_BLOCK, _FAST_DLLM_MASK = 32, 151665
"""Those of the authors of Fast-dLLM v2."""


@dataclass(frozen=True)
class DiffusionConfig:
    """A decoder whose attention is not causal, and how it predicts masked tokens."""

    model: ModelConfig
    mask: int
    """Id of the mask token."""
    shifted: bool = False
    """The output at a position predicts the token at the next one, as in the autoregressive model that it was adapted
    from (Dream, arXiv 2508.15487).
    """
    block: int = 0
    """Block diffusion (BD3-LM, arXiv 2503.09573): positions attend to their own block of this length and to earlier
    ones; 0: to all.
    """

    def __post_init__(self) -> None:
        if not 0 <= self.mask < self.model.vocab:
            raise ValueError(
                f"mask token {self.mask} is outside the vocabulary, which has {self.model.vocab} tokens (0 to "
                f"{self.model.vocab - 1}); correct mask_token_id"
            )
        part = unsupported_part(self.model)
        if part is not None:
            raise ValueError(f"masked diffusion needs plain attention, and this {self.model.architecture} has {part}")


def is_diffusion(raw: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of a masked diffusion language model."""
    kind = raw.get("model_type")
    return isinstance(kind, str) and kind in _READERS


def read_diffusion(raw: Mapping[str, Any], source: str = "config.json") -> DiffusionConfig:
    """Read the `config.json` of a masked diffusion language model.

    Raises:
        ValueError: it is one of another model, a key is missing or wrong, or a part is not supported.
    """
    if not is_diffusion(raw):
        raise ValueError(
            f"{source}: a masked diffusion model was asked for (model_type {', '.join(_READERS)}), found model_type "
            f"{raw.get('model_type')!r}; decode an autoregressive model with foretell generate, or adapt it with "
            f"foretell train masked_diffusion"
        )
    return _READERS[raw["model_type"]](raw, source)


def _checked(source: str, model: ModelConfig, mask: int, shifted: bool = False, block: int = 0) -> DiffusionConfig:
    """The configuration of these values; errors name the source."""
    try:
        return DiffusionConfig(model, mask, shifted, block)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def _read_dream(raw: Mapping[str, Any], source: str) -> DiffusionConfig:
    """Dream: Qwen2.5 with full attention and shifted predictions."""
    model = from_hf({**raw, "model_type": "qwen2", "use_sliding_window": False}, source)
    return _checked(source, model, _mask(raw, source), shifted=True)


def _read_sdar(raw: Mapping[str, Any], source: str) -> DiffusionConfig:
    """SDAR (arXiv 2510.06303): Qwen3 with blocks."""
    model = from_hf({**raw, "model_type": "qwen3", "use_sliding_window": False}, source)
    block = Fields(raw, source).integer("block_size", "block_length", default=_SDAR_BLOCK, least=1)
    return _checked(source, model, _mask(raw, source, _SDAR_MASK), block=block)


def _read_fast_dllm(raw: Mapping[str, Any], source: str) -> DiffusionConfig:
    """Fast-dLLM v2 (arXiv 2509.26328): Qwen2.5 with blocks and shifted predictions."""
    model = from_hf({**raw, "model_type": "qwen2", "use_sliding_window": False}, source)
    block = Fields(raw, source).integer("bd_size", default=_FAST_DLLM_BLOCK, least=1)
    return _checked(source, model, _mask(raw, source, _FAST_DLLM_MASK), shifted=True, block=block)


def _read_llada(raw: Mapping[str, Any], source: str) -> DiffusionConfig:
    """LLaDA (arXiv 2502.09992): a Llama under OLMo's names."""
    read = Fields(raw, source)
    for key, wanted in _LLADA_FIXED.items():
        if raw.get(key, wanted) != wanted:
            raise read.wrong(key, f"{wanted!r}: nothing else is supported for llada", raw[key])
    heads = read.integer("n_heads", least=1)
    values = {
        "model_type": "llama",
        "hidden_size": read.integer("d_model", least=1),
        "num_hidden_layers": read.integer("n_layers", least=1),
        "num_attention_heads": heads,
        "num_key_value_heads": read.integer("n_kv_heads", default=heads, least=1),
        "intermediate_size": read.integer("mlp_hidden_size", least=1),
        "max_position_embeddings": read.integer("max_sequence_length", least=1),
        "vocab_size": read.integer("embedding_size", "vocab_size", least=1),
        "rope_theta": read.positive("rope_theta", default=10000.0),
        "rms_norm_eps": read.positive("rms_norm_eps", default=1e-5),
        "tie_word_embeddings": read.flag("weight_tying", default=True),
        "eos_token_id": raw.get("eos_token_id"),
    }
    return _checked(source, from_hf(values, source), _mask(raw, source))


_LLADA_FIXED = {
    "block_type": "llama", "activation_type": "silu", "layer_norm_type": "rms", "rope": True, "alibi": False,
    "include_bias": False, "include_qkv_bias": False, "attention_layer_norm": False, "scale_logits": False,
    "input_emb_norm": False,
}  # fmt: skip
"""Values of LLaDA's configuration without which it would be another architecture."""
_READERS = {"Dream": _read_dream, "llada": _read_llada, "sdar": _read_sdar, "Fast_dLLM_Qwen": _read_fast_dllm}


def _mask(raw: Mapping[str, Any], source: str, default: int | None = None) -> int:
    return Fields(raw, source).integer("mask_token_id", default=default)
