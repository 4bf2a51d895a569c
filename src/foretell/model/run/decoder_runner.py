"""A network with the whole cache of its rows: copies rows, runs passes in parts, takes drafts, grows trees."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int

from foretell.core.context import ModelOutput
from foretell.core.tree import NodeMask, TokenTree, TreeBounds, TreeSizes
from foretell.model.block.decoder import BlockRange
from foretell.model.cache.layout import index_marked
from foretell.model.kernels import DynamicTrees, NodeLimits
from foretell.model.kernels.dynamic_tree import NO_LIMITS, Noise
from foretell.model.kernels.structures import Sampling
from foretell.model.run.network import DynamicTreeNetwork, Network, TreeNetwork
from foretell.model.run.network_runner import NetworkRunner
from foretell.model.run.partial_pass import PartialPass
from foretell.model.run.runner import (
    DraftsInCache,
    ForksRows,
    GrowsTrees,
    Layers,
    Marks,
    Rows,
    RunsLayers,
    SamplesTokens,
)


class DecoderRunner(NetworkRunner, ForksRows, RunsLayers, SamplesTokens, DraftsInCache, GrowsTrees):
    """A `Network` with the whole cache of its rows."""

    def __init__(self, network: Network, beside: NetworkRunner | None = None) -> None:
        """`beside`: a runner whose cache it shares; None: it has its own."""
        super().__init__(network)
        if beside is not None:
            self.cache, self._length, self._images = beside.cache, beside._length, beside._images
        self._tree_network = network if isinstance(network, TreeNetwork) and network.forwards_trees else None
        self._begun: list[PartialPass] = []
        """Passes that have run their first layers since the last `forward`."""
        self._sampling: Sequence[Sampling] = ()
        """How the next `forward` samples; empty: not at all."""

    def record_attention(self) -> None:
        """Sum up from now on what every cached key receives of the softmax: passes get slower."""
        super().record_attention()
        self._tree_network = None  # whose passes give no queries

    def forward(
        self, rows: Rows, tree: TokenTree, *, active: Marks = None, scored: Marks = None, hidden_layers: Layers = ()
    ) -> ModelOutput:
        """Run nodes of a tree; see `Runner.forward`."""
        sampling, self._sampling = self._sampling, ()
        active = tree.active if active is None else active
        if tree.is_decode:
            self._reserve(rows, tree.nodes)
        else:
            self._reserve_active(rows, active)
        length = [self._length[row] for row in rows]
        self.cache.begin(rows, length, tree.prefix_length.tolist(), tree.nodes)
        begun, self._begun = self._begun, []
        if begun and tree.probe_embeddings is None:
            continued = self._resume(rows, tree, begun, active if scored is None else scored & active)
            if continued.depth.any() and min(hidden_layers, default=self.network.config.layers) >= continued.layers:
                return self._finish(continued, active, scored, hidden_layers)
        if self._tree_network is not None and tree.probe_embeddings is None and not self.reads_images(rows):
            marked = active if scored is None else scored
            hidden = tuple(hidden_layers)
            return self._tree_network.forward_tree(tree, rows, length, self.cache, active, marked, hidden, sampling)
        return self._forward_layers(rows, tree, length, active, scored, hidden_layers)

    def sample_next(self, sampling: Sequence[Sampling]) -> None:
        """Let the next `forward` sample; see `SamplesTokens.sample_next`."""
        self._sampling = sampling

    def begin_pass(self, rows: Sequence[int], tree: TokenTree) -> PartialPass:
        """A pass that runs its first layers now; see `RunsLayers.begin_pass`."""
        self._reserve(rows, tree.nodes)
        self._begun = [p for p in self._begun if not set(p.rows) & set(rows)]
        self._begun.append(self._new_pass(rows, tree))
        return self._begun[-1]

    def _new_pass(self, rows: Sequence[int], tree: TokenTree) -> PartialPass:
        length = [self._length[row] for row in rows]
        return PartialPass(self.network, self.cache, rows, tree, length, self._reserve, self.embed)

    @torch.inference_mode()
    def forward_draft(
        self, network: Network, rows: Sequence[int], tree: TokenTree, active: NodeMask, scored: NodeMask
    ) -> ModelOutput:
        """Run nodes with another network over this cache; see `DraftsInCache.forward_draft`."""
        self._reserve(rows, tree.nodes)
        length = [self._length[row] for row in rows]
        if isinstance(network, TreeNetwork) and network.forwards_trees and not self.reads_images(rows):
            return network.forward_tree(tree, rows, length, self.cache, active, scored, ())
        layout, index = self._layout(tree, rows, length, active)
        x = self.embed(tree.token[active], layout, network)
        states = network.run(x, layout, self.cache, BlockRange(0, network.config.layers)).hidden_states[-1]
        wanted = torch.from_numpy(index[scored & active]).to(states.device)
        logits = network.logits(network.final_norm(states[wanted]))
        return ModelOutput(logits, index_marked(scored & active), (), index)

    def _resume(
        self, rows: Sequence[int], tree: TokenTree, begun: Sequence[PartialPass], scored: NodeMask
    ) -> PartialPass:
        """The pass over a tree, as far as others have run it."""
        if len(begun) == 1 and begun[0].tree is tree and begun[0].rows == tuple(rows) and not begun[0].filled.any():
            return begun[0]
        resumed = self._new_pass(rows, tree)
        for part in begun:
            resumed.adopt(part, scored)
        return resumed

    def _finish(
        self, begun: PartialPass, active: NodeMask, scored: NodeMask | None, hidden_layers: Sequence[int]
    ) -> ModelOutput:
        """Run the layers that are left."""
        advanced = begun.advance(active & ~begun.filled, begun.layers)
        scored = active if scored is None else scored
        states = {begun.layers: advanced.states}
        if begun.layers + 1 in hidden_layers:
            states[begun.layers + 1] = self.network.final_norm(advanced.states)
        return self._output(states, advanced.index, active & ~begun.filled, scored, hidden_layers, begun.expert_counts)

    @torch.inference_mode()
    def grow_dynamic_tree(
        self,
        rows: Sequence[int],
        prefixes: TokenTree,
        max_depth: Int[np.ndarray, " b"],
        sizes: TreeSizes,
        bounds: TreeBounds,
        noise: Noise | None = None,
        limits: NodeLimits = NO_LIMITS,
    ) -> DynamicTrees | None:
        """Run prefixes and grow trees below them; see `GrowsTrees.grow_dynamic_tree`."""
        if not (isinstance(self.network, DynamicTreeNetwork) and self.network.grows_dynamic_trees):
            return None
        self._reserve(rows, prefixes.nodes + sizes[0] * sizes[1])
        output = self.forward(
            rows, prefixes, scored=np.zeros_like(prefixes.valid), hidden_layers=(self.network.config.layers,)
        )
        roots = output.hidden_index[np.arange(len(rows)), prefixes.prefix_length - 1]
        length = np.array([self._length[row] for row in rows]) + prefixes.prefix_length
        trees = DynamicTrees(max_depth, sizes, bounds, np.array(rows), length, noise, limits)
        self.network.grow_dynamic_trees(output.hidden_states[0][torch.from_numpy(roots)], trees, self.cache)
        return trees

    def commit(self, row: int, path: Sequence[int]) -> None:
        """Keep these nodes of the last tree as the row's next tokens."""
        self._forget_begun(row)
        super().commit(row, path)

    def truncate(self, row: int, length: int) -> None:
        """Forget a row's tokens from `length` on; see `Runner.truncate`."""
        self._forget_begun(row)
        super().truncate(row, length)

    def _forget_begun(self, row: int) -> None:
        if self._begun:
            self._begun = [p for p in self._begun if row not in p.rows]

    @property
    def shares_prefixes(self) -> bool:
        """Whether all layers keep keys and values, not states."""
        return self.cache.any_length

    @torch.inference_mode()
    def copy_row(self, source: int, target: int, length: int) -> bool:
        """Copy the first tokens of a row; see `ForksRows.copy_row`."""
        self.truncate(target, 0)
        if not 0 < length == self.restorable(source, length):
            return False
        self._length += [0] * (target + 1 - len(self._length))
        self.cache.copy_row(source, target, length)
        if self.attention_sums is not None:
            self.attention_sums.copy_row(source, target, length)
        self._length[target] = length
        return True
