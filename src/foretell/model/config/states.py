"""Configuration of layers with a recurrent state instead of attention, and of what such models have beside them."""

from collections.abc import Collection
from dataclasses import dataclass

from foretell.utils.validation import Fields


@dataclass(frozen=True)
class StateShape:
    """Sizes of the state that a layer keeps per batch row: `taps - 1` inputs of a causal convolution over `channels`,
    and `heads` matrices `[key_dim, value_dim]` (0: none), whose keys `groups` of heads share.
    """

    channels: int
    taps: int
    heads: int = 0
    groups: int = 0
    key_dim: int = 0
    value_dim: int = 0


@dataclass(frozen=True)
class DeltaNetConfig:
    """Gated DeltaNet layers (Yang et al., arXiv 2412.06464; Qwen3-Next and Qwen3.5)."""

    layers: tuple[int, ...]
    """Their indices."""
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4

    @property
    def shape(self) -> StateShape:
        """Sizes of the state."""
        channels = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        return StateShape(channels, self.taps, self.value_heads, self.key_heads, self.key_dim, self.value_dim)


@dataclass(frozen=True)
class ShortConvConfig:
    """Gated short convolutions (LFM2, arXiv 2511.23404) over the residual stream's `channels`."""

    layers: tuple[int, ...]
    """Their indices."""
    channels: int
    taps: int = 3
    bias: bool = False

    @property
    def shape(self) -> StateShape:
        """Sizes of the state."""
        return StateShape(self.channels, self.taps)


@dataclass(frozen=True)
class Mamba2Config:
    """Mamba-2 layers (Dao and Gu, arXiv 2405.21060; Granite 4): `groups` of heads share B and C of `state_dim`."""

    layers: tuple[int, ...]
    """Their indices."""
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    taps: int = 4
    conv_bias: bool = True
    bias: bool = False
    """Biases of the input and the output projection."""

    @property
    def shape(self) -> StateShape:
        """Sizes of the state."""
        channels = self.heads * self.head_dim + 2 * self.groups * self.state_dim
        return StateShape(channels, self.taps, self.heads, self.groups, self.state_dim, self.head_dim)


StateConfig = DeltaNetConfig | ShortConvConfig | Mamba2Config
_INFINITY = (float("inf"), {"__float__": "Infinity"})
"""As transformers writes it to JSON: before version 5, and since."""
LAYER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
"""Names of types of layers in published Granite configurations, and those of transformers."""


def layers_of_type(read: Fields, layers: int, name: str, default: list[str]) -> tuple[int, ...]:
    """Indices of the layers of this type; the others are full attention. `default`: the types where the configuration
    does not say which.

    Raises:
        ValueError: a layer has another type, or they are not as many as the layers.
    """
    names = read.texts("layer_types") or read.texts("layers_block_type") or default
    types = [LAYER_TYPES.get(kind, kind) for kind in names]
    if len(types) != layers or not set(types) <= {name, "full_attention"}:
        raise read.wrong("layer_types", f"{layers} of {name} or full_attention", list(types))
    return tuple(i for i, kind in enumerate(types) if kind == name)


def gguf_mamba2(read: Fields, layers: tuple[int, ...], tensors: Collection[str]) -> Mamba2Config:
    """Mamba-2 layers of a GGUF file."""
    heads, inner = read.integer("ssm.time_step_rank", least=1), read.integer("ssm.inner_size", least=1)
    groups = read.integer("ssm.group_count", least=1)
    if inner % heads or heads % groups:
        raise read.wrong("ssm.time_step_rank", f"a divisor of {inner} channels and a multiple of {groups}", heads)
    at = f"blk.{layers[0]}.ssm_"
    return Mamba2Config(
        layers=layers,
        heads=heads,
        head_dim=inner // heads,
        groups=groups,
        state_dim=read.integer("ssm.state_size", least=1),
        taps=read.integer("ssm.conv_kernel", least=1),
        conv_bias=f"{at}conv1d.bias" in tensors,
        bias=f"{at}in.bias" in tensors,
    )


def check_time_step(read: Fields) -> None:
    """Refuse limits of the time steps of Mamba-2.

    Raises:
        ValueError: they are others than 0 and infinity.
    """
    limits = read.raw.get("time_step_limit")
    if limits is not None and list(limits) not in ([0.0, infinity] for infinity in _INFINITY):
        raise read.wrong("time_step_limit", "0 to infinity: no other limits are supported", limits)
