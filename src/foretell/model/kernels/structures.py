"""The structures of csrc/interface.h, field by field, and the signatures of the kernels."""

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from typing import Any, Literal, TypeVar

from foretell.model.block.linear import INT8_BLOCK, INT8_GROUP

Precision = Literal["float32", "bfloat16", "int8", "int8-activations"]
"""Arithmetic of a network; see `foretell.model.block.backend.ARITHMETIC`."""
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "int8", "int8-activations")
PANEL_KINDS = (
    "F32", "BF16", "int8", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "Q4_Z",
    "BF16_2:4", "F32 by input", "BF16 by input",
)  # fmt: skip
"""How packed weights are stored: `int8` is rotated and has groups of 192 inputs, `BF16_2:4` holds two of four
inputs, those by input have a row of all outputs per input, the others are as in `StoredMatrix`."""
OPERANDS = PRECISIONS
"""What the inputs of a product are rounded to: float32, bfloat16, rotated int8, or int8 with a scale per 32 inputs."""
ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu", "relu2")
SCORINGS = ("softmax", "sigmoid")
ABI_VERSION = 3
"""Of csrc/interface.h: raised when the meaning of a field changes but its layout does not."""
PANEL = 32
"""Outputs that are packed together."""
PREFIX_UNIT = 64
"""Neurons that the kernels can only leave out together where the first ones are read."""
LANES = 16
"""Numbers per vector, and slots per block of the key-value cache."""
MAX_HEAD_DIM = 576
MAX_GROUP = 16
"""Query heads per key-value head."""
UNREADABLE = -3
"""What a pass returns where weights could not be read from their file."""
KEYS_ONLY = 2
"""Value of `Layer.attention`: keys and values are stored, and nothing is attended to."""


class NeuronPlaces(ctypes.Structure):
    """Where the rows of the neurons of a feed-forward network lie, in memory or in a mapped file."""

    _fields_ = (
        *((name, c_void_p) for name in ("place", "neuron", "hot_records", "file_records")),
        *((name, c_int32) for name in ("hot", "record_words", "file")),
        *(("offset", c_int64), ("counts", c_void_p)),
    )


class Weight(ctypes.Structure):
    """One packed linear layer."""

    _fields_ = (
        *(("words", c_void_p), ("bias", c_void_p), ("input", c_int32), ("output", c_int32)),
        *(("kind", c_int32), ("operand", c_int32), ("next", c_void_p)),
        *(("threshold", c_float), ("stored_input", c_int32)),
        *((name, c_void_p) for name in ("places", "factor", "exact")),
    )


class ExactRows(ctypes.Structure):
    """Rows with which an output head in two stages scores its best outputs again."""

    _fields_ = (("rows", c_void_p), *((name, c_int32) for name in ("row_words", "operand", "count")))


class UnitChoice(ctypes.Structure):
    """The units of a product that a token reads: query heads, or runs of neurons."""

    _fields_ = (
        *((name, c_int32) for name in ("unit", "count", "ahead")),
        *(("threshold", c_float), ("predict_in", Weight), ("predict_out", Weight), ("counts", c_void_p)),
    )


class Experts(ctypes.Structure):
    """The mixture of experts of a layer."""

    _fields_ = (
        *(("router", Weight), ("selection_bias", c_void_p), ("gate_up", c_void_p), ("down", c_void_p)),
        *((name, Weight) for name in ("shared_gate_up", "shared_down")),
        *((name, c_int32) for name in ("count", "active", "ffn", "shared_ffn", "shared_gate", "scoring")),
        *((name, c_int32) for name in ("renormalize", "groups", "active_groups", "ranked_by")),
        *(("scale", c_float), ("weighs_inputs", c_int32), ("expert_scale", c_void_p)),
        *((name, c_void_p) for name in ("router_norm", "input_norm", "output_norm", "dense_norm", "load")),
        ("layer", c_int32),
    )


class Latent(ctypes.Structure):
    """Multi-head latent attention."""

    _fields_ = (
        ("query", Weight),
        *((name, c_void_p) for name in ("query_norm", "key_norm", "key", "value")),
        *((name, c_int32) for name in ("query_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim")),
        ("eps", c_float),
    )


class StateLayer(ctypes.Structure):
    """What takes the place of a layer's attention."""

    _fields_ = (
        *(("kind", c_int32), ("index", c_int32), ("convolution", c_void_p), ("convolution_bias", c_void_p)),
        *((name, c_void_p) for name in ("rate", "time_bias", "skip", "norm")),
        ("eps", c_float),
    )


class States(ctypes.Structure):
    """Recurrent states, and the order in which the tokens of a pass read and change them."""

    _fields_ = (
        *((name, c_int32) for name in ("channels", "taps", "heads", "groups", "key_dim", "value_dim", "width")),
        *((name, c_int32) for name in ("cache_rows", "nodes")),
        *((name, c_void_p) for name in ("inputs", "state", "node_inputs", "node_keys", "node_values", "node_decay")),
        *((name, c_int32) for name in ("rows", "depth", "recorded_count")),
        *((name, c_void_p) for name in ("row", "start", "chain_begin", "chain", "walk_begin", "walk_token")),
        *((name, c_void_p) for name in ("walk_node", "walk_depth", "windows", "tails", "recorded", "node")),
    )


class SparseMlp(ctypes.Structure):
    """A feed-forward network that reads the neurons which each token chooses."""

    _fields_ = (
        *(("rule", c_int32), ("operand", c_int32), ("threshold", c_float), ("row_words", c_int32)),
        *(("gate", Weight), ("gate_rows", c_void_p), ("up_rows", c_void_p)),
        *(("predict_in", Weight), ("predict_out", Weight), ("counts", c_void_p), ("places", c_void_p)),
    )


Memory = ctypes.Structure | ctypes.Array[Weight]
"""Structures that another one points to."""
S = TypeVar("S", bound=ctypes.Structure)


def make(kind: type[S], /, **values: Any) -> S:
    """A structure with these values of its fields; None leaves a field as it is.

    Raises:
        AttributeError: it has no field of that name.
    """
    made = kind()
    names = {name for name, *_ in kind._fields_}
    for name, value in values.items():
        if name not in names:
            raise AttributeError(f"{kind.__name__} of csrc/interface.h has no field {name}")
        if value is not None:
            setattr(made, name, value)
    return made


class Layer(ctypes.Structure):
    """One decoder block."""

    _fields_ = (
        *((name, Weight) for name in ("qkv", "output", "gate_up", "down", "attention_gate")),
        *(("state", c_void_p), ("latent", c_void_p), ("store", c_int32)),
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, c_void_p) for name in ("post_attention_norm", "post_mlp_norm", "sinks")),
        *((name, c_void_p) for name in ("experts", "cos", "sin")),
        *((name, c_int32) for name in ("window", "attention", "mlp", "chunked", "reads_keys")),
        *(("v_norm", c_void_p), ("query_scale", c_void_p)),
        *(("input_gate", Weight), ("input_projection", Weight), ("input_norm", c_void_p)),
        *(("input_first", c_int32), ("scale", c_float), ("sparse", c_void_p)),
        *(("attention_shortcut", Weight), ("mlp_shortcut", Weight), ("heads", c_void_p), ("neurons", c_void_p)),
    )


class Model(ctypes.Structure):
    """Sizes and constants that all blocks share."""

    _fields_ = (
        *((name, c_int32) for name in ("hidden", "heads", "kv_heads", "head_dim", "rotary_dim", "ffn", "context")),
        *((name, c_int32) for name in ("cache_heads", "cache_kind", "activation")),
        *((name, c_float) for name in ("eps", "scale", "softcap", "residual_scale")),
    )


class Stage(ctypes.Structure):
    """One stage of a multi-stage MLP speculator."""

    _fields_ = (
        *((name, Weight) for name in ("project", "token", "output", "head")),
        *(("norm_weight", c_void_p), ("norm_bias", c_void_p), ("eps", c_float)),
    )


class Embedding(ctypes.Structure):
    """A token embedding."""

    _fields_ = (("table", c_void_p), ("vocab", c_int32), ("is_bfloat16", c_int32), ("scale", c_float))


class Fusion(ctypes.Structure):
    """From hidden states of the target to a feature."""

    _fields_ = (("count", c_int32), ("norms", c_void_p), ("fuse", Weight))


class EagleInput(ctypes.Structure):
    """What EAGLE-3's first layer reads: token embeddings and fused hidden states of the target."""

    _fields_ = (
        *(("embedding", Embedding), ("embedding_norm", c_void_p), ("feature_norm", c_void_p)),
        *(("norm_before_residual", c_int32), ("output_norm", c_void_p), ("fusion", Fusion)),
        *(("mask", c_void_p), ("mask_feature", c_void_p)),
    )


class BlockInput(ctypes.Structure):
    """What DFlash's layers read, and its heads beside the output head."""

    _fields_ = (
        *(("embedding", Embedding), ("mask", c_void_p), ("feature_norm", c_void_p)),
        *(("slots", c_int32), ("depth", c_int32), ("fusion", Fusion)),
        *(("markov", Embedding), ("markov_out", Weight), ("confidence", Weight)),
    )


class DynamicTree(ctypes.Structure):
    """Parameters of dynamic trees."""

    _fields_ = (
        *((name, c_int32) for name in ("requests", "depth", "width", "budget")),
        *(("min_score", c_double), ("min_expand_score", c_double)),
        *((name, c_void_p) for name in ("max_depth", "row", "length")),
        *((name, c_void_p) for name in ("sampling", "noise")),
        *(("min_confidence", c_double), ("min_expand_confidence", c_double), ("margin", c_int32)),
        *((name, c_void_p) for name in ("outputs", "output_row", "confidence")),
        *((name, c_void_p) for name in ("token", "parent", "sizes", "score")),
    )


class StatesRead(ctypes.Structure):
    """Positions that layers read before a draft."""

    _fields_ = (
        *(("states", c_void_p), ("state_rows", c_int32)),
        *((name, c_void_p) for name in ("token", "place", "count")),
    )


class TreePass(ctypes.Structure):
    """A pass over token trees."""

    _fields_ = (
        *((name, c_int32) for name in ("requests", "nodes")),
        *((name, c_void_p) for name in ("parent", "active", "scored", "prefix_length", "row", "length")),
        *((name, c_void_p) for name in ("hidden_index", "logit_index", "argmax")),
    )


class Layout(ctypes.Structure):
    """Rows, slots, positions and visible slots of the new tokens; see `model.cache.layout.Layout`."""

    _fields_ = (
        *((name, c_int32) for name in ("count", "max_extra_slots")),
        *((name, c_void_p) for name in ("row", "slot", "position", "visible_prefix", "extra_slots", "layer_inputs")),
        *(("input_width", c_int32), ("queries", c_void_p), ("in_pages", c_void_p)),
    )


class Sampling(ctypes.Structure):
    """Sampling parameters of one row of logits, and the key of its noise."""

    _fields_ = (
        *((name, c_double) for name in ("inverse_temperature", "top_p", "min_p")),
        *(("noise", c_uint64), ("top_k", c_int32)),
    )


class Cache(ctypes.Structure):
    """The key-value cache."""

    _fields_ = (
        *((name, c_void_p) for name in ("k", "v", "k_low", "v_low", "k_scale", "v_scale", "table")),
        *((name, c_int32) for name in ("blocks", "rows", "row_blocks", "bits", "coarse")),
        *((name, c_void_p) for name in ("k_packed", "v_packed", "k_range", "v_range", "packed_table", "packed_slots")),
        *((name, c_int32) for name in ("packed_blocks", "packed_row_blocks", "packed_bits", "packed_residual")),
        *((name, c_void_p) for name in ("states", "k_least", "k_most", "page_slots")),
        ("page_budget", c_int32),
    )


Argument = Any
"""A ctypes type; None for no result."""
_P, _I = c_void_p, c_int32
_STACK = (POINTER(Model), POINTER(Layer), _I)
_TREES = (POINTER(DynamicTree), POINTER(Cache), _I)
SIGNATURES: dict[str, tuple[Argument, tuple[Argument, ...]]] = {
    "foretell_stack": (
        _I,
        (*_STACK, _I, _P, _P, POINTER(Layout), POINTER(Cache), POINTER(_I), _I, _P, _P, _I),
    ),
    "foretell_eagle_forward": (
        _I,
        (*_STACK, POINTER(EagleInput), _P, _P, _I, _P, _P, POINTER(Layout), POINTER(Cache), _I),
    ),
    "foretell_eagle_forward_from_target": (
        _I,
        (*_STACK, POINTER(EagleInput), _P, POINTER(_P), _I, _P, _P, POINTER(Layout), POINTER(Cache), _I),
    ),
    "foretell_eagle_trees": (
        _I,
        (*_STACK, POINTER(EagleInput), POINTER(Weight), _P, _P, POINTER(StatesRead), *_TREES),
    ),
    "foretell_block_trees": (
        _I,
        (
            *(*_STACK, POINTER(Layer), POINTER(BlockInput), POINTER(Weight), _P, _P),
            *(POINTER(StatesRead), _P, *_TREES),
        ),
    ),
    "foretell_mask_trees": (
        _I,
        (
            *(*_STACK, POINTER(EagleInput), POINTER(Weight), _P, _P),
            *(POINTER(StatesRead), _I, *_TREES),
        ),
    ),
    "foretell_decoder_trees": (_I, (*_STACK, POINTER(Embedding), POINTER(Weight), _P, _P, _P, *_TREES)),
    "foretell_mlp_speculator_trees": (
        _I,
        (POINTER(Stage), POINTER(Embedding), _P, _P, _P, POINTER(DynamicTree), _I),
    ),
    "foretell_tree_pass": (
        _I,
        (
            *(*_STACK, POINTER(Weight), _I, _P, POINTER(TreePass), POINTER(Cache)),
            *(_P, _I, _P, _P, _I, _P, _P, _I),
        ),
    ),
    "foretell_keep_states": (None, (POINTER(States), _I, _I, _I, POINTER(_I), _I, _I)),
    "foretell_linear": (None, (POINTER(Weight), _P, _P, _I, _I, _I)),
    "foretell_mlp_speculator_stage": (None, (POINTER(Stage), _P, _P, _P, _P, _I, _I)),
    "foretell_linear_topk_softmax": (None, (POINTER(Weight), _P, _P, _P, _I, _I, _I)),
    "foretell_rms_norm": (None, (_P, _P, c_float, _P, _I, _I, _I)),
    "foretell_argmax": (None, (_P, _P, _I, _I, _I)),
    "foretell_topk": (None, (_P, _P, _P, _I, _I, _I, _I)),
    "foretell_topk_softmax": (None, (_P, _P, _P, _I, _I, _I, _I)),
    "foretell_pack_rows": (None, (_I, _I, _I, _P, _I, _I, _P)),
    "foretell_widen_rows": (None, (_I, _P, _I, _I, _P)),
    "foretell_round_rows": (None, (_I, _I, _P, _I, _I, _P)),
    "foretell_panel_words": (c_int64, (_I, _I)),
    "foretell_sample": (None, (_P, _P, POINTER(Sampling), _P, _I, _I, _I)),
    "foretell_gumbel_noise": (None, (_P, _P, _P, _I, _I, _I)),
    "foretell_kept_tokens": (_I, (_P, POINTER(Sampling), _P, _P, _I, _I)),
    "foretell_cache_move": (None, (_I, POINTER(Cache), _I, _I, _I, _I, POINTER(_I), _I, _I)),
    "foretell_cache_copy": (None, (_I, POINTER(Cache), _I, _P, _I, POINTER(Cache), _I, _I, _I, _I, _I)),
    "foretell_instructions": (c_char_p, ()),
}
"""Result and arguments of every function of csrc/kernels.cpp."""


def interface() -> str:
    """The interface declared here, in the format of `foretell_abi`: a line per constant, structure and function."""
    constants = {
        "version": ABI_VERSION,
        "panel": PANEL,
        "lanes": LANES,
        "max_head_dim": MAX_HEAD_DIM,
        "max_group": MAX_GROUP,
        "int8_block": INT8_BLOCK,
        "int8_group": INT8_GROUP,
    }
    of_products = NeuronPlaces, Weight, ExactRows, UnitChoice
    of_layers = (*of_products, Experts, StateLayer, States, Latent, SparseMlp, Layer, Model)
    of_drafts = (Stage, Embedding, Fusion, EagleInput, BlockInput, DynamicTree, StatesRead, TreePass)
    structures = (*of_layers, *of_drafts, Layout, Sampling, Cache)
    lines = [f"{name} {value}" for name, value in constants.items()]
    for structure in structures:
        fields = [getattr(structure, field[0]) for field in structure._fields_]
        lines.append(
            " ".join([structure.__name__, str(ctypes.sizeof(structure)), *(f"{f.offset}:{f.size}" for f in fields)])
        )
    for name, (result, arguments) in SIGNATURES.items():
        lines.append(f"{name} {''.join(_letter(kind) for kind in (result, *arguments))}")
    return "\n".join(lines) + "\n"


def _letter(kind: Argument) -> str:
    return {None: "v", c_int32: "i", c_int64: "l", c_float: "f"}.get(kind, "p")


def library_interface(kernels: ctypes.CDLL) -> str:
    """The interface that a library reports; empty if it reports none."""
    try:
        report = kernels.foretell_abi
    except AttributeError:
        return ""
    report.argtypes, report.restype = [], c_char_p
    return str(report().decode())


def declare_signatures(kernels: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the kernels' signatures to ctypes; returns its argument."""
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(kernels, name)
        function.restype, function.argtypes = result, arguments
    return kernels
