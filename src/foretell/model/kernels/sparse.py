"""Sparse feed-forward networks packed for the kernels."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from foretell.model.block.sparsity import (
    FirstNeurons,
    GateThreshold,
    InputThresholds,
    NeuronRule,
    PredictedNeurons,
    Predictor,
)
from foretell.model.block.spec import BlockWeights
from foretell.model.kernels import structures
from foretell.model.kernels.block_weights import PackedBlock
from foretell.model.kernels.linear import LinearPlan, PackedLinears, float_precision
from foretell.model.kernels.pack import interleaved_rows, pad_bias, plan_rows
from foretell.model.kernels.packed_file import PackedPart
from foretell.model.kernels.rows import in_huge_pages, row_tensor, widened
from foretell.model.kernels.stack import NativeStack
from foretell.model.kernels.structures import LANES, OPERANDS, PANEL, PANEL_KINDS, PREFIX_UNIT, Precision
from foretell.model.matrices.kinds import BLOCKS
from foretell.model.matrices.stored import Matrix

_BY_GATE, _PREDICTED = range(2)
"""`NeuronRule` of csrc/interface.h."""
_UNITS = {"int8": 192} | {kind: inputs for kind, (inputs, _) in BLOCKS.items() if inputs > PREFIX_UNIT}
"""Neurons that the kernels can only leave out together, by the kind of the weights; of other kinds `PREFIX_UNIT`."""


def by_input(
    matrix: Float[Tensor, "o i"], precision: Precision, threshold: float = 0.0, bias: Tensor | None = None
) -> tuple[structures.Weight, list[Tensor]]:
    """A weight that is stored by input, and its memory; see csrc/by_input.h."""
    outputs, inputs = matrix.shape
    packed = in_huge_pages(input_rows(matrix, precision))
    memory = [packed] if bias is None else [packed, pad_bias(bias)]
    return structures.Weight(
        words=packed.data_ptr(),
        bias=None if bias is None else memory[1].data_ptr(),
        inputs=inputs,
        outputs=outputs,
        kind=by_input_kind(precision),
        operand=OPERANDS.index("float32"),
        next=None,
        threshold=threshold,
        stored_inputs=0,
    ), memory


def by_input_kind(precision: Precision) -> int:
    """The kind of weights that are stored by input."""
    return PANEL_KINDS.index("F32 by input" if precision == "float32" else "BF16 by input")


def input_rows(matrix: Matrix, precision: Precision) -> Float[Tensor, "i ..."]:
    """A row of all outputs, padded to whole panels, for every input; see csrc/by_input.h."""
    rows = torch.nn.functional.pad(widened(matrix).T, (0, -matrix.shape[0] % PANEL))
    if precision == "float32":
        return rows
    return rows.to(torch.bfloat16).view(len(rows), -1, 2, LANES).transpose(2, 3)


@dataclass(frozen=True)
class NeuronCounts:
    """What sparse layers have read: per layer the tokens, the neurons these chose, and the neurons that were read, a
    neuron that several tokens of a pass chose being read once.
    """

    numbers: Tensor
    """[layers, 3], int64; the kernels add to it."""
    neurons: int
    """Of a layer."""

    def chosen_share(self) -> float:
        """Mean share of the neurons that a token chooses."""
        tokens, chosen, _ = self.numbers.sum(0).tolist()
        return float(chosen / max(tokens * self.neurons, 1))


class SparseBlocks:
    """Makes the sparse blocks of a stack from the rules of its layers and the weights of its blocks; `unit`: neurons
    that are chosen together.
    """

    def __init__(self, stack: NativeStack, read_block: Callable[[int], BlockWeights] | None, unit: int = 1) -> None:
        self._stack, self._read = stack, read_block
        self._floats = float_precision(stack.precision)
        config = stack.config
        self.counts = NeuronCounts(torch.zeros(config.layers, 3, dtype=torch.int64), config.ffn // unit)
        self.head_counts = NeuronCounts(torch.zeros(config.layers, 3, dtype=torch.int64), config.heads)
        """The same of query heads."""

    def make(self, i: int, rule: NeuronRule) -> PackedBlock:
        """Block `i` with a rule, sharing what it can with the dense block."""
        dense = self._stack.blocks[i]
        struct = structures.Layer.from_buffer_copy(dense.struct)
        if isinstance(rule, FirstNeurons):
            return self._shortened(dense, struct, rule.size)
        if not isinstance(rule, PredictedNeurons):
            return self._with_rows(i, dense, struct, rule)
        chosen = list[PackedPart]()
        if rule.heads is not None:
            chosen.append(self._choice(rule.heads, self._stack.config.head_dim, self.head_counts.numbers[i]))
            struct.heads = ctypes.addressof(chosen[-1].structs[0])
        if rule.unit > 1:
            chosen.append(self._choice(rule, rule.unit, self.counts.numbers[i]))
            struct.neurons = ctypes.addressof(chosen[-1].structs[0])
            block = PackedBlock((struct, *dense.structs[1:]), dense.tensors)
        else:
            block = self._with_rows(i, dense, struct, rule)
        structs = [struct for part in chosen for struct in part.structs]
        return PackedBlock((*block.structs, *structs), (*block.tensors, *(t for part in chosen for t in part.tensors)))

    def _choice(self, rule: Predictor, unit: int, counts: Tensor) -> PackedPart:
        """A predictor of units that are read as they are packed."""
        packed = PackedLinears.pack(_plan_predictor(rule, self._floats), self._stack.kernels)
        predict_in, predict_out = packed.structs
        made = structures.make(
            structures.UnitChoice,
            unit=unit,
            count=len(rule.outputs),
            ahead=rule.ahead,
            threshold=rule.threshold,
            predict_in=predict_in,
            predict_out=predict_out,
            counts=counts.data_ptr(),
        )
        return PackedPart([made, *packed.further], [*packed.tensors, counts])

    def _with_rows(
        self,
        i: int,
        dense: PackedBlock,
        struct: structures.Layer,
        rule: GateThreshold | InputThresholds | PredictedNeurons,
    ) -> PackedBlock:
        """Block `i` with a second copy of weights, stored by row or by input."""
        assert self._read is not None
        weights = self._read(i)
        if isinstance(rule, InputThresholds):
            further, memory = self._by_inputs(struct, weights, rule)
        else:
            further, memory = self._chosen(i, struct, weights, rule)
        return PackedBlock((struct, *dense.structs[1:], *further), (*dense.tensors, *memory))

    def _shortened(self, dense: PackedBlock, struct: structures.Layer, size: int) -> PackedBlock:
        """The first neurons: a part of the same panels."""
        kind = PANEL_KINDS[struct.down.kind]
        unit = _UNITS.get(kind, PREFIX_UNIT)
        whole = struct.down.inputs
        if size != whole and size % unit:
            raise ValueError(
                f"{size} of {whole} neurons were asked for, and the kernels read multiples of {unit} of {kind} weights"
            )
        struct.gate_up.outputs = 2 * size
        struct.down.inputs, struct.down.stored_inputs = size, whole
        return PackedBlock((struct, *dense.structs[1:]), dense.tensors)

    def _by_inputs(
        self, struct: structures.Layer, weights: BlockWeights, rule: InputThresholds
    ) -> tuple[list[structures.Memory], list[Tensor]]:
        mlp, qkv, output = weights.mlp, weights.qkv, weights.output
        assert mlp is not None and qkv is not None and output is not None
        both = torch.cat([widened(part) for part in mlp.gate_up.parts])
        order = torch.from_numpy(np.ascontiguousarray(interleaved_rows(len(both) // 2)))
        gate_up = torch.nn.functional.pad(both, (0, 0, 0, 1))[order]
        memory = list[Tensor]()
        for name, matrix, threshold, bias in (
            ("qkv", torch.cat([widened(part) for part in qkv.parts]), rule.qkv, qkv.bias),
            ("output", widened(output.parts[0]), rule.output, output.bias),
            ("gate_up", gate_up, rule.gate_up, None),
            ("down", widened(mlp.down.parts[0]), rule.down, None),
        ):
            weight, own = by_input(matrix, self._floats, threshold, bias)
            setattr(struct, name, weight)
            memory += own
        return [], memory

    def _chosen(
        self, i: int, struct: structures.Layer, weights: BlockWeights, rule: GateThreshold | PredictedNeurons
    ) -> tuple[list[structures.Memory], list[Tensor]]:
        mlp = weights.mlp
        assert mlp is not None and mlp.gate is not None
        struct.down, memory = by_input(widened(mlp.down.parts[0]), self._floats)
        up = in_huge_pages(row_tensor(mlp.up, self._floats))
        memory.append(up)
        sparse, further, tensors = self.choosing(i, mlp.gate, rule)
        sparse.row_words, sparse.up_rows = up.nbytes // len(up) // 4, up.data_ptr()
        if isinstance(rule, PredictedNeurons):
            gate_rows = in_huge_pages(row_tensor(mlp.gate, self._floats))
            sparse.gate_rows = gate_rows.data_ptr()
            memory.append(gate_rows)
        struct.gate_up, struct.sparse = structures.Weight(), ctypes.addressof(sparse)
        return [sparse, *further], [*memory, *tensors]

    def choosing(
        self, i: int, gate: Matrix, rule: GateThreshold | PredictedNeurons
    ) -> tuple[structures.SparseMlp, list[structures.Memory], list[Tensor]]:
        """How the tokens of block `i` choose neurons, without the rows of these; and the memory of that."""
        sparse = structures.SparseMlp(
            rule=_BY_GATE if isinstance(rule, GateThreshold) else _PREDICTED,
            operand=OPERANDS.index(self._floats),
            threshold=rule.threshold,
            counts=self.counts.numbers[i].data_ptr(),
        )
        if isinstance(rule, GateThreshold):
            plans = [LinearPlan(plan_rows([gate], self._stack.precision))]
        else:
            plans = _plan_predictor(rule, self._floats)
        packed = PackedLinears.pack(plans, self._stack.kernels)
        if isinstance(rule, GateThreshold):
            sparse.gate = packed.structs[0]
        else:
            sparse.predict_in, sparse.predict_out = packed.structs
        return sparse, list(packed.further), [*packed.tensors, self.counts.numbers]


def _plan_predictor(rule: Predictor, floats: Precision) -> list[LinearPlan]:
    """How to pack the two matrices of a predictor."""
    return [LinearPlan(plan_rows([rule.inputs], floats)), LinearPlan(plan_rows([rule.outputs], floats), rule.bias)]
