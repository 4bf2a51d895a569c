"""A pass over token trees by spans of layers: the first layers now, the others later or never.

Early exit needs it: a draft that ran the target's first layers is verified by the others (self-speculation: LayerSkip,
arXiv 2404.16710), and a token that left early gets its keys and values of the later layers by copying its state (CALM,
arXiv 2207.07061), or when a later token needs them (FREE, arXiv 2310.05424; EE-LLM, arXiv 2312.04916).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from foretell.core.tree import NodeMask, TokenTree
from foretell.model.block.decoder import BlockRange
from foretell.model.cache.base import Cache
from foretell.model.cache.layout import Layout
from foretell.model.config.model import ModelConfig
from foretell.model.run.network import Network


def check_spans(config: ModelConfig) -> None:
    """Refuse models whose layers keep more of a token than its own keys and values, or whose head fits the last layer
    only.

    Raises:
        ValueError: the model has recurrent states, latent attention, shared keys and values, per-layer inputs, or a
            sliced residual stream.
    """
    hindrance = _hindrance(config)
    if hindrance:
        raise ValueError(
            f"early exit needs layers with keys and values of their own in one basis, and this model "
            f"({config.architecture}) has {hindrance}; use another method"
        )


def supports_spans(config: ModelConfig) -> bool:
    """Whether `check_spans` holds."""
    return not _hindrance(config)


def _hindrance(config: ModelConfig) -> str:
    return further_state(config) or "a residual stream with another basis in each layer" * config.shortcuts


def further_state(config: ModelConfig) -> str:
    """What the layers keep of a token, or read, beside its own keys and values; empty: nothing."""
    what = {
        "recurrent states": config.state is not None,
        "latent attention": config.latent is not None,
        "layers that share keys and values": bool(config.kv_layers),
        "per-layer inputs": config.layer_inputs is not None,
    }
    return next((name for name, present in what.items() if present), "")


@dataclass(frozen=True)
class NodeStates:
    """Outputs of a layer: `states[index[i, j]]` is that of node `j` of request `i`, if `index` is not -1."""

    states: Float[torch.Tensor, "k d"]
    index: Int[np.ndarray, "b n"]
    before: Float[torch.Tensor, "m d"]
    """Outputs of the layer before, where the pass keeps them; else empty."""


class PartialPass:
    """The nodes of token trees, each with the number of layers that it has passed and the state after them.

    Node `j` of request `i` has cache slot `length[i] + j`, as in a pass of all layers, so that the pass over the same
    tree goes on from here. The tree may grow by further nodes. `reserve` makes room for so many nodes in some rows,
    `embed` gives the input of the first layer for the tokens of a layout.

    Raises:
        ValueError: see `check_spans`.
    """

    def __init__(
        self,
        network: Network,
        cache: Cache,
        rows: Sequence[int],
        tree: TokenTree,
        length: Sequence[int],
        reserve: Callable[[Sequence[int], int], None],
        embed: Callable[[Int[np.ndarray, " t"], Layout], Float[torch.Tensor, "t d"]],
    ) -> None:
        check_spans(network.config)
        self._reserve, self._embed = reserve, embed
        self._network, self.cache, self.layers = network, cache, network.config.layers
        self.rows, self.length, self.tree = tuple(rows), np.array(length), tree
        self.depth: Int[np.ndarray, "b n"] = np.zeros(tree.token.shape, np.int64)
        """Layers that every node has passed."""
        self._skip_from, self._skip_to = self.layers, np.zeros(tree.token.shape, np.int64)
        self.filled: NodeMask = np.zeros(tree.token.shape, bool)
        """Nodes whose keys and values of the layers above are copies; see `fill`."""
        self._states = torch.empty(*tree.token.shape, 0)
        self._previous = self._states[:, :0]
        self.keeps_previous = False
        """Whether the outputs of the last layer but one that a node has passed are kept."""
        self.expert_counts: tuple[int, ...] = ()
        """Distinct experts that each mixture-of-experts layer read."""

    def reserve(self, nodes: int) -> None:
        """Make room for so many nodes after the present ones."""
        self._reserve(self.rows, self.tree.nodes + nodes)

    def extend(self, tree: TokenTree) -> None:
        """Go on with a tree that has further nodes after the present ones."""
        more = tree.nodes - self.tree.nodes
        if more > 0:
            self._reserve(self.rows, tree.nodes)
            arrays = self.depth, self.filled, self._skip_to
            self.depth, self.filled, self._skip_to = (_widen(part, more) for part in arrays)
            self._states = torch.nn.functional.pad(self._states, (0, 0, 0, more))
        self.tree = tree

    @torch.inference_mode()
    def advance(self, wanted: NodeMask, layer: int) -> NodeStates:
        """Run the wanted nodes, and the ancestors that are behind, up to `layer` layers; outputs of the wanted ones.

        Nodes that have passed more layers keep theirs, and their own state is returned.
        """
        behind = with_ancestors(self.tree, wanted) & (self.depth < layer) & ~self.filled
        while behind.any():
            start = int(self.depth[behind].min())
            now = behind & (self.depth == start)
            later = self.depth[behind & ~now]
            stop = int(later.min()) if later.size else layer
            if start < self._skip_from < stop:
                stop = self._skip_from
            self._run(now, BlockRange(start, stop))
            if stop == self._skip_from:
                self.depth[now] = np.maximum(stop, self._skip_to[now])
            behind &= self.depth < layer
        return self.states(wanted)

    def skip_layers(self, first: int, last: Int[np.ndarray, " b"]) -> None:
        """Let the present nodes of every request go from the first `first` layers to layer `last`, counted from 0, and
        leave out what is between.
        """
        self._skip_from, self._skip_to = first, np.repeat(last[:, None], self.tree.nodes, 1)
        if not first:
            everything = np.ones(self.tree.token.shape, bool)
            layout, _ = Layout.from_tree(self.tree, self.rows, self.length, everything)
            self._keep(everything, self._embed(self.tree.token[everything], layout))
            self.depth = self._skip_to.copy()

    def record(self, nodes: NodeMask, layer: int, states: Float[torch.Tensor, "k d"]) -> None:
        """Note that nodes have passed `layer` layers elsewhere, with their keys and values in this cache."""
        self._keep(nodes, states)
        self.depth[nodes] = layer

    def states(self, nodes: NodeMask) -> NodeStates:
        """The states of nodes after the layers that they have passed."""
        index = np.full(nodes.shape, -1)
        index[nodes] = np.arange(np.count_nonzero(nodes))
        place = self._mask(nodes)
        before = self._previous[place] if self.keeps_previous else self._states[:0, 0]
        return NodeStates(self._states[place], index, before)

    @torch.inference_mode()
    def fill(self, nodes: NodeMask) -> None:
        """Give nodes the keys and values of all layers above theirs that their present state has there (CALM). They
        have no output of the last layer then.
        """
        for start in np.unique(self.depth[nodes]).tolist():
            now = nodes & (self.depth == start)
            layout, _ = Layout.from_tree(self.tree, self.rows, self.length, now)
            x = self.states(now).states
            self._network.write_keys(x, layout, self.cache, BlockRange(start, self.layers))
        self.filled |= nodes

    def adopt(self, other: "PartialPass", unfilled: NodeMask) -> None:
        """Take over what another pass has run of the same trees; nodes of `unfilled` that it has filled start anew.

        A node is the same if it has the same request, number, token and ancestors.
        """
        for i, (row, length) in enumerate(zip(self.rows, self.length, strict=True)):
            if row not in other.rows or other.length[mine := other.rows.index(row)] != length:
                continue
            if other.tree.prefix_length[mine] != self.tree.prefix_length[i]:
                continue
            n = min(self.tree.nodes, other.tree.nodes)
            same = np.zeros(self.tree.nodes, bool)
            equal = (self.tree.token[i, :n] == other.tree.token[mine, :n]) & (
                self.tree.parent[i, :n] == other.tree.parent[mine, :n]
            )
            fresh = other.filled[mine, :n] & unfilled[i, :n]
            for node, parent in enumerate(self.tree.parent[i, :n].tolist()):
                same[node] = equal[node] and not fresh[node] and (parent < 0 or same[parent])
            self.depth[i, :n] = np.where(same[:n], other.depth[mine, :n], 0)
            self.filled[i, :n] = same[:n] & other.filled[mine, :n]
            if not self._states.shape[-1]:
                self._states = other._states.new_zeros(*self.tree.token.shape, other._states.shape[-1])
            self._states[i, :n] = other._states[mine, :n]
            if other._skip_from < other.layers:
                self._skip_from = other._skip_from
                self._skip_to[i, :n] = np.where(same[:n], other._skip_to[mine, :n], 0)

    def _run(self, nodes: NodeMask, blocks: BlockRange) -> None:
        layout, _ = Layout.from_tree(self.tree, self.rows, self.length, nodes)
        place = self._mask(nodes)
        x = self._states[place] if blocks.first else self._embed(self.tree.token[nodes], layout)
        if self.keeps_previous:
            blocks = blocks._replace(hidden_layers=(blocks.last - 1,))
        output = self._network.run(x, layout, self.cache, blocks)
        self._keep(nodes, output.hidden_states[-1])
        if self.keeps_previous:
            if self._previous.shape != self._states.shape:
                known, self._previous = self._previous, torch.zeros_like(self._states)
                if known.shape[-1]:
                    self._previous[:, : known.shape[1]] = known
            self._previous[place] = output.hidden_states[0]
        self.depth[nodes] = blocks.last
        self.expert_counts += output.expert_counts

    def _keep(self, nodes: NodeMask, states: Float[torch.Tensor, "k d"]) -> None:
        """Keep the states of nodes; the first ones say of which width and dtype all are."""
        if not self._states.shape[-1]:
            self._states = states.new_zeros(*self.tree.token.shape, states.shape[-1])
        self._states[self._mask(nodes)] = states

    def _mask(self, nodes: NodeMask) -> Bool[torch.Tensor, "b n"]:
        # A copy: trees share read-only masks, which torch does not take.
        return torch.from_numpy(nodes.copy()).to(self._states.device)


def with_ancestors(tree: TokenTree, nodes: NodeMask) -> NodeMask:
    """The marked nodes of a tree and their ancestors."""
    out = nodes.copy()
    for row, node in zip(*np.nonzero(nodes), strict=True):
        parent = int(tree.parent[row, node])
        while parent >= 0 and not out[row, parent]:
            out[row, parent] = True
            parent = int(tree.parent[row, parent])
    return out


def _widen(array: np.ndarray, more: int) -> np.ndarray:
    """The array with `more` columns of zeros; `numpy.pad` takes ten times as long."""
    return np.concatenate([array, np.zeros((len(array), more), array.dtype)], 1)
