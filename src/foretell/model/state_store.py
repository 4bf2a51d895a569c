"""Recurrent states of layers that keep a state of fixed size instead of keys and values, exact under token trees.

A pass does not change the states of the committed tokens. It leaves the states after the tree's prefix, whose nodes
are always kept, beside them, and records of the drafted nodes, by which `keep` advances the states along the kept path:
with the same operations, in the same order, as if the path had been read token by token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int

from foretell.model.cache import Cache
from foretell.model.layout import Layout
from foretell.model.state_config import StateShape


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

    def reserve(self, rows: int, slots: int) -> None:
        """Grow to at least `rows` rows, whatever the number of slots."""
        if rows > self.rows:
            self.inputs, self.state = (_grown(part, rows) for part in (self.inputs, self.state))
            self._grow_records(rows, self.node_inputs.shape[2])
            self._rows += [_Row() for _ in range(rows - self.rows)]

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
        found = self._rows[row]
        if not path:
            return
        if list(path[: found.prefix]) != list(range(found.prefix)) or found.prefix == 0:
            raise ValueError(
                f"recurrent states were asked to keep nodes {list(path)} of a tree whose prefix is {found.prefix} nodes"
            )
        drafted = [node - found.prefix for node in path[found.prefix :]]
        found.side, found.length, found.prefix = 1 - found.side, length + len(path), 0
        if drafted and self.shape.taps > 1:
            inputs = self.inputs[:, row, found.side]
            inputs.copy_(torch.cat((inputs, self.node_inputs[:, row, drafted]), 1)[:, -inputs.shape[1] :])
        state = self.state[:, row, found.side]
        for node in drafted if self.shape.heads else ():
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


@dataclass(frozen=True)
class _Drafted:
    """A drafted node that a pass runs, or that ran in an earlier pass over the same tree (token -1)."""

    token: int
    place: int
    """Index of the row among those of the pass."""
    node: int
    """Index of the node among the drafted ones."""
    parent: int
    """Index in the list of drafted nodes; -1: the root."""
    level: int
    window: tuple[int, ...]


@dataclass
class _RowTokens:
    """Tokens of a row in a pass."""

    row: int
    chain: list[int] = field(default_factory=list)
    """Its prefix."""
    drafted: dict[int, int] = field(default_factory=dict)
    """Index in the list of drafted nodes, by slot."""


class PassStates:
    """The order in which the tokens of a pass read and change states; made once per pass for all layers of a store.

    Windows are indices of inputs of the convolution: first the rows' last inputs before the pass, then those recorded
    by earlier passes over the same trees, then those of the pass's tokens.
    """

    def __init__(self, store: StateStore, layout: Layout, rows: Sequence[_Row]) -> None:
        self.store, device = store, store.state.device
        self._taps = store.shape.taps
        self._count = layout.token_count
        columns = (c.tolist() for c in (layout.row, layout.slot, layout.visible_prefix, layout.extra_slots))
        tokens = list(zip(*columns, strict=True))
        places: dict[int, int] = {}
        found = list[_RowTokens]()
        for token, (row, slot, _, _) in enumerate(tokens):
            place = places.setdefault(row, len(places))
            if place == len(found):
                found.append(_RowTokens(row))
            if slot < rows[row].length + rows[row].prefix:
                found[place].chain.append(token)
        if any(len(part.chain) not in (0, rows[part.row].prefix) for part in found):
            raise ValueError("recurrent states need a pass over the whole prefix of a tree, or over drafted nodes only")
        # Rows with the longest prefix first, so that every step of the chains is a range of them.
        found.sort(key=lambda part: -len(part.chain))
        places = {part.row: place for place, part in enumerate(found)}
        drafted = list[_Drafted]()
        recorded = list[tuple[int, int]]()
        windows: list[list[int]] = [[] for _ in tokens]
        ring = self._taps - 1
        tails = list[list[int]]()
        # Tokens have negative indices until the number of recorded inputs is known.
        for place, part in enumerate(found):
            path = [*range(place * ring, (place + 1) * ring), *(token - len(tokens) for token in part.chain)]
            for i, token in enumerate(part.chain):
                windows[token] = path[i : i + self._taps]
            tails.append(path[len(path) - ring :])
        for token, (row, slot, visible, extra) in enumerate(tokens):
            first = rows[row].length + rows[row].prefix
            if slot < first:
                continue
            part, parent = found[places[row]], -1
            for ancestor in (*range(first, visible), *(s for s in extra if s >= 0)):
                if ancestor not in part.drafted:
                    own = ancestor == slot
                    if own:
                        index = token - len(tokens)
                    else:
                        index = len(found) * ring + len(recorded)
                        recorded.append((row, ancestor - first))
                    above = drafted[parent].window[1:] if parent >= 0 else tuple(tails[places[row]])
                    level = drafted[parent].level + 1 if parent >= 0 else 0
                    part.drafted[ancestor] = len(drafted)
                    node = _Drafted(
                        token if own else -1,
                        places[row],
                        ancestor - first,
                        parent,
                        level,
                        (*above, index)[-self._taps :],
                    )
                    drafted.append(node)
                    if own:
                        windows[token] = list(node.window)
                parent = part.drafted[ancestor]
        shift = len(found) * ring + len(recorded) + len(tokens)

        def indices(values: Sequence[int]) -> Int[torch.Tensor, " n"]:
            return torch.tensor(list(values), dtype=torch.long, device=device)

        def absolute(values: Sequence[Sequence[int]]) -> Int[torch.Tensor, "n w"]:
            flat = [[v if v >= 0 else v + shift for v in value] for value in values]
            return torch.tensor(flat, dtype=torch.long, device=device).view(len(flat), -1)

        sides = [rows[part.row].side for part in found]
        self._rows = indices([part.row for part in found])
        self._start = indices([s if part.chain else 1 - s for s, part in zip(sides, found, strict=True)])
        self._recorded = indices([r for r, _ in recorded]), indices([n for _, n in recorded])
        self._windows = absolute(windows)
        chained = [part for part in found if part.chain]
        self._ahead = self._rows[: len(chained)], indices([1 - s for s in sides[: len(chained)]])
        self._tails = absolute(tails[: len(chained)]) if chained else None
        longest = len(found[0].chain) if found else 0
        self._chain = [indices([p.chain[i] for p in chained if i < len(p.chain)]) for i in range(longest)]
        order = sorted(range(len(drafted)), key=lambda i: drafted[i].level)
        position = dict[int, int]()
        self._levels = list[_Level]()
        for level in range(drafted[order[-1]].level + 1 if order else 0):
            part_of = [i for i in order if drafted[i].level == level]
            # Recorded nodes last.
            part_of.sort(key=lambda i: drafted[i].token < 0)
            position |= {i: n for n, i in enumerate(part_of)}
            nodes = [drafted[i] for i in part_of]
            run = [n for n in nodes if n.token >= 0]
            replayed = [n for n in nodes if n.token < 0]
            self._levels.append(
                _Level(
                    indices([position[n.parent] if level else n.place for n in nodes]),
                    indices([n.token for n in run]),
                    (indices([found[n.place].row for n in replayed]), indices([n.node for n in replayed])),
                )
            )
        run = [n for n in drafted if n.token >= 0]
        self._drafted = indices([n.token for n in run])
        self._nodes = indices([found[n.place].row for n in run]), indices([n.node for n in run])

    def convolve(
        self, index: int, x: Float[torch.Tensor, "t c"], weight: Float[torch.Tensor, "c w"]
    ) -> Float[torch.Tensor, "t c"]:
        """Causal depthwise convolution of layer `index` of the store over every token and its ancestors."""
        store = self.store
        before = store.inputs[index, self._rows, self._start].flatten(0, 1)
        source = torch.cat((before, store.node_inputs[index, self._recorded[0], self._recorded[1]], x))
        out = source[self._windows[:, 0]] * weight[:, 0]
        for tap in range(1, self._taps):
            out = out + source[self._windows[:, tap]] * weight[:, tap]
        if self._tails is not None and self._taps > 1:
            store.inputs[index, self._ahead[0], self._ahead[1]] = source[self._tails]
        store.node_inputs[index, self._nodes[0], self._nodes[1]] = x[self._drafted]
        return out

    def recur(
        self,
        index: int,
        key: Float[torch.Tensor, "t g k"],
        value: Float[torch.Tensor, "t h v"],
        decay: Float[torch.Tensor, "t h"],
        query: Float[torch.Tensor, "t g k"],
        beta: Float[torch.Tensor, "t h"] | None = None,
    ) -> Float[torch.Tensor, "t h v"]:
        """Every token's update of its parent's S in layer `index` of the store, and `query^T S` after it.

        `S' = decay * S + key * u^T`, where `u` is the value, or with `beta` (the delta rule, Yang et al., arXiv
        2412.06464) `beta * (value - key^T (decay * S))`.
        """
        store, heads = self.store, self.store.shape.heads
        out = torch.empty_like(value)
        update = torch.empty_like(value)

        def step(state: torch.Tensor, token: Int[torch.Tensor, " n"]) -> torch.Tensor:
            k, d, u = _spread(key[token], heads), decay[token], value[token]
            if beta is not None:
                u = beta[token][..., None] * (u - _read(state * d[..., None, None], k))
            state = _advance(state, k, u, d)
            update[token], out[token] = u, _read(state, _spread(query[token], heads))
            return state

        state = store.state[index, self._rows, self._start]
        for token in self._chain:
            state = torch.cat((step(state[: len(token)], token), state[len(token) :]))
        ahead = self._ahead
        store.state[index, ahead[0], ahead[1]] = state[: len(ahead[0])]
        for level in self._levels:
            count = len(level.token)
            above = state[level.parent]
            replayed = (part[index, level.recorded[0], level.recorded[1]] for part in self._updates)
            k, u, d = replayed
            state = torch.cat((step(above[:count], level.token), _advance(above[count:], _spread(k, heads), u, d)))
        row, node = self._nodes
        store.node_keys[index, row, node] = key[self._drafted]
        store.node_values[index, row, node] = update[self._drafted]
        store.node_decay[index, row, node] = decay[self._drafted]
        return out

    @property
    def _updates(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.store.node_keys, self.store.node_values, self.store.node_decay


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
        """See `PassStates.convolve`."""
        return self.states.convolve(self.index, x, weight)

    def recur(
        self,
        key: Float[torch.Tensor, "t g k"],
        value: Float[torch.Tensor, "t h v"],
        decay: Float[torch.Tensor, "t h"],
        query: Float[torch.Tensor, "t g k"],
        beta: Float[torch.Tensor, "t h"] | None = None,
    ) -> Float[torch.Tensor, "t h v"]:
        """See `PassStates.recur`."""
        return self.states.recur(self.index, key, value, decay, query, beta)
