"""The structures of kernels/interface.h, field by field, and the kernels' signatures."""

import ctypes
import functools
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_void_p
from typing import Literal

from foretell.model.native import build

Precision = Literal["float32", "bfloat16", "int8"]
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "int8")
ACTIVATIONS = ("silu", "gelu_tanh")


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


def library() -> ctypes.CDLL:
    """The kernels, ready to be called.

    Raises:
        RuntimeError: they are not available; the message says why.
    """
    kernels = build.load()
    if kernels is None:
        raise RuntimeError(build.why_not())
    return declare(kernels)


@functools.cache
def declare(kernels: ctypes.CDLL) -> ctypes.CDLL:
    """Tell ctypes the kernels' signatures; returns its argument."""
    kernels.foretell_stack.argtypes = [
        *(POINTER(Model), POINTER(Layer), c_int32, c_int32),
        *(c_void_p, c_void_p, POINTER(Tokens), POINTER(Memory)),
        *(POINTER(c_int32), c_int32, c_void_p, c_int32),
    ]
    kernels.foretell_stack.restype = c_int32
    kernels.foretell_eagle.argtypes = [
        *(POINTER(Model), POINTER(Layer), c_int32, POINTER(Entry)),
        *(c_void_p, c_void_p, c_int32, c_void_p, c_void_p),
        *(POINTER(Tokens), POINTER(Memory), c_int32),
    ]
    kernels.foretell_eagle.restype = c_int32
    kernels.foretell_eagle_read.argtypes = [
        *(POINTER(Model), POINTER(Layer), c_int32, POINTER(Entry)),
        *(c_void_p, POINTER(c_void_p), c_int32, c_void_p, c_void_p, POINTER(Tokens), POINTER(Memory), c_int32),
    ]
    kernels.foretell_eagle_read.restype = c_int32
    kernels.foretell_beam.argtypes = [
        *(POINTER(Model), POINTER(Layer), c_int32, POINTER(Entry), POINTER(Weight), c_void_p, c_void_p, c_void_p),
        *(POINTER(Beam), POINTER(Memory), c_void_p, c_void_p, c_void_p, c_int32),
    ]
    kernels.foretell_beam.restype = c_int32
    kernels.foretell_decoder_beam.argtypes = [
        *(POINTER(Model), POINTER(Layer), c_int32, POINTER(Embedding), POINTER(Weight), c_void_p, c_void_p, c_void_p),
        *(POINTER(Beam), POINTER(Memory), c_void_p, c_void_p, c_void_p, c_int32),
    ]
    kernels.foretell_decoder_beam.restype = c_int32
    kernels.foretell_stages_beam.argtypes = [
        *(c_int32, POINTER(Stage), POINTER(Embedding), c_void_p, c_void_p, c_void_p),
        *(POINTER(Beam), c_void_p, c_void_p, c_void_p, c_int32),
    ]
    kernels.foretell_stages_beam.restype = c_int32
    kernels.foretell_linear.argtypes = [c_int32, POINTER(Weight), c_void_p, c_void_p, c_int32, c_int32, c_int32]
    kernels.foretell_linear.restype = None
    kernels.foretell_stage.argtypes = [c_int32, POINTER(Stage), *[c_void_p] * 4, c_int32, c_int32]
    kernels.foretell_stage.restype = None
    kernels.foretell_guess.argtypes = [c_int32, POINTER(Weight), *[c_void_p] * 3, c_int32, c_int32, c_int32]
    kernels.foretell_guess.restype = None
    kernels.foretell_rms_norm.argtypes = [c_void_p, c_void_p, c_float, c_void_p, c_int32, c_int32, c_int32]
    kernels.foretell_rms_norm.restype = None
    kernels.foretell_argmax.argtypes = [c_void_p, c_void_p, c_int32, c_int32, c_int32]
    kernels.foretell_argmax.restype = None
    for pick in (kernels.foretell_topk, kernels.foretell_likeliest):
        pick.argtypes, pick.restype = [c_void_p, c_void_p, c_void_p, c_int32, c_int32, c_int32, c_int32], None
    kernels.foretell_rotate.argtypes = [c_void_p, c_int64]
    kernels.foretell_rotate.restype = None
    for constant in (kernels.foretell_int8_block, kernels.foretell_int8_group):
        constant.argtypes, constant.restype = [], c_int32
    return kernels
