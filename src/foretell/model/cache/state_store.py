"""Recurrent states of layers that keep a state of fixed size instead of keys and values, exact under token trees.

A pass does not change the states of the committed tokens. It leaves the states after the tree's prefix, whose nodes
are always kept, beside them, and records of the drafted nodes, by which `keep` advances the states along the kept path:
with the same operations, in the same order, as if the path had been read token by token.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int

from foretell.model.cache.base import Cache, LayeredCache
from foretell.model.cache.layout import Layout
from foretell.model.cache.state_plan import PassPlan
from foretell.model.config.attention import AttentionSizes
from foretell.model.config.model import ModelConfig
from foretell.model.config.states import StateShape


@dataclass
class _Row:
    """What a store knows of a batch row."""

    side: int = 0
    """Which of its two states is that of the committed tokens; the other one is that after the prefix of the tree."""
    length: int = 0
    prefix: int = 0
    """Decided nodes of the tree of the current pass."""


class StateStore(Cache):
    """States of several layers of one kind: the last inputs of a causal convolution, and a matrix S per head.

    Reading a token changes S to `decay * S + key * value^T`, where the value may depend on S (`LayerStates.recur`).
    Numbers are float32 or wider, whatever the dtype of the weights: states in bfloat16 drift.
    """

    any_length = False

    def __init__(self, layers: int, shape: StateShape, dtype: torch.dtype, device: torch.device) -> None:
        s = self.shape = shape
        self.inputs = torch.zeros(layers, 0, 2, s.taps - 1, s.channels, dtype=dtype, device=device)
        self.state = torch.zeros(layers, 0, 2, s.heads, s.key_dim, s.value_dim, dtype=dtype, device=device)
        self.node_inputs = torch.zeros(layers, 0, 0, s.channels, dtype=dtype, device=device)
        self.node_keys = torch.zeros(layers, 0, 0, s.groups, s.key_dim, dtype=dtype, device=device)
        self.node_values = torch.zeros(layers, 0, 0, s.heads, s.value_dim, dtype=dtype, device=device)
        self.node_decay = torch.zeros(layers, 0, 0, s.heads, dtype=dtype, device=device)
        self._rows: list[_Row] = []

    @property
    def rows(self) -> int:
        """Number of batch rows that there is room for."""
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """Bytes of states and records."""
        records = (self.node_inputs, self.node_keys, self.node_values, self.node_decay)
        return sum(part.nbytes for part in (self.inputs, self.state, *records))

    def reserve(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        """Make room for these rows, whatever the number of slots."""
        needed = max(rows) + 1
        if needed > self.rows:
            self.inputs, self.state = (_grown(part, needed) for part in (self.inputs, self.state))
            self._grow_records(needed, self.node_inputs.shape[2])
            self._rows += [_Row() for _ in range(needed - self.rows)]

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the states of row `source`, which stand after `length` tokens, to row `target`."""
        self.reserve([target], [length])
        side = self._rows[source].side
        self._rows[target] = _Row(length=length)
        self.inputs[:, target, 0], self.state[:, target, 0] = self.inputs[:, source, side], self.state[:, source, side]

    def _grow_records(self, rows: int, nodes: int) -> None:
        for name in ("node_inputs", "node_keys", "node_values", "node_decay"):
            setattr(self, name, _grown(getattr(self, name), rows, nodes))

    def begin(self, rows: Sequence[int], lengths: Sequence[int], prefixes: Sequence[int], nodes: int) -> None:
        """Announce a pass over a tree of `nodes` nodes."""
        drafted = nodes - min(prefixes)
        if drafted > self.node_inputs.shape[2]:
            self._grow_records(self.rows, drafted)
        for row, length, prefix in zip(rows, lengths, prefixes, strict=True):
            self._rows[row].length, self._rows[row].prefix = length, prefix

    def keep(self, row: int, length: int, path: Sequence[int]) -> None:
        """Advance the states of a row along a path of its last tree.

        Raises:
            ValueError: the path does not begin with the tree's prefix.
        """
        row_state = self._rows[row]
        if not path:
            return
        if list(path[: row_state.prefix]) != list(range(row_state.prefix)) or row_state.prefix == 0:
            raise ValueError(
                f"recurrent states were asked to keep nodes {list(path)} of a tree whose prefix is "
                f"{row_state.prefix} nodes"
            )
        drafted = [node - row_state.prefix for node in path[row_state.prefix :]]
        row_state.side, row_state.length, row_state.prefix = 1 - row_state.side, length + len(path), 0
        if drafted and self.shape.taps > 1:
            inputs = self.inputs[:, row, row_state.side]
            inputs.copy_(torch.cat((inputs, self.node_inputs[:, row, drafted]), 1)[:, -inputs.shape[1] :])
        if drafted and self.shape.heads:
            self._advance(row, row_state.side, drafted)

    def _advance(self, row: int, side: int, nodes: Sequence[int]) -> None:
        """Advance the matrices of a row in all layers along recorded nodes."""
        state = self.state[:, row, side]
        for node in nodes:
            keys, values = self.node_keys[:, row, node], self.node_values[:, row, node]
            state.copy_(_advance(state, _spread(keys, self.shape.heads), values, self.node_decay[:, row, node]))

    def restorable(self, row: int, length: int) -> int:
        """All tokens, or none: states cannot go back."""
        return length if row < self.rows and length == self._rows[row].length else 0

    def truncate(self, row: int, length: int) -> None:
        """Keep all tokens of a row, or forget all."""
        if length == 0 and row < self.rows:
            self._rows[row] = _Row()
            self.inputs[:, row], self.state[:, row] = 0, 0

    def pass_states(self, layout: Layout) -> "PassStates":
        """Access to the states for the tokens of a pass that `begin` announced."""
        return PassStates(self, layout, self._rows)


def build_cache(
    config: ModelConfig,
    attention_store: Callable[[int, AttentionSizes], Cache],
    state_store: Callable[[int, StateShape], StateStore],
) -> Cache:
    """An empty cache for a network, from the stores of so many layers of its kinds: one per size of attention heads, in
    the order of their first layers, then one of recurrent states.
    """
    sizes, places = plan_stores(config)
    counts = [1 + max((index for store, index in places.values() if store == i), default=-1) for i in range(len(sizes))]
    stores = [attention_store(count, each) for count, each in zip(counts, sizes, strict=True)]
    recurrent = config.state_layers
    if config.state is None and len(stores) == 1 and not config.kv_layers:
        return stores[0]
    if config.state is not None:
        places |= {i: (len(stores), n) for n, i in enumerate(recurrent)}
        stores.append(state_store(len(recurrent), config.state.shape))
    return LayeredCache(stores, [places.get(i, (0, 0)) for i in range(config.layers)])


def plan_stores(config: ModelConfig) -> tuple[list[AttentionSizes], dict[int, tuple[int, int]]]:
    """The sizes of the heads in each store of keys and values, and for every layer with attention its store and its
    index there; layers that read the keys of another one have the place of that one, or index 0 where that is of
    another model.
    """
    attention = config.attention_layers
    sizes = list(dict.fromkeys(map(config.cache_sizes_of, attention))) or [config.cache_sizes_of(-1)]
    counts, places = [0] * len(sizes), dict[int, tuple[int, int]]()
    for i in attention:
        source = config.kv_layer_of(i)
        if source == i:
            store = sizes.index(config.cache_sizes_of(i))
            places[i] = store, counts[store]
            counts[store] += 1
        else:
            places[i] = places[source] if source in places else (sizes.index(config.cache_sizes_of(i)), 0)
    return sizes, places


def _grown(part: torch.Tensor, rows: int, nodes: int | None = None) -> torch.Tensor:
    """The tensor `[layers, rows, ...]` in a larger one; `nodes`: the size of its third axis (None: as it is)."""
    shape = [part.shape[0], rows, part.shape[2] if nodes is None else nodes, *part.shape[3:]]
    out = part.new_zeros(shape)
    out[:, : part.shape[1], : part.shape[2]] = part
    return out


def _spread(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Vectors `[n, groups, e]` for every head: a group serves consecutive heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _advance(
    state: Float[torch.Tensor, "n h k v"],
    key: Float[torch.Tensor, "n h k"],
    value: Float[torch.Tensor, "n h v"],
    decay: Float[torch.Tensor, "n h"],
) -> Float[torch.Tensor, "n h k v"]:
    return state * decay[..., None, None] + key[..., None] * value[..., None, :]


def _read(state: Float[torch.Tensor, "n h k v"], key: Float[torch.Tensor, "n h k"]) -> Float[torch.Tensor, "n h v"]:
    """`key^T S`; a product and a sum, so that the order of additions does not depend on the number of states."""
    return (state * key[..., None]).sum(-2)


class PassStates:
    """Access to the states of a store for the tokens of a pass; made once per pass for all layers."""

    def __init__(self, store: StateStore, layout: Layout, rows: Sequence[_Row]) -> None:
        self.store, device = store, store.state.device
        self._taps = store.shape.taps
        plan = PassPlan(
            layout, self._taps, lambda row: rows[row].length + rows[row].prefix, lambda row: rows[row].prefix
        )

        def indices(values: Iterable[int]) -> Int[torch.Tensor, " n"]:
            return torch.tensor(list(values), dtype=torch.long, device=device)

        def pairs(values: Sequence[tuple[int, int]]) -> tuple[Int[torch.Tensor, " n"], Int[torch.Tensor, " n"]]:
            return indices(a for a, _ in values), indices(b for _, b in values)

        chained = [i for i, chain in enumerate(plan.chains) if chain]
        ahead = [1 - rows[row].side for row in plan.rows]
        self._rows = indices(plan.rows)
        self._start = indices(
            rows[row].side if chain else 1 - rows[row].side for row, chain in zip(plan.rows, plan.chains, strict=True)
        )
        self._recorded = pairs(plan.recorded)
        self._windows = torch.tensor(plan.windows, dtype=torch.long, device=device)
        self._ahead = pairs([(plan.rows[i], ahead[i]) for i in chained])
        self._tails = torch.tensor([plan.tails[i] for i in chained], dtype=torch.long, device=device)
        longest = max(map(len, plan.chains), default=0)
        self._chain = [indices(chain[i] for chain in plan.chains if i < len(chain)) for i in range(longest)]
        position = {i: n for level in plan.levels() for n, i in enumerate(level)}
        self._levels = list[_Level]()
        for level in plan.levels():
            nodes = [plan.drafted[i] for i in level]
            above = indices(position[n.parent] if n.parent >= 0 else n.place for n in nodes)
            earlier = pairs([(plan.rows[n.place], n.node) for n in nodes if n.token < 0])
            self._levels.append(_Level(above, indices(n.token for n in nodes if n.token >= 0), earlier))
        run = [n for n in plan.drafted if n.token >= 0]
        self._drafted = indices(n.token for n in run)
        self._nodes = pairs([(plan.rows[n.place], n.node) for n in run])


@dataclass(frozen=True)
class _Level:
    """Drafted nodes of one depth: those that the pass runs, then those of earlier passes over the same trees."""

    parent: Int[torch.Tensor, " n"]
    """Index among the nodes of the level above; at the first level the row among those of the pass."""
    token: Int[torch.Tensor, " m"]
    recorded: tuple[Int[torch.Tensor, " r"], Int[torch.Tensor, " r"]]
    """Rows and nodes of the others."""


@dataclass(frozen=True)
class LayerStates:
    """The states of one layer in a pass."""

    states: PassStates
    index: int

    def convolve(self, x: Float[torch.Tensor, "t c"], weight: Float[torch.Tensor, "c w"]) -> Float[torch.Tensor, "t c"]:
        """Causal depthwise convolution over every token and its ancestors."""
        of, store, index = self.states, self.states.store, self.index
        before = store.inputs[index, of._rows, of._start].flatten(0, 1)
        source = torch.cat((before, store.node_inputs[index, of._recorded[0], of._recorded[1]], x))
        out = source[of._windows[:, 0]] * weight[:, 0]
        for tap in range(1, of._taps):
            out = out + source[of._windows[:, tap]] * weight[:, tap]
        if len(of._tails) and of._taps > 1:
            store.inputs[index, of._ahead[0], of._ahead[1]] = source[of._tails]
        store.node_inputs[index, of._nodes[0], of._nodes[1]] = x[of._drafted]
        return out

    def recur(
        self,
        key: Float[torch.Tensor, "t g k"],
        value: Float[torch.Tensor, "t h v"],
        decay: Float[torch.Tensor, "t h"],
        query: Float[torch.Tensor, "t g k"],
        beta: Float[torch.Tensor, "t h"] | None = None,
    ) -> Float[torch.Tensor, "t h v"]:
        """Every token's update of its parent's S, and `query^T S` after it.

        `S' = decay * S + key * u^T`, where `u` is the value, or with `beta` (the delta rule, Yang et al., arXiv
        2412.06464) `beta * (value - key^T (decay * S))`.
        """
        of, store, index = self.states, self.states.store, self.index
        heads = store.shape.heads
        out = torch.empty_like(value)
        update = torch.empty_like(value)

        def step(state: torch.Tensor, token: Int[torch.Tensor, " n"]) -> torch.Tensor:
            k, d, u = _spread(key[token], heads), decay[token], value[token]
            if beta is not None:
                u = beta[token][..., None] * (u - _read(state * d[..., None, None], k))
            state = _advance(state, k, u, d)
            update[token], out[token] = u, _read(state, _spread(query[token], heads))
            return state

        state = store.state[index, of._rows, of._start]
        for token in of._chain:
            state = torch.cat((step(state[: len(token)], token), state[len(token) :]))
        ahead = of._ahead
        store.state[index, ahead[0], ahead[1]] = state[: len(ahead[0])]
        for level in of._levels:
            count = len(level.token)
            above = state[level.parent]
            updates = store.node_keys, store.node_values, store.node_decay
            k, u, d = (part[index, level.recorded[0], level.recorded[1]] for part in updates)
            state = torch.cat((step(above[:count], level.token), _advance(above[count:], _spread(k, heads), u, d)))
        row, node = of._nodes
        store.node_keys[index, row, node] = key[of._drafted]
        store.node_values[index, row, node] = update[of._drafted]
        store.node_decay[index, row, node] = decay[of._drafted]
        return out
