"""Configuration of layers with a recurrent state instead of attention, and of what such models have beside them."""

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


StateConfig = DeltaNetConfig | ShortConvConfig


def read_state(read: Fields, kind: str, layers: int) -> StateConfig | None:
    """The layers with a recurrent state that a Hugging Face configuration describes; None: its kind has none."""
    if kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        interval = read.integer("full_attention_interval", default=4, least=1)
        default = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
        return _delta_net(read, _layers_of(read, layers, "linear_attention", default))
    if kind == "lfm2":
        full = read.integers("full_attn_idxs") if read.has("full_attn_idxs") else tuple(range(layers))
        default = ["full_attention" if i in full else "conv" for i in range(layers)]
        return ShortConvConfig(
            layers=_layers_of(read, layers, "conv", default),
            channels=read.integer("hidden_size", least=1),
            taps=read.integer("conv_L_cache", default=3, least=1),
            bias=read.flag("conv_bias", default=False),
        )
    return None


def _layers_of(read: Fields, layers: int, name: str, default: list[str]) -> tuple[int, ...]:
    """Indices of the layers of this type; the others are full attention."""
    types = read.texts("layer_types") or tuple(default)
    if len(types) != layers or not set(types) <= {name, "full_attention"}:
        raise read.wrong("layer_types", f"{layers} of {name} or full_attention", list(types))
    return tuple(i for i, kind in enumerate(types) if kind == name)


def _delta_net(read: Fields, layers: tuple[int, ...]) -> DeltaNetConfig:
    keys = read.integer("linear_num_key_heads", default=16, least=1)
    values = read.integer("linear_num_value_heads", default=32, least=1)
    if values % keys:
        raise read.wrong("linear_num_value_heads", f"a multiple of linear_num_key_heads, {keys}", values)
    return DeltaNetConfig(
        layers=layers,
        key_heads=keys,
        value_heads=values,
        key_dim=read.integer("linear_key_head_dim", default=128, least=1),
        value_dim=read.integer("linear_value_head_dim", default=128, least=1),
        taps=read.integer("linear_conv_kernel_dim", default=4, least=1),
    )
