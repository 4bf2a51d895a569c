"""The tensors of a dense model in the order in which they are written, by their names in Hugging Face checkpoints."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float

from foretell.lab.quantize.base import ROLES, Role, matrices
from foretell.lab.quantize.grid import QuantizedRows
from foretell.model.block.decoder import DecoderBlock, RMSNorm
from foretell.model.block.linear import FactoredLinear
from foretell.model.config.model import ModelConfig
from foretell.model.load.low_rank import FACTORS, SHORTCUTS, outer_name

_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True)
class MatrixPart:
    """One of the matrices that lie below each other in a role."""

    name: str
    """Without the block: as `self_attn.q_proj`."""
    outputs: int
    bias: bool


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the output: of a matrix in a block its role, of others None."""

    name: str
    shape: tuple[int, ...]
    role: Role | None = None


def parts_of(config: ModelConfig) -> Mapping[Role, tuple[MatrixPart, ...]]:
    """The matrices of a block by role."""
    c, q, kv = config, config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = {"q_proj": q, "k_proj": kv, "v_proj": kv}
    return {
        "qkv": tuple(MatrixPart(f"self_attn.{n}", rows, c.qkv_bias) for n, rows in attention.items()),
        "output": (MatrixPart("self_attn.o_proj", c.hidden, c.output_bias),),
        "gate_up": tuple(MatrixPart(f"mlp.{n}", c.ffn, c.mlp_bias) for n in ("gate_proj", "up_proj")),
        "down": (MatrixPart("mlp.down_proj", c.hidden, c.mlp_bias),),
    }


def inputs_of(config: ModelConfig) -> Mapping[Role, int]:
    """Inputs of the matrices by role."""
    return {
        "qkv": config.hidden,
        "output": config.heads * config.head_dim,
        "gate_up": config.hidden,
        "down": config.ffn,
    }


def entries(config: ModelConfig) -> Iterator[TensorEntry]:
    """All tensors: embedding, blocks, final norm, head."""
    c = config
    yield TensorEntry(EMBEDDING, (c.vocab, c.hidden))
    inputs = inputs_of(c)
    for i in range(c.layers):
        for role in ROLES:
            for part in parts_of(c)[role]:
                name = f"model.layers.{i}.{part.name}"
                yield TensorEntry(f"{name}.weight", (part.outputs, inputs[role]), role)
                if part.bias:
                    yield TensorEntry(f"{name}.bias", (part.outputs,))
        for name, width in _norm_names(c).values():
            yield TensorEntry(f"model.layers.{i}.{name}.weight", (width,))
    yield TensorEntry(FINAL_NORM, (c.hidden,))
    if not c.tied:
        yield TensorEntry(HEAD, (c.vocab, c.hidden))


def _norm_names(c: ModelConfig) -> dict[str, tuple[str, int]]:
    """Names in the checkpoint and widths of a block's norms, by their names in `DecoderBlock`."""
    norms = {
        "attention_norm": ("input_layernorm", c.hidden),
        "mlp_norm": ("pre_feedforward_layernorm" if c.post_norms else "post_attention_layernorm", c.hidden),
    }
    if c.qk_norm:
        norms |= {"q_norm": ("self_attn.q_norm", c.head_dim), "k_norm": ("self_attn.k_norm", c.head_dim)}
    if c.post_norms:
        norms |= {"post_attention_norm": ("post_attention_layernorm", c.hidden)}
        norms |= {"post_mlp_norm": ("post_feedforward_layernorm", c.hidden)}
    return norms


def block_tensors(
    config: ModelConfig, i: int, block: DecoderBlock, quantized: Mapping[Role, QuantizedRows]
) -> Iterator[tuple[str, QuantizedRows | Float[torch.Tensor, "*shape"]]]:
    """The tensors of a block in the order of `entries`; a matrix that is not in `quantized` as the block has it, norms
    with the offset of their architecture.
    """
    prefix = f"model.layers.{i}."
    for role, linear in matrices(block).items():
        outer, first = linear, 0
        if isinstance(linear, FactoredLinear):
            outer = linear.outer
            yield f"{prefix}{FACTORS[role]}.weight", linear.inner.weight.data
        for part in parts_of(config)[role]:
            rows = slice(first, first + part.outputs)
            name, packed = part.name if outer is linear else outer_name(part.name), quantized.get(role)
            yield (
                f"{prefix}{name}.weight",
                outer.weight.data[rows] if packed is None else packed.rows(rows.start, rows.stop),
            )
            if outer.bias is not None:
                yield f"{prefix}{name}.bias", outer.bias.data[rows]
            first = rows.stop
    for name in SHORTCUTS:
        shortcut = getattr(block, name)
        if shortcut is not None:
            yield f"{prefix}{name}.weight", shortcut.weight.data
    for attribute, (name, _) in _norm_names(config).items():
        norm = getattr(block, attribute)
        assert isinstance(norm, RMSNorm)
        yield f"model.layers.{i}.{name}.weight", norm.weight.data


def require_supported(config: ModelConfig, source: str, action: str = "quantised") -> None:
    """Refuse a model with tensors that `entries` does not list; `action`: what was to be done with it.

    Raises:
        ValueError: a mixture of experts, another architecture, or a model that was compressed to another form.
    """
    if config.low_rank or config.shortcuts:
        form = "is sliced" if config.shortcuts else "has matrices of low rank"
        raise ValueError(
            f"{source}: a model that {form} already cannot be {action}; give the model that it was made of"
        )
    if config.experts is not None or config.architecture not in _ARCHITECTURES:
        kind = f"{config.architecture} with experts" if config.experts is not None else config.architecture
        raise ValueError(
            f"{source}: {kind} cannot be {action} yet; known: {', '.join(_ARCHITECTURES)}, without experts"
        )
