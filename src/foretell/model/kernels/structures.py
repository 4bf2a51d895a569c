"""The structures of kernels/interface.h, field by field, and the kernels' signatures."""

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from typing import Any, Literal

from foretell.model.linear import INT8_BLOCK, INT8_GROUP

Precision = Literal["float32", "bfloat16", "int8"]
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "int8")
ACTIVATIONS = ("silu", "gelu_tanh")
ABI_VERSION = 1
"""Of kernels/interface.h: raised when the meaning of something changes and its form does not."""
PANEL = 32
"""Outputs that are packed together."""
LANES = 16
"""Numbers of a vector."""


class Weight(ctypes.Structure):
    """One packed linear layer."""

    _fields_ = (("words", c_void_p), ("bias", c_void_p), ("input", c_int32), ("output", c_int32))


class Layer(ctypes.Structure):
    """One decoder block."""

    _fields_ = (
        *((name, Weight) for name in ("qkv", "output", "gate_up", "down")),
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, c_void_p) for name in ("post_attention_norm", "post_mlp_norm", "cos", "sin")),
        *((name, c_int32) for name in ("window", "attention", "mlp")),
    )


class Model(ctypes.Structure):
    """What all blocks share."""

    _fields_ = (
        *((name, c_int32) for name in ("hidden", "heads", "kv_heads", "head_dim", "ffn", "context")),
        *((name, c_int32) for name in ("precision", "activation")),
        *((name, c_float) for name in ("eps", "scale", "softcap")),
    )


class Stage(ctypes.Structure):
    """One stage of a multi-stage MLP speculator."""

    _fields_ = (
        *((name, Weight) for name in ("project", "token", "output", "head")),
        *(("norm_weight", c_void_p), ("norm_bias", c_void_p), ("eps", c_float)),
    )


class Embedding(ctypes.Structure):
    """Embeddings of tokens."""

    _fields_ = (("table", c_void_p), ("vocab", c_int32), ("halves", c_int32), ("scale", c_float))


class Entry(ctypes.Structure):
    """What EAGLE-3's layers begin with."""

    _fields_ = (
        *(("embedding", Embedding), ("embedding_norm", c_void_p), ("feature_norm", c_void_p), ("normed", c_int32)),
        *(("kinds", c_int32), ("state_norms", c_void_p), ("fuse", Weight)),
    )


class Beam(ctypes.Structure):
    """Trees by confidence that are asked for."""

    _fields_ = (
        *((name, c_int32) for name in ("texts", "depth", "width", "budget")),
        *(("least", c_double), ("stop", c_double)),
        *((name, c_void_p) for name in ("room", "row", "length")),
    )


class Tokens(ctypes.Structure):
    """Where the new tokens stand."""

    _fields_ = (
        *((name, c_int32) for name in ("count", "extras")),
        *((name, c_void_p) for name in ("row", "slot", "position", "prefix", "extra")),
    )


class Memory(ctypes.Structure):
    """The cache of keys and values."""

    _fields_ = (("k", c_void_p), ("v", c_void_p), ("rows", c_int32), ("slots", c_int32))


Argument = Any
"""A type of ctypes; None for no result."""
_P, _I = c_void_p, c_int32
_STACK = (POINTER(Model), POINTER(Layer), _I)
_GROWN = (POINTER(Beam), POINTER(Memory), _P, _P, _P, _I)
SIGNATURES: dict[str, tuple[Argument, tuple[Argument, ...]]] = {
    "foretell_stack": (
        _I,
        (*_STACK, _I, _P, _P, POINTER(Tokens), POINTER(Memory), POINTER(_I), _I, _P, _I),
    ),
    "foretell_eagle": (
        _I,
        (*_STACK, POINTER(Entry), _P, _P, _I, _P, _P, POINTER(Tokens), POINTER(Memory), _I),
    ),
    "foretell_eagle_read": (
        _I,
        (*_STACK, POINTER(Entry), _P, POINTER(_P), _I, _P, _P, POINTER(Tokens), POINTER(Memory), _I),
    ),
    "foretell_beam": (_I, (*_STACK, POINTER(Entry), POINTER(Weight), _P, _P, _P, *_GROWN)),
    "foretell_decoder_beam": (_I, (*_STACK, POINTER(Embedding), POINTER(Weight), _P, _P, _P, *_GROWN)),
    "foretell_stages_beam": (
        _I,
        (_I, POINTER(Stage), POINTER(Embedding), _P, _P, _P, POINTER(Beam), _P, _P, _P, _I),
    ),
    "foretell_linear": (None, (_I, POINTER(Weight), _P, _P, _I, _I, _I)),
    "foretell_stage": (None, (_I, POINTER(Stage), _P, _P, _P, _P, _I, _I)),
    "foretell_guess": (None, (_I, POINTER(Weight), _P, _P, _P, _I, _I, _I)),
    "foretell_rms_norm": (None, (_P, _P, c_float, _P, _I, _I, _I)),
    "foretell_argmax": (None, (_P, _P, _I, _I, _I)),
    "foretell_topk": (None, (_P, _P, _P, _I, _I, _I, _I)),
    "foretell_likeliest": (None, (_P, _P, _P, _I, _I, _I, _I)),
    "foretell_rotate": (None, (_P, c_int64)),
    "foretell_instructions": (c_char_p, ()),
}
"""Result and arguments of every function of kernels.cpp."""


def interface() -> str:
    """The interface that is declared here, in the words of `foretell_abi`."""
    constants = {
        "version": ABI_VERSION,
        "panel": PANEL,
        "lanes": LANES,
        "int8_block": INT8_BLOCK,
        "int8_group": INT8_GROUP,
    }
    structures = (Weight, Layer, Model, Stage, Embedding, Entry, Beam, Tokens, Memory)
    lines = [f"{name} {value}" for name, value in constants.items()]
    for structure in structures:
        name = "Cache" if structure is Memory else structure.__name__
        fields = [getattr(structure, field[0]) for field in structure._fields_]
        lines.append(" ".join([name, str(ctypes.sizeof(structure)), *(f"{f.offset}:{f.size}" for f in fields)]))
    for name, (result, arguments) in SIGNATURES.items():
        lines.append(f"{name} {''.join(_letter(kind) for kind in (result, *arguments))}")
    return "\n".join(lines) + "\n"


def _letter(kind: Argument) -> str:
    return {None: "v", c_int32: "i", c_int64: "l", c_float: "f"}.get(kind, "p")


def reported(kernels: ctypes.CDLL) -> str:
    """The interface that a library reports; nothing if it reports none."""
    try:
        report = kernels.foretell_abi
    except AttributeError:
        return ""
    report.argtypes, report.restype = [], c_char_p
    return str(report().decode())


def declare(kernels: ctypes.CDLL) -> ctypes.CDLL:
    """Tell ctypes the kernels' signatures; returns its argument."""
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(kernels, name)
        function.restype, function.argtypes = result, arguments
    return kernels
