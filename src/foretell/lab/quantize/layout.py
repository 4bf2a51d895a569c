"""The tensors of a dense model in the order in which they are written, by their names in Hugging Face checkpoints."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float

from foretell.lab.quantize.base import Role
from foretell.lab.quantize.grid import QuantizedRows
from foretell.model.block.layer import DecoderBlock
from foretell.model.block.modules import to_weights
from foretell.model.block.weights import linear_shapes, places_of, tensors_of
from foretell.model.config.compressed import LowRank
from foretell.model.config.model import ModelConfig
from foretell.model.load.weights import EMBEDDING, FINAL_NORM, HEAD

_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
_ROLES: Mapping[str, Role] = {"qkv": "qkv", "output": "output", "mlp.gate_up": "gate_up", "mlp.down": "down"}
"""By the field of `BlockWeights`."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the output: of a matrix in a block its role, of others None."""

    name: str
    shape: tuple[int, ...]
    role: Role | None = None


def shapes_of(config: ModelConfig) -> Mapping[Role, tuple[int, int]]:
    """Outputs and inputs of the matrices of a block by role."""
    return {_ROLES[path]: shape for path, shape in linear_shapes(config).items()}


def entries(config: ModelConfig) -> Iterator[TensorEntry]:
    """All tensors: embedding, blocks, final norm, head."""
    c = config
    yield TensorEntry(EMBEDDING, (c.vocab, c.hidden))
    for i in range(c.layers):
        for place in places_of(c, i):
            yield TensorEntry(place.name, place.shape, _ROLES.get(place.path))
    yield TensorEntry(FINAL_NORM, (c.hidden,))
    if not c.tied:
        yield TensorEntry(HEAD, (c.vocab, c.hidden))


def block_tensors(
    config: ModelConfig, i: int, block: DecoderBlock, quantized: Mapping[Role, QuantizedRows]
) -> Iterator[tuple[str, QuantizedRows | Float[torch.Tensor, "*shape"]]]:
    """The tensors of a block in the order of `entries`; a matrix that is not in `quantized` as the block has it, norms
    with the offset of their architecture.
    """
    weights = to_weights(block)
    linears = {"qkv": weights.qkv, "output": weights.output}
    if weights.mlp is not None:
        linears |= {"mlp.gate_up": weights.mlp.gate_up, "mlp.down": weights.mlp.down}
    factors = {_ROLES[path]: linear.factor for path, linear in linears.items() if linear is not None}
    ranks = LowRank(**{role: factor.shape[0] for role, factor in factors.items() if factor is not None})
    form = replace(config, low_rank=ranks, shortcuts=weights.attention_shortcut is not None, norm_offset=0.0)
    tensors = tensors_of(form, i, weights)
    for place in places_of(form, i):
        packed, rows = quantized.get(_ROLES.get(place.path)), place.rows  # type: ignore[arg-type]
        if packed is None or rows is None:
            yield place.name, tensors[place.name].detach()
        else:
            yield place.name, packed.rows(rows.start, rows.stop)


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
