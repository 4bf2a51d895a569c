"""Configuration of layers with a recurrent state instead of attention, and of what such models have beside them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
_LAYER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
"""Names of types of layers in published Granite configurations, and those of transformers."""


_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Letters of `hybrid_override_pattern` in configurations of Nemotron-H."""


def with_layer_types(raw: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """A configuration of Nemotron-H with its `layer_types` and their number; other configurations unchanged.

    Raises:
        ValueError: a type of layer is not known.
    """
    if raw.get("model_type") != "nemotron_h":
        return raw
    read = Fields(raw, source)
    found = read.texts("layers_block_type") or read.texts("layer_types")
    if not found and read.has("hybrid_override_pattern"):
        found = tuple(_PATTERN.get(letter, letter) for letter in read.text("hybrid_override_pattern"))
    types = [_LAYER_TYPES.get(kind, kind) for kind in found or _PATTERN.values()]
    unknown = [kind for kind in types if kind not in _PATTERN.values()]
    if unknown:
        raise read.wrong("hybrid_override_pattern", f"layers of {', '.join(_PATTERN)}", unknown[0])
    return {**raw, "layer_types": types, "layers_block_type": None, "num_hidden_layers": len(types)}


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
    if kind == "nemotron_h":
        return _nemotron_mamba2(read, tuple(i for i, t in enumerate(read.texts("layer_types")) if t == _PATTERN["M"]))
    if kind == "granitemoehybrid":
        layers_of = _layers_of(read, layers, "linear_attention", ["linear_attention"] * layers)
        return _mamba2(read, layers_of) if layers_of else None
    return None


def _layers_of(read: Fields, layers: int, name: str, default: list[str]) -> tuple[int, ...]:
    """Indices of the layers of this type; the others are full attention."""
    found = read.texts("layer_types") or read.texts("layers_block_type") or tuple(default)
    types = [_LAYER_TYPES.get(kind, kind) for kind in found]
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


def _mamba2(read: Fields, layers: tuple[int, ...]) -> Mamba2Config:
    heads = read.integer("mamba_n_heads", default=128, least=1)
    groups = read.integer("mamba_n_groups", default=1, least=1)
    inner = read.integer("mamba_expand", default=2, least=1) * read.integer("hidden_size", least=1)
    automatic = read.raw.get("mamba_d_head", "auto") == "auto"
    head_dim = inner // heads if automatic else read.integer("mamba_d_head", least=1)
    if head_dim * heads != inner:
        raise read.wrong("mamba_n_heads", f"a number of heads of width {head_dim} that make {inner} channels", heads)
    if heads % groups:
        raise read.wrong("mamba_n_groups", f"a divisor of mamba_n_heads, {heads}", groups)
    _check_time_step(read)
    return Mamba2Config(
        layers=layers,
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_dim=read.integer("mamba_d_state", default=256, least=1),
        taps=read.integer("mamba_d_conv", default=4, least=1),
        conv_bias=read.flag("mamba_conv_bias", default=True),
        bias=read.flag("mamba_proj_bias", default=False),
    )


def _check_time_step(read: Fields) -> None:
    limits = read.raw.get("time_step_limit")
    if limits is not None and list(limits) not in ([0.0, infinity] for infinity in _INFINITY):
        raise read.wrong("time_step_limit", "0 to infinity: no other limits are supported", limits)


def _nemotron_mamba2(read: Fields, layers: tuple[int, ...]) -> Mamba2Config:
    """The Mamba-2 layers of Nemotron-H (arXiv 2504.03624)."""
    if not layers:
        raise read.wrong("hybrid_override_pattern", "a pattern with Mamba-2 layers", "none")
    heads = read.integer("mamba_num_heads", default=128, least=1)
    groups = read.integer("n_groups", "mamba_n_groups", default=8, least=1)
    if heads % groups:
        raise read.wrong("n_groups", f"a divisor of mamba_num_heads, {heads}", groups)
    activation = read.text("mamba_hidden_act", default="silu")
    if activation != "silu":
        raise read.wrong("mamba_hidden_act", "silu", activation)
    _check_time_step(read)
    return Mamba2Config(
        layers=layers,
        heads=heads,
        head_dim=read.integer("mamba_head_dim", default=64, least=1),
        groups=groups,
        state_dim=read.integer("ssm_state_size", default=128, least=1),
        taps=read.integer("conv_kernel", "mamba_d_conv", default=4, least=1),
        conv_bias=read.flag("use_conv_bias", "mamba_conv_bias", default=True),
        bias=read.flag("use_bias", default=False),
    )
