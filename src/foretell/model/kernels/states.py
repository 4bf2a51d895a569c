"""Layers with a recurrent state on the CPU kernels."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from foretell.model.block.spec import StateWeights
from foretell.model.cache.layout import Layout
from foretell.model.cache.state_plan import PassPlan
from foretell.model.cache.state_store import StateStore
from foretell.model.config.states import DeltaNetConfig, Mamba2Config, ShortConvConfig, StateConfig
from foretell.model.kernels import build, structures
from foretell.model.kernels.linear import PartMemory

_KINDS = (DeltaNetConfig, ShortConvConfig, Mamba2Config)
"""In the order of `StateKind` in csrc/interface.h."""
_MAX_TAPS = 8
_RECORDS = ("node_inputs", "node_keys", "node_values", "node_decay")


def supports(config: StateConfig) -> bool:
    """Whether the kernels run these layers."""
    return config.shape.taps <= _MAX_TAPS


def projected_width(config: StateConfig) -> int:
    """Outputs of the input projection and the gates: inputs of the convolution, z, and the gates of the heads."""
    s = config.shape
    if isinstance(config, DeltaNetConfig):
        return s.channels + s.heads * s.value_dim + 2 * s.heads
    return s.channels + s.heads * s.value_dim + s.heads if isinstance(config, Mamba2Config) else 3 * s.channels


def pack_mixer(config: StateConfig, weights: StateWeights, index: int, eps: float, memory: PartMemory) -> int:
    """The address of what takes the place of a layer's attention; `index`: the layer's among those with a state."""
    decay = weights.log_decay
    struct = structures.make(
        structures.StateLayer,
        kind=_KINDS.index(type(config)),
        index=index,
        convolution=memory.vector(weights.convolution[:, 0].T),
        convolution_bias=memory.vector(weights.convolution_bias),
        rate=memory.vector(None if decay is None else decay.float().exp()),
        time_bias=memory.vector(weights.time_bias),
        skip=memory.vector(weights.skip),
        norm=memory.vector(weights.norm),
        eps=eps,
    )
    return memory.keep(struct)


@dataclass(frozen=True)
class NativePass:
    """A store and the plan of a pass as an argument of the kernels, and the tensors that this points into."""

    struct: structures.States
    tensors: tuple[Tensor, ...]


class NativeStateStore(StateStore):
    """A store whose states the kernels read and change."""

    def native_pass(self, layout: Layout, width: int) -> NativePass:
        """The argument of the kernels for a pass that `begin` announced; `width`: of a layer's projected input."""
        rows, s = self._rows, self.shape
        plan = PassPlan(layout, s.taps, lambda row: rows[row].length + rows[row].prefix, lambda row: rows[row].prefix)
        walks, nodes, drafted = plan.depth_first(), self.node_inputs.shape[2], [-1] * layout.token_count
        for node in plan.drafted:
            if node.token >= 0:
                drafted[node.token] = plan.rows[node.place] * nodes + node.node
        walk = [node for part in walks for node in part]
        arrays = {
            "row": plan.rows,
            "start": [
                rows[row].side if chain else 1 - rows[row].side
                for row, chain in zip(plan.rows, plan.chains, strict=True)
            ],
            "chain_begin": [0, *accumulate(map(len, plan.chains))],
            "chain": [token for chain in plan.chains for token in chain],
            "walk_begin": [0, *accumulate(map(len, walks))],
            "walk_token": [node.token for node in walk],
            "walk_node": [plan.rows[node.place] * nodes + node.node for node in walk],
            "walk_depth": [node.level for node in walk],
            "windows": [i for window in plan.windows for i in window],
            "tails": [i for tail in plan.tails for i in tail],
            "recorded": [row * nodes + node for row, node in plan.recorded],
            "node": drafted,
        }
        struct = self._struct(width)
        struct.rows, struct.recorded_count = len(plan.rows), len(plan.recorded)
        struct.depth = max((node.level + 1 for node in walk), default=0)
        tensors = {name: torch.tensor(values, dtype=torch.int32) for name, values in arrays.items()}
        for name, tensor in tensors.items():
            setattr(struct, name, tensor.data_ptr())
        return NativePass(struct, tuple(tensors.values()))

    def _struct(self, width: int) -> structures.States:
        s = self.shape
        struct = structures.States(
            channels=s.channels,
            taps=s.taps,
            heads=s.heads,
            groups=s.groups,
            key_dim=s.key_dim,
            value_dim=s.value_dim,
            width=width,
            cache_rows=self.rows,
            nodes=self.node_inputs.shape[2],
        )
        for name in ("inputs", "state", *_RECORDS):
            setattr(struct, name, getattr(self, name).data_ptr())
        return struct

    def _advance(self, row: int, side: int, nodes: Sequence[int]) -> None:
        build.library().foretell_keep_states(
            self._struct(0),
            self.state.shape[0],
            row,
            side,
            (ctypes.c_int32 * len(nodes))(*nodes),
            len(nodes),
            torch.get_num_threads(),
        )
