"""The structures of csrc/interface.h and the signatures of csrc/kernels.cpp, as these files declare them."""

import ctypes
import re
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any, Literal, TypeVar

from foretell.model.block.linear import INT8_BLOCK, INT8_GROUP

Precision = Literal["float32", "bfloat16", "int8", "int8-activations"]
"""Arithmetic of a network; see `foretell.model.block.backend.ARITHMETIC`."""
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "int8", "int8-activations")
PANEL_KINDS = (
    "F32", "BF16", "int8", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "Q4_Z",
    "NVFP4", "IQ4_NL", "IQ4_XS", "BF16_2:4", "F32 by input", "BF16 by input",
)  # fmt: skip
"""How packed weights are stored: `int8` is rotated and has groups of 192 inputs, `BF16_2:4` holds two of four
inputs, those by input have a row of all outputs per input, the others are as in `StoredMatrix`."""
OPERANDS = PRECISIONS
"""What the inputs of a product are rounded to: float32, bfloat16, rotated int8, or int8 with a scale per 32 inputs."""
ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu", "relu2", "relu")
SCORINGS = ("softmax", "sigmoid")
NORMED_HEADS = ("head", "all", "rotated")
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
SOURCES = Path(__file__).parent / "csrc"
Argument = Any
"""A ctypes type; None for no result."""
_NUMBERS: dict[str, Argument] = {
    "int32_t": c_int32, "int64_t": c_int64, "uint64_t": c_uint64, "float": c_float, "double": c_double, "void": None,
}  # fmt: skip


def _declarations(file: str) -> str:
    """A source file without its comments and `const`."""
    text = re.sub(r"//.*", "", (SOURCES / file).read_text())
    return re.sub(r"\bconst\b ?", "", text)


_STRUCTURES = dict(re.findall(r"\bstruct (\w+) \{(.*?)\n\};", _declarations("interface.h"), re.DOTALL))
"""The fields of every structure, as C."""


def _fields(structure: str) -> list[tuple[str, Argument]]:
    """Names and types of the fields of a structure; all pointers are addresses."""
    fields = list[tuple[str, Argument]]()
    for declaration in filter(None, map(str.strip, _STRUCTURES[structure].split(";"))):
        function = re.search(r"\(\*(\w+)\)", declaration)
        if function is not None:
            fields.append((function[1], c_void_p))
            continue
        kind, names = re.fullmatch(r"(\w+)(.*)", declaration, re.DOTALL).groups()  # type: ignore[union-attr]
        for name in names.split(","):
            fields.append((name.strip(" *\n"), c_void_p if "*" in name else _NUMBERS.get(kind) or globals()[kind]))
    return fields


class NeuronPlaces(ctypes.Structure):
    """Where the rows of the neurons of a feed-forward network lie, in memory or in a mapped file."""

    _fields_ = _fields("NeuronPlaces")


class Weight(ctypes.Structure):
    """One packed linear layer."""

    _fields_ = _fields("Weight")


class SparseMlp(ctypes.Structure):
    """A feed-forward network that reads the neurons which each token chooses."""

    _fields_ = _fields("SparseMlp")


class UnitChoice(ctypes.Structure):
    """The units of a product that a token reads: query heads, or runs of neurons."""

    _fields_ = _fields("UnitChoice")


class Experts(ctypes.Structure):
    """The mixture of experts of a layer."""

    _fields_ = _fields("Experts")


class StateLayer(ctypes.Structure):
    """What takes the place of a layer's attention."""

    _fields_ = _fields("StateLayer")


class States(ctypes.Structure):
    """Recurrent states, and the order in which the tokens of a pass read and change them."""

    _fields_ = _fields("States")


class Latent(ctypes.Structure):
    """Multi-head latent attention."""

    _fields_ = _fields("Latent")


class Layer(ctypes.Structure):
    """One decoder block."""

    _fields_ = _fields("Layer")


class Model(ctypes.Structure):
    """Sizes and constants that all blocks share."""

    _fields_ = _fields("Model")


class Stage(ctypes.Structure):
    """One stage of a multi-stage MLP speculator."""

    _fields_ = _fields("Stage")


class Embedding(ctypes.Structure):
    """A token embedding."""

    _fields_ = _fields("Embedding")


class Fusion(ctypes.Structure):
    """From hidden states of the target to a feature."""

    _fields_ = _fields("Fusion")


class EagleInput(ctypes.Structure):
    """What EAGLE-3's first layer reads: token embeddings and fused hidden states of the target."""

    _fields_ = _fields("EagleInput")


class BlockInput(ctypes.Structure):
    """What DFlash's layers read, and its heads beside the output head."""

    _fields_ = _fields("BlockInput")


class Sampling(ctypes.Structure):
    """Sampling parameters of one row of logits, and the key of its noise."""

    _fields_ = _fields("Sampling")


class DynamicTree(ctypes.Structure):
    """Parameters of dynamic trees."""

    _fields_ = _fields("DynamicTree")


class StatesRead(ctypes.Structure):
    """Positions that layers read before a draft."""

    _fields_ = _fields("StatesRead")


class Layout(ctypes.Structure):
    """Rows, slots, positions and visible slots of the new tokens; see `model.cache.layout.Layout`."""

    _fields_ = _fields("Layout")


class TreePass(ctypes.Structure):
    """A pass over token trees."""

    _fields_ = _fields("TreePass")


class Cache(ctypes.Structure):
    """The key-value cache."""

    _fields_ = _fields("Cache")


STRUCTURES: tuple[type[ctypes.Structure], ...] = (
    NeuronPlaces,
    Weight,
    SparseMlp,
    UnitChoice,
    Experts,
    StateLayer,
    States,
    Latent,
    Layer,
    Model,
    Stage,
    Embedding,
    Fusion,
    EagleInput,
    BlockInput,
    Sampling,
    DynamicTree,
    StatesRead,
    Layout,
    TreePass,
    Cache,
)
"""In the order of `foretell_abi`."""
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


def signatures() -> dict[str, tuple[Argument, tuple[Argument, ...]]]:
    """Result and arguments of every function of csrc/kernels.cpp."""
    text = _declarations("kernels.cpp")
    functions = re.findall(r"^([\w*]+) (foretell_\w+)\(([^)]*)\) \{", text, re.MULTILINE)
    return {
        name: (_argument(result), tuple(_argument(each) for each in filter(None, arguments.split(","))))
        for result, name, arguments in functions
    }


def _argument(declaration: str) -> Argument:
    kind, pointers = declaration.split()[0].rstrip("*"), declaration.count("*")
    if not pointers:
        return _NUMBERS[kind]
    if kind == "char":
        return c_char_p
    return POINTER(globals()[kind]) if pointers == 1 and kind in _STRUCTURES else c_void_p


def interface() -> str:
    """The interface declared here, in the format of `foretell_abi`: a line per constant and per structure."""
    constants = {
        "panel": PANEL,
        "lanes": LANES,
        "max_head_dim": MAX_HEAD_DIM,
        "max_group": MAX_GROUP,
        "int8_block": INT8_BLOCK,
        "int8_group": INT8_GROUP,
    }
    sizes = {structure.__name__: ctypes.sizeof(structure) for structure in STRUCTURES}
    return "".join(f"{name} {number}\n" for name, number in (constants | sizes).items())


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
    for name, (result, arguments) in signatures().items():
        function = getattr(kernels, name)
        function.restype, function.argtypes = result, arguments
    return kernels


def prefix_size(share: float, neurons: int) -> int:
    """The largest multiple of `PREFIX_UNIT` within a share of the neurons, but at least one unit; of 1 all of them. Of
    networks of at most a unit each neuron counts.
    """
    unit = PREFIX_UNIT if neurons > PREFIX_UNIT else 1
    return neurons if share == 1 else max(unit, int(share * neurons) // unit * unit)
