"""A network with its cache: forward passes over token trees, for targets and draft models."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from foretell.core.context import ModelOutput, count_experts
from foretell.core.tree import TokenTree
from foretell.model.block.backend import Backend
from foretell.model.block.decoder import BlockRange
from foretell.model.cache.attention_sums import AttentionSums
from foretell.model.cache.layout import Layout, index_marked
from foretell.model.kernels import DynamicTrees, NodeLimits
from foretell.model.kernels.dynamic_tree import NO_LIMITS, Noise
from foretell.model.run.network import DynamicTreeNetwork, Network, TreeNetwork
from foretell.model.run.partial_pass import PartialPass
from foretell.utils.inference import in_inference_mode


class Runner(ABC):
    """Runs forward passes over token trees; keeps the accepted tokens of every batch row."""

    vocab: int
    context: int
    """Longest sequence, in tokens."""

    @property
    def backend(self) -> Backend:
        """What computes the passes; by default unknown, without batch invariance."""
        return Backend("custom", precision="")

    @property
    def innermost(self) -> "Runner":
        """The runner that does the work, where this one passes every call on to another."""
        return self

    @abstractmethod
    def length(self, row: int) -> int:
        """Number of committed tokens of a row."""

    @abstractmethod
    def forward(
        self,
        rows: Sequence[int],
        tree: TokenTree,
        *,
        active: Bool[np.ndarray, "b n"] | None = None,
        scored: Bool[np.ndarray, "b n"] | None = None,
        hidden_layers: Sequence[int] = (),
    ) -> ModelOutput:
        """Run the `active` nodes of a tree (default: `tree.active`) after the committed tokens of their rows.

        Inactive ancestors must have run in earlier calls with the same tree, since the last commit. Logits are computed
        for the nodes that `scored` marks (default: all active ones). `hidden_layers` names blocks whose *input* is
        returned as hidden states; `layers` is the last block's output, `layers + 1` the same after the final norm.
        """

    def grow_dynamic_tree(
        self,
        rows: Sequence[int],
        prefixes: TokenTree,
        max_depth: Int[np.ndarray, " b"],
        sizes: tuple[int, int, int],
        bounds: tuple[float, float],
        noise: Noise | None = None,
        limits: NodeLimits = NO_LIMITS,
    ) -> DynamicTrees | None:
        """Run the prefixes, and grow a dynamic tree below each in one call, as `shape.DynamicTree` would; None: not
        supported, nothing ran.

        `max_depth`, 1 or more, `sizes` and `bounds` as in `Predictor.grow_dynamic_tree`; `noise` and `limits` as in
        `DynamicTrees`. If a tree is a chain, all its nodes but the last have run, in the slots after the prefix.
        """
        return None

    def begin_pass(self, rows: Sequence[int], tree: TokenTree) -> PartialPass:
        """A pass over a tree that runs its first layers now; the next `forward` goes on from there where its tree has
        the same nodes.

        Raises:
            ValueError: this runner, or this model, cannot run some of its layers.
        """
        raise ValueError(f"early exit needs a model of the own decoder; {type(self).__name__} runs all layers at once")

    def forward_draft(
        self,
        network: Network,
        rows: Sequence[int],
        tree: TokenTree,
        active: Bool[np.ndarray, "b n"],
        scored: Bool[np.ndarray, "b n"],
    ) -> ModelOutput:
        """Run the active nodes of a tree with another network that has keys and values of the same sizes, over the
        cache of this one. Their keys and values are drafts: the next `forward` of a tree with these nodes replaces
        them. Inactive ancestors must have run so before.

        Raises:
            ValueError: this runner has no cache that another network can use.
        """
        raise ValueError(
            f"a draft in the target's cache needs a model of the own decoder; {type(self).__name__} has another cache"
        )

    @abstractmethod
    def commit(self, row: int, path: Sequence[int]) -> None:
        """Keep these nodes of the last tree, in order, as the row's next tokens; forget its other nodes."""

    @abstractmethod
    def truncate(self, row: int, length: int) -> None:
        """Forget a row's tokens from `length` on; recurrent states go back to `restorable(row, length)` tokens."""

    def restorable(self, row: int, length: int) -> int:
        """The number of tokens that `truncate(row, length)` leaves: at most `length` and those committed."""
        return min(length, self.length(row))

    def limit_cache(self, nbytes: int) -> None:
        """Let the key-value cache use at most so many bytes; then `forward` raises `OutOfBlocksError` where it is full.

        Raises:
            ValueError: this runner cannot.
        """
        raise ValueError(f"the cache of {type(self).__name__} cannot be limited")

    @property
    def cache_bytes(self) -> int:
        """Memory of the key-value cache; 0: unknown."""
        return 0

    @property
    def free_tokens(self) -> int | None:
        """Tokens that the cache has room for without forgetting others; None: any number."""
        return None

    @property
    def shares_prefixes(self) -> bool:
        """Whether `copy_row` copies any number of a row's tokens."""
        return False

    def copy_row(self, source: int, target: int, length: int) -> bool:
        """Replace the tokens of row `target` by the first `length` of row `source`, bit for bit.

        Returns False where this cannot be done; then `target` is empty.
        """
        self.truncate(target, 0)
        return False


class DecoderRunner(Runner):
    """A `Network` with its cache."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.cache = network.new_cache()
        self.vocab, self.context = network.config.vocab, network.config.context
        self._length: list[int] = []
        self._tree_network = network if isinstance(network, TreeNetwork) and network.forwards_trees else None
        self._begun: list[PartialPass] = []
        """Passes that have run their first layers since the last `forward`."""
        self.attention_sums: AttentionSums | None = None
        """What every cached key has received of the softmax, where a cache policy needs it."""

    def record_attention(self) -> None:
        """Sum up from now on what every cached key receives of the softmax: passes get slower."""
        if self.attention_sums is None:
            self.attention_sums = AttentionSums(self.cache, self.network.config)
            self._tree_network = None  # whose passes give no queries

    @property
    def backend(self) -> Backend:
        """The network's."""
        return self.network.backend

    def length(self, row: int) -> int:
        """Number of committed tokens of a row."""
        return self._length[row] if row < len(self._length) else 0

    def forward(
        self,
        rows: Sequence[int],
        tree: TokenTree,
        *,
        active: Bool[np.ndarray, "b n"] | None = None,
        scored: Bool[np.ndarray, "b n"] | None = None,
        hidden_layers: Sequence[int] = (),
    ) -> ModelOutput:
        """Run nodes of a tree; see `Runner.forward`."""
        self._reserve(rows, tree.nodes)
        active = tree.active if active is None else active
        length = [self._length[row] for row in rows]
        self.cache.begin(rows, length, tree.prefix_length.tolist(), tree.nodes)
        begun, self._begun = self._begun, []
        if begun and tree.probe_embeddings is None:
            continued = self._resume(rows, tree, begun, active if scored is None else scored & active)
            if continued.depth.any() and min(hidden_layers, default=self.network.config.layers) >= continued.layers:
                return self._finish(continued, active, scored, hidden_layers)
        if self._tree_network is not None and tree.probe_embeddings is None:
            marked = active if scored is None else scored
            return self._tree_network.forward_tree(tree, rows, length, self.cache, active, marked, tuple(hidden_layers))
        return self._forward_layers(rows, tree, length, active, scored, hidden_layers)

    @torch.inference_mode()
    def _forward_layers(
        self,
        rows: Sequence[int],
        tree: TokenTree,
        length: Sequence[int],
        active: Bool[np.ndarray, "b n"],
        scored: Bool[np.ndarray, "b n"] | None,
        hidden_layers: Sequence[int],
    ) -> ModelOutput:
        """`forward` by the parts of the network."""
        layout, index = self._layout(tree, rows, length, active)
        if self.attention_sums is not None:
            layout = self.attention_sums.record(layout, rows, index)
        x = self._embed(tree.token[active], tree.probe_embeddings)
        states, found = self._hidden_states(x, layout, hidden_layers)
        routes = tuple(layer.cpu().numpy() for layer in found)
        output = self._output(states, index, active, scored, hidden_layers, count_experts(routes))
        return replace(output, routes=routes) if routes else output

    def _layout(
        self, tree: TokenTree, rows: Sequence[int], length: Sequence[int], active: Bool[np.ndarray, "b n"]
    ) -> tuple[Layout, Int[np.ndarray, "b n"]]:
        """The layout of the active nodes after the first `length` slots of their rows, and each node's index in it."""
        return Layout.from_tree(tree, rows, np.array(length), active)

    def begin_pass(self, rows: Sequence[int], tree: TokenTree) -> PartialPass:
        """A pass that runs its first layers now; see `Runner.begin_pass`."""
        self._reserve(rows, tree.nodes)
        self._begun = [p for p in self._begun if not set(p.rows) & set(rows)]
        self._begun.append(
            PartialPass(self.network, self.cache, rows, tree, [self._length[row] for row in rows], self._reserve)
        )
        return self._begun[-1]

    @torch.inference_mode()
    def forward_draft(
        self,
        network: Network,
        rows: Sequence[int],
        tree: TokenTree,
        active: Bool[np.ndarray, "b n"],
        scored: Bool[np.ndarray, "b n"],
    ) -> ModelOutput:
        """Run nodes with another network over this cache; see `Runner.forward_draft`."""
        self._reserve(rows, tree.nodes)
        length = [self._length[row] for row in rows]
        if isinstance(network, TreeNetwork) and network.forwards_trees:
            return network.forward_tree(tree, rows, length, self.cache, active, scored, ())
        layout, index = self._layout(tree, rows, length, active)
        x = network.embed(torch.from_numpy(tree.token[active]))
        states = network.run(x, layout, self.cache, BlockRange(0, network.config.layers)).hidden_states[-1]
        wanted = torch.from_numpy(index[scored & active]).to(states.device)
        logits = network.logits(network.final_norm(states[wanted]))
        return ModelOutput(logits, index_marked(scored & active), (), index)

    def _resume(
        self,
        rows: Sequence[int],
        tree: TokenTree,
        begun: Sequence[PartialPass],
        scored: Bool[np.ndarray, "b n"],
    ) -> PartialPass:
        """The pass over a tree, as far as others have run it."""
        if len(begun) == 1 and begun[0].tree is tree and begun[0].rows == tuple(rows) and not begun[0].filled.any():
            return begun[0]
        found = PartialPass(self.network, self.cache, rows, tree, [self._length[row] for row in rows], self._reserve)
        for part in begun:
            found.adopt(part, scored)
        return found

    def _finish(
        self,
        begun: PartialPass,
        active: Bool[np.ndarray, "b n"],
        scored: Bool[np.ndarray, "b n"] | None,
        hidden_layers: Sequence[int],
    ) -> ModelOutput:
        """Run the layers that are left."""
        found = begun.advance(active & ~begun.filled, begun.layers)
        scored = active if scored is None else scored
        states = {begun.layers: found.states}
        if begun.layers + 1 in hidden_layers:
            states[begun.layers + 1] = self.network.final_norm(found.states)
        return self._output(states, found.index, active & ~begun.filled, scored, hidden_layers, begun.expert_counts)

    def _output(
        self,
        states: dict[int, Float[torch.Tensor, "t d"]],
        index: Int[np.ndarray, "b n"],
        active: Bool[np.ndarray, "b n"],
        scored: Bool[np.ndarray, "b n"] | None,
        hidden_layers: Sequence[int],
        expert_counts: tuple[int, ...],
    ) -> ModelOutput:
        """Logits of the scored nodes from the last block's outputs, by `index`."""
        logit_index, layers = index, self.network.config.layers
        head_input = states.get(layers + 1, states[layers])
        if scored is not None and scored is not active:
            wanted = active & scored
            logit_index = index_marked(wanted)
            head_input = head_input[torch.from_numpy(index[wanted]).to(head_input.device)]
        if layers + 1 not in states:
            head_input = self.network.final_norm(head_input)
        logits = self.network.logits(head_input) if len(head_input) else head_input.new_zeros(0, self.vocab)
        hidden = tuple(states[layer] for layer in hidden_layers)
        return ModelOutput(logits, logit_index, hidden, index, experts=expert_counts)

    @torch.inference_mode()
    def grow_dynamic_tree(
        self,
        rows: Sequence[int],
        prefixes: TokenTree,
        max_depth: Int[np.ndarray, " b"],
        sizes: tuple[int, int, int],
        bounds: tuple[float, float],
        noise: Noise | None = None,
        limits: NodeLimits = NO_LIMITS,
    ) -> DynamicTrees | None:
        """Run prefixes and grow trees below them; see `Runner.grow_dynamic_tree`."""
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

    def _embed(
        self, token: Int[np.ndarray, " t"], probe_embeddings: Float[torch.Tensor, "e d"] | None
    ) -> Float[torch.Tensor, "t d"]:
        """Input of the first block; ids from the vocabulary's size on index `probe_embeddings`.

        Raises:
            ValueError: the layers read more of a token than its embedding.
        """
        if probe_embeddings is None:
            return self.network.embed(torch.from_numpy(token))
        if self.network.config.layer_inputs is not None:
            raise ValueError(
                f"trained prompt tokens need a model that reads an embedding per token alone, and the layers of this "
                f"one ({self.network.config.architecture}) read inputs of their own; use another method"
            )
        probe = token >= self.vocab
        x = self.network.embed(torch.from_numpy(np.where(probe, 0, token)))
        index = torch.from_numpy(token[probe] - self.vocab)
        x[torch.from_numpy(probe).to(x.device)] = probe_embeddings[index.to(probe_embeddings.device)].to(x)
        return x

    def _hidden_states(
        self, x: Float[torch.Tensor, "t d"], layout: Layout, hidden_layers: Sequence[int]
    ) -> tuple[dict[int, Float[torch.Tensor, "t d"]], tuple[Int[torch.Tensor, "t k"], ...]]:
        """The requested hidden states and the last block's output, by layer; and the experts of every token per
        mixture-of-experts layer.
        """
        layers = self.network.config.layers
        blocks = BlockRange(0, layers, tuple(i for i in sorted(set(hidden_layers)) if i < layers))
        output = self.network.run(x, layout, self.cache, blocks)
        states = dict(zip((*blocks.hidden_layers, layers), output.hidden_states, strict=True))
        if layers + 1 in hidden_layers:
            states[layers + 1] = self.network.final_norm(states[layers])
        return states, output.routes

    def _reserve(self, rows: Sequence[int], nodes: int) -> None:
        self._length += [0] * (max(rows) + 1 - len(self._length))
        self.cache.reserve(rows, [self._length[row] + nodes for row in rows])

    @in_inference_mode
    def commit(self, row: int, path: Sequence[int]) -> None:
        """Keep these nodes of the last tree as the row's next tokens."""
        self._forget_begun(row)
        self.cache.keep(row, self._length[row], path)
        if self.attention_sums is not None:
            self.attention_sums.commit(row, path, self._length[row])
        self._length[row] += len(path)

    @torch.inference_mode()
    def truncate(self, row: int, length: int) -> None:
        """Forget a row's tokens from `length` on; see `Runner.truncate`."""
        if row < len(self._length):
            self._forget_begun(row)
            self._length[row] = self.restorable(row, length)
            self.cache.truncate(row, int(self._length[row]))
            if self.attention_sums is not None:
                self.attention_sums.truncate(row, self._length[row])

    def _forget_begun(self, row: int) -> None:
        if self._begun:
            self._begun = [p for p in self._begun if row not in p.rows]

    def restorable(self, row: int, length: int) -> int:
        """The number of tokens that `truncate(row, length)` leaves."""
        return self.cache.restorable(row, min(length, self.length(row)))

    def limit_cache(self, nbytes: int) -> None:
        """Limit the memory of the cache; see `Runner.limit_cache`."""
        self.cache.limit(nbytes)

    @property
    def cache_bytes(self) -> int:
        """Memory of the key-value cache."""
        return self.cache.nbytes

    @property
    def free_tokens(self) -> int | None:
        """Tokens that the cache has room for without forgetting others; None: any number."""
        return self.cache.free_slots

    @property
    def shares_prefixes(self) -> bool:
        """Whether all layers keep keys and values, not states."""
        return self.cache.any_length

    @torch.inference_mode()
    def copy_row(self, source: int, target: int, length: int) -> bool:
        """Copy the first tokens of a row; see `Runner.copy_row`."""
        self.truncate(target, 0)
        if not 0 < length == self.restorable(source, length):
            return False
        self._length += [0] * (target + 1 - len(self._length))
        self.cache.copy_row(source, target, length)
        if self.attention_sums is not None:
            self.attention_sums.copy_row(source, target, length)
        self._length[target] = length
        return True
