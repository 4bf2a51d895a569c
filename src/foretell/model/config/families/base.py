"""What a family of architectures is: everything that distinguishes it from Llama, in one value per family.

Names of tensors are those of Llama's checkpoints (`foretell.model.block.spec` has them) unless a family gives others.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from foretell.model.config.model import ModelConfig, MoEConfig
from foretell.model.config.readers.values import read_head_dim
from foretell.model.config.states import StateConfig
from foretell.utils.validation import Fields

GGUF_SOFTMAX, GGUF_SIGMOID = 1, 2
"""Of `gguf.ExpertGatingFuncType`."""
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Rows:
    """Rows of a matrix in a checkpoint, and of its bias."""

    name: str
    """Of the matrix in its block, without `.weight`."""
    outputs: int
    """Rows that the checkpoint has."""
    chosen: Sequence[int] | None = None
    """Those that are read, in this order; None: all."""

    def __len__(self) -> int:
        """Rows that are read."""
        return self.outputs if self.chosen is None else len(self.chosen)


RowsOf = Callable[[ModelConfig, int], list[Rows] | None]
"""`(config, layer)` to the rows of a linear layer, one below the other; None: as in Llama."""
ExpertStorage = Literal["each", "stacked", "transposed", "alternating"]
"""How a checkpoint of safetensors stores the experts of a layer: one tensor for each matrix; all experts in one tensor,
the rows of gate before those of up; the same with inputs as rows; or rows of gate and up in turns.
"""


@dataclass(frozen=True)
class PredictionNames:
    """Names in a checkpoint of the parts of its layer of multi-token prediction."""

    layer: str
    """What the names of its block begin with."""
    norm: str
    combine: str
    embedding_norm: str
    hidden_norm: str
    several: bool = False
    """Whether more such layers may follow, each with parts of its own under the next number."""
    before_norm: bool = False
    """Whether it reads the target's state before the final norm, and this before the embedding (MiMo's)."""

    def of_module(self, index: int) -> "PredictionNames":
        """Names of the parts of one of several layers, by its index."""
        number = self.layer.split(".")[-2]
        moved = self.layer.replace(number, str(int(number) + index))
        parts = ("layer", "norm", "combine", "embedding_norm", "hidden_norm")
        return replace(self, **{part: getattr(self, part).replace(self.layer, moved, 1) for part in parts})


@dataclass(frozen=True)
class Kind:
    """A `model_type` of a family."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Values of `ModelConfig` that its `config.json` does not contain."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The defaults of transformers for keys missing in `config.json`, where they differ from ours."""
    optional_bias: bool = False
    """Whether its attention has biases on request."""
    local_rope: bool = False
    """Whether its sliding-window layers have a rotary embedding of their own."""
    text_of: str | None = None
    """The multimodal `model_type` whose language model it is; vision parts are not read."""


def read_layer_types(read: Fields, layers: int) -> tuple[int, ...] | None:
    """The layers with a sliding window by `layer_types`; None: the configuration has none."""
    types = read.texts("layer_types")
    if not types:
        return None
    if len(types) != layers or not set(types) <= set(_LAYER_TYPES):
        raise read.wrong("layer_types", f"{layers} of sliding_attention or full_attention", list(types))
    return tuple(i for i, kind in enumerate(types) if kind == _LAYER_TYPES[1])


def windowed(
    read: Fields, layers: int, default: Callable[[], tuple[int, ...]], types: bool = True
) -> tuple[int, tuple[int, ...]]:
    """Sliding window and its layers; `default`: where `layer_types` does not say which, or is not looked at."""
    window = read.integer("sliding_window", default=0)
    if not window:
        return 0, ()
    chosen = read_layer_types(read, layers) if types else None
    return window, default() if chosen is None else chosen


def window_pattern(read: Fields, layers: int, default: int | None = None) -> tuple[int, ...]:
    """The layers with a window by `sliding_window_pattern`: all but every so many, or those marked L in turns."""
    names = "sliding_window_pattern", "_sliding_window_pattern"
    pattern = read.raw.get(names[0])
    if isinstance(pattern, str) and pattern:
        return tuple(i for i in range(layers) if pattern[i % len(pattern)] == "L")
    step = read.integer(*names, default=default, least=1)
    return tuple(i for i in range(layers) if (i + 1) % step)


def no_windows(read: Fields, kind: str, layers: int) -> tuple[int, tuple[int, ...]]:
    """Of architectures without sliding windows."""
    return 0, ()


def gguf_windows(read: Fields, layers: int, pattern: int, default: int = 0) -> dict[str, Any]:
    """Sliding window and its layers in GGUF: those that the file marks, or all but every `pattern`-th; `default`: the
    window where none is given.
    """
    window, name = read.integer("attention.sliding_window", default=default), "attention.sliding_window_pattern"
    if isinstance(read.raw.get(name), list):
        marked = gguf_flags(read, name, layers)
    else:
        step = read.integer(name, default=pattern, least=1)
        marked = tuple((i + 1) % step > 0 for i in range(layers))
    return {"window": window, "window_layers": tuple(i for i in range(layers) if marked[i]) if window else ()}


def gguf_flags(read: Fields, name: str, layers: int) -> tuple[bool, ...]:
    """A boolean for every layer."""
    flags = read.raw.get(name)
    if not isinstance(flags, list) or len(flags) != layers or not all(isinstance(each, bool) for each in flags):
        raise read.wrong(name, f"a list of {layers} booleans", flags)
    return tuple(flags)


def largest_kv_heads(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """GGUF metadata with one number of key-value heads, where layers without attention have 0."""
    heads = raw.get("attention.head_count_kv")
    several = isinstance(heads, list) and heads and all(isinstance(each, int) for each in heads)
    return {**raw, "attention.head_count_kv": max(heads)} if several else raw  # type: ignore[arg-type]


def gguf_state_layers(read: Fields, layers: int) -> tuple[int, ...]:
    """The layers without key-value heads in GGUF, which have a recurrent state; the others have one number of heads.

    Raises:
        ValueError: they have several numbers of heads, or are not as many as the layers.
    """
    heads = read.integers("attention.head_count_kv")
    if len(heads) == 1:
        return () if heads[0] else tuple(range(layers))
    if len(heads) != layers or len({each for each in heads if each}) > 1:
        raise read.wrong("attention.head_count_kv", f"{layers} numbers, 0 or the same one", list(heads))
    return tuple(i for i, each in enumerate(heads) if not each)


def gguf_mamba_names(module: str) -> dict[str, str]:
    """Names in GGUF of the parts of a Mamba-2 layer, by their names in safetensors."""
    parts = {"in_proj": "in", "out_proj": "out", "conv1d": "conv1d", "norm": "norm", "A_log": "a", "D": "d"}
    return {f"{module}.{own}": f"ssm_{name}" for own, name in parts.items()} | {f"{module}.dt_bias": "ssm_dt.bias"}


def gguf_experts(read: Fields, layers: int) -> MoEConfig:
    """The mixture of experts of a GGUF file: in all layers."""
    count = read.integer("expert_count", least=1)
    return MoEConfig(
        count=count,
        active=read.integer("expert_used_count", least=1, most=count),
        ffn=read.integer("expert_feed_forward_length", "feed_forward_length", least=1),
        layers=tuple(range(layers)),
    )


def gguf_routed_experts(read: Fields, chosen: tuple[int, ...], tensors: Collection[str], scoring: int) -> MoEConfig:
    """Experts of the `chosen` layers beside shared ones, as llama.cpp reads them.

    `scoring`: where the file does not say it, `GGUF_SOFTMAX` or `GGUF_SIGMOID`.

    Raises:
        ValueError: another scoring.
    """
    whole, scoring = gguf_experts(read, 0), read.integer("expert_gating_func", default=0) or scoring
    if scoring not in (GGUF_SOFTMAX, GGUF_SIGMOID):
        raise read.wrong("expert_gating_func", f"{GGUF_SOFTMAX} (softmax) or {GGUF_SIGMOID} (sigmoid)", scoring)
    softmax, own = scoring == GGUF_SOFTMAX, read.integer("expert_shared_feed_forward_length", default=0)
    return replace(
        whole,
        layers=chosen,
        shared_ffn=own or read.integer("expert_shared_count", default=0) * whole.ffn,
        renormalize=read.flag("expert_weights_norm", default=False),
        scoring="softmax" if softmax else "sigmoid",
        selection_bias=any(name.endswith(".exp_probs_b.bias") for name in tensors),
        groups=read.integer("expert_group_count", default=0) or 1,
        active_groups=read.integer("expert_group_used_count", default=0) or 1,
        ranked_by=1 if softmax else 2,
        scale=read.number("expert_weights_scale", default=1.0) or 1.0,
    )


def interleaved_qkv(config: ModelConfig, layer: int) -> list[Rows]:
    """Queries and keys, whose rotary pairs lie side by side, in the half-split order; then values."""
    size, rows = config.head_dim, []
    rotary = size if config.rope is None else config.rope.rotary_dim(size)
    head = [*range(0, rotary, 2), *range(1, rotary, 2), *range(rotary, size)]
    for name, heads in (("q_proj", config.heads), ("k_proj", config.kv_heads)):
        order = [first + i for first in range(0, heads * size, size) for i in head]
        rows.append(Rows(f"self_attn.{name}", heads * size, order))
    return [*rows, Rows("self_attn.v_proj", config.kv_heads * size)]


def fused_experts(experts: str) -> dict[str, Callable[[ModelConfig, str], list[Rows] | None]]:
    """Rows in GGUF of gate and up of experts whose names begin so, where these are one tensor."""

    def rows(first: int) -> Callable[[ModelConfig, str], list[Rows] | None]:
        def of(config: ModelConfig, kind: str) -> list[Rows] | None:
            if config.experts is None:
                return None
            ffn = config.experts.ffn
            return [Rows("ffn_gate_up_exps", 2 * ffn, range(first * ffn, (first + 1) * ffn))]

        return of

    return {f"{experts}.{{}}.{name}_proj": rows(first) for first, name in enumerate(("gate", "up"))}


def _dense_ffn(read: Fields, kind: str) -> int:
    return read.integer("intermediate_size", default=0) or read.integer("moe_intermediate_size", least=1)


@dataclass(frozen=True)
class Family:
    """What is peculiar to a family of architectures. The readers read a Hugging Face configuration; their arguments are
    its fields, the `model_type`, and the number of layers.
    """

    kinds: Mapping[str, Kind]
    """By `model_type`."""

    # Tensors.
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of modules of a block that differ from Llama's, or what names begin with; `{}` is the number of an expert.
    """
    rows: Mapping[str, RowsOf] = field(default_factory=dict)
    """Linear layers whose rows the checkpoint stores otherwise, by their field of `BlockWeights`: as `mlp.gate_up`."""
    expert_storage: ExpertStorage = "each"
    stacked_names: tuple[str, str] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    """Names of the tensors of all experts of a layer."""
    unread: tuple[str, ...] = ()
    """What names of tensors of a block begin with that the decoder can do without, in safetensors and in GGUF."""
    final_norm: str = "model.norm"
    prediction: Callable[[str, int], PredictionNames | None] = lambda kind, layers: None
    """The layer of multi-token prediction of a `model_type` with so many layers; None: it has none."""

    # GGUF.
    gguf_kinds: Mapping[str, str] = field(default_factory=dict)
    """The `model_type` of architectures in GGUF files."""
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    """Names of modules of a block in GGUF, by their names in safetensors, where Llama has others."""
    gguf_interleaved: bool = False
    """Whether rotary pairs of queries and keys lie side by side in GGUF."""
    gguf_rows: Mapping[str, Callable[[ModelConfig, str], list[Rows] | None]] = field(default_factory=dict)
    """Linear layers of a block, by their names in safetensors, that are other rows of tensors in GGUF, one below the
    other, of a configuration and an architecture of GGUF; None, or where a file has no such tensors: they have their
    own.
    """
    gguf_joined: Mapping[str, tuple[tuple[str, ...], Callable[..., Any]]] = field(default_factory=dict)
    """Tensors of a block, by their names in safetensors, that are made of others in GGUF where a file has these: their
    names, and what makes it of them and the configuration.
    """
    gguf_inputs: Mapping[str, Callable[[ModelConfig, str], Sequence[int] | None]] = field(default_factory=dict)
    """The columns in GGUF of the inputs of linear layers; None: in their order."""
    gguf_vectors: Mapping[str, Callable[[Any, ModelConfig, str], Any]] = field(default_factory=dict)
    """What makes tensors that are no matrices of those in GGUF, by their names in safetensors."""
    prepare_gguf: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda raw: raw
    """The metadata in the form that Llama's reader expects, without the name of the architecture."""
    read_gguf: Callable[[Fields, str, Mapping[str, Any], Collection[str]], Mapping[str, Any]] = (
        lambda read, kind, values, tensors: {}
    )
    """Further values of `ModelConfig` from the metadata of a GGUF file and the names of its tensors, or others than
    Llama's reader found.
    """

    # Readers of config.json.
    prepare: Callable[[Mapping[str, Any], str], Mapping[str, Any]] = lambda raw, source: raw
    """The configuration in the form that the other readers expect; the second argument names the source."""
    activation_keys: tuple[str, ...] = ("hidden_act", "hidden_activation")
    """Keys of the activation, the first that is there."""
    read_head_dim: Callable[[Fields, int], int] = lambda read, default: read_head_dim(read, ("head_dim",), default)
    """Width of a head; the second argument is its default."""
    read_ffn: Callable[[Fields, str], int] = _dense_ffn
    """Width of the dense feed-forward networks, or of the experts where all are experts."""
    read_windows: Callable[[Fields, str, int], tuple[int, tuple[int, ...]]] = lambda read, kind, layers: windowed(
        read, layers, lambda: tuple(range(layers))
    )
    """Sliding window and its layers, by the rules of the classes of transformers."""
    read_experts: Callable[[Fields, str, int], MoEConfig | None] = lambda read, kind, layers: None
    read_state: Callable[[Fields, str, int], StateConfig | None] = lambda read, kind, layers: None
    """The layers with a recurrent state."""
    read_further: Callable[[Fields, str, Mapping[str, Any]], Mapping[str, Any]] = lambda read, kind, values: {}
    """Further values of `ModelConfig`, or others than Llama's reader found; the last argument is what it found."""
    read_all: Callable[[Fields, int], dict[str, Any]] | None = None
    """Reads what is not the same for all decoders, in place of Llama's reader; values of experts are a mapping."""

    def name(self, name: str) -> str:
        """The name in a block of the tensor that Llama calls `name`."""
        return _renamed(name, self.names)

    def gguf_name(self, name: str) -> str:
        """The name in GGUF of a tensor of a block in safetensors; experts have one name without their number."""
        return _renamed(name, {**GGUF_NAMES, **self.gguf_names})


def _renamed(name: str, names: Mapping[str, str]) -> str:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        own = names.get(".".join(parts[:count]))
        if own is not None:
            return ".".join([own, *parts[count:]])
    return name


GGUF_NAMES: Mapping[str, str] = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.{}.gate_proj": "ffn_gate_exps",
    "mlp.experts.{}.up_proj": "ffn_up_exps",
    "mlp.experts.{}.down_proj": "ffn_down_exps",
}
"""Names of modules of a block in GGUF, by Llama's names in safetensors."""
