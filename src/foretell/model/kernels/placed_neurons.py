"""Sparse blocks whose hot neurons are in memory and whose other neurons are in a mapped file (PowerInfer, arXiv
2312.12456).

The rows of all neurons have the numbers that they have in a sparse block in memory, and are added in the same order, so
that results do not depend on where a neuron lies.
"""

import ctypes
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from foretell.model.block.sparsity import GateThreshold, PredictedNeurons
from foretell.model.block.spec import BlockWeights
from foretell.model.kernels import structures
from foretell.model.kernels.block_weights import PackedBlock
from foretell.model.kernels.neuron_file import NeuronFile
from foretell.model.kernels.pack import allocate
from foretell.model.kernels.sparse import SparseBlocks, by_input_kind
from foretell.model.kernels.stack import NativeStack
from foretell.model.kernels.structures import OPERANDS


@dataclass(frozen=True)
class FileReads:
    """What passes have read from the file of neurons."""

    numbers: Tensor
    """[layers, 3], int64: neurons, requests, bytes; the kernels add to it."""

    def total(self) -> tuple[int, int, int]:
        """Neurons, requests and bytes of all layers."""
        neurons, requests, size = self.numbers.sum(0).tolist()
        return neurons, requests, size


class PlacedBlocks:
    """Makes the blocks of a stack. `orders`: per layer the neurons in the order of the file."""

    def __init__(self, stack: NativeStack, file: NeuronFile, orders: Int[Tensor, "l f"]) -> None:
        self._stack, self._file = stack, file
        self._sparse = SparseBlocks(stack, None)
        self._neuron = orders.to(torch.int32).contiguous()
        self._place = orders.argsort(1).to(torch.int32).contiguous()
        self.counts = self._sparse.counts
        self.reads = FileReads(torch.zeros(len(orders), 3, dtype=torch.int64))

    def without_neurons(self, i: int, weights: BlockWeights, rule: GateThreshold | PredictedNeurons) -> PackedBlock:
        """Block `i` with the rule by which it chooses neurons, and without these."""
        assert weights.mlp is not None and weights.mlp.gate is not None
        attention = self._stack.pack_block(i, replace(weights, mlp=None))
        sparse, further, tensors = self._sparse.choosing(i, weights.mlp.gate, rule)
        struct = structures.Layer.from_buffer_copy(attention.struct)
        struct.sparse = ctypes.addressof(sparse)
        return PackedBlock((struct, *attention.structs[1:], sparse, *further), (*attention.tensors, *tensors))

    def with_neurons(self, i: int, block: PackedBlock, hot: int) -> PackedBlock:
        """A block of `without_neurons` with the first `hot` neurons of the file in memory.

        Raises:
            OSError: the file cannot be read.
        """
        file = self._file
        records = allocate(max(hot * file.record_bytes, 1))
        records[: hot * file.record_bytes] = torch.from_numpy(file.read(i, hot)).view(-1)
        places = structures.NeuronPlaces(
            place=self._place[i].data_ptr(),
            neuron=self._neuron[i].data_ptr(),
            hot_records=records.data_ptr(),
            file_records=file.address(i),
            hot=hot,
            record_words=file.record_bytes // 4,
            file=file.descriptor,
            offset=i * file.layer_bytes,
            counts=self.reads.numbers[i].data_ptr(),
        )
        sparse = next(part for part in block.structs if isinstance(part, structures.SparseMlp))
        sparse.row_words, sparse.places = file.row_words, ctypes.addressof(places)
        block.struct.down = structures.Weight(
            words=records.data_ptr(),
            bias=None,
            inputs=file.neurons,
            outputs=file.hidden,
            kind=by_input_kind(file.floats),
            operand=OPERANDS.index("float32"),
            next=None,
            threshold=0.0,
            stored_inputs=0,
            places=ctypes.addressof(places),
        )
        places.kept = file, self._place, self._neuron, self.reads
        return PackedBlock((*block.structs, places), (*block.tensors, records))
