"""The order in which the tokens of a pass read and change recurrent states."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from foretell.model.cache.layout import Layout


class DraftedNode(NamedTuple):
    """A drafted node that a pass runs, or one of its ancestors that ran in an earlier pass over the same tree."""

    token: int
    """Index of the token in the pass; -1: it ran earlier."""
    place: int
    """Index of its row among those of the pass."""
    node: int
    """Index among the drafted nodes of its tree."""
    parent: int
    """Index in the plan's list of drafted nodes; -1: the root."""
    level: int
    window: tuple[int, ...]


class _Token(NamedTuple):
    """A token of a layout."""

    row: int
    slot: int
    visible: int
    extra: list[int]


@dataclass
class _Row:
    """The tokens of a row in a pass."""

    row: int
    first: int
    """Slot of its first drafted node."""
    chain: list[int] = field(default_factory=list)
    place: int = 0
    drafted: dict[int, int] = field(default_factory=dict)
    """Index in the plan's list of drafted nodes, by slot."""


class PassPlan:
    """The order in which the tokens of a pass read and change states, with `taps` inputs to each convolution.

    Windows are indices of inputs of the convolution, the token's own last: first the `taps - 1` inputs before the pass
    of every row, then those of recorded nodes, then those of the pass's tokens.
    """

    def __init__(self, layout: Layout, taps: int, first_drafted: Callable[[int], int], prefix: Callable[[int], int]):
        """`first_drafted(row)`: slot of the row's first drafted node; `prefix(row)`: nodes of its tree's prefix."""
        self._taps = taps
        columns = (c.tolist() for c in (layout.row, layout.slot, layout.visible_prefix, layout.extra_slots))
        tokens = [_Token(*values) for values in zip(*columns, strict=True)]
        by_row = self._group(tokens, first_drafted, prefix)
        self.rows = [part.row for part in by_row.values()]
        """Rows of the pass, those with the longest prefix first."""
        self.chains = [part.chain for part in by_row.values()]
        """Tokens of every row's prefix."""
        self.drafted: list[DraftedNode] = []
        self.recorded: list[tuple[int, int]] = []
        """Row and node of the recorded inputs."""
        # Tokens have negative indices until the number of recorded inputs is known.
        windows: list[Sequence[int]] = [()] * len(tokens)
        tails = [self._follow_chain(part, len(tokens), windows) for part in by_row.values()]
        for token, values in enumerate(tokens):
            if values.slot >= by_row[values.row].first:
                self._follow_tree(token, values, by_row[values.row], tails, len(tokens))
        for drafted in self.drafted:
            if drafted.token >= 0:
                windows[drafted.token] = drafted.window
        end = len(self.rows) * (taps - 1) + len(self.recorded) + len(tokens)
        self.windows = [[i if i >= 0 else i + end for i in window] for window in windows]
        self.tails = [[i if i >= 0 else i + end for i in tail] for tail in tails]
        """Last inputs of every row's prefix."""

    @staticmethod
    def _group(
        tokens: Sequence[_Token], first_drafted: Callable[[int], int], prefix: Callable[[int], int]
    ) -> dict[int, _Row]:
        """The tokens by row, the longest prefix first, so that every step of the prefixes is a range of the rows."""
        rows = dict[int, _Row]()
        for token, (row, slot, _, _) in enumerate(tokens):
            part = rows.setdefault(row, _Row(row, first_drafted(row)))
            if slot < part.first:
                part.chain.append(token)
        if any(len(part.chain) not in (0, prefix(row)) for row, part in rows.items()):
            raise ValueError("recurrent states need a pass over the whole prefix of a tree, or over drafted nodes only")
        ordered = sorted(rows.values(), key=lambda part: -len(part.chain))
        for place, part in enumerate(ordered):
            part.place = place
        return {part.row: part for part in ordered}

    def _follow_chain(self, part: _Row, count: int, windows: list[Sequence[int]]) -> list[int]:
        """Fill the windows of a row's prefix; returns its last inputs."""
        before = self._taps - 1
        path = [*range(part.place * before, (part.place + 1) * before), *(token - count for token in part.chain)]
        for i, token in enumerate(part.chain):
            windows[token] = path[i : i + self._taps]
        return path[len(path) - before :]

    def _follow_tree(self, token: int, values: _Token, part: _Row, tails: list[list[int]], count: int) -> None:
        """Add a drafted node, and those of its ancestors that are not known yet."""
        parent = -1
        for slot in (*range(part.first, values.visible), *(s for s in values.extra if s >= 0)):
            if slot not in part.drafted:
                own = slot == values.slot
                index = token - count if own else len(self.rows) * (self._taps - 1) + len(self.recorded)
                if not own:
                    self.recorded.append((part.row, slot - part.first))
                above = self.drafted[parent].window[1:] if parent >= 0 else tuple(tails[part.place])
                level = self.drafted[parent].level + 1 if parent >= 0 else 0
                part.drafted[slot] = len(self.drafted)
                window = (*above, index)
                self.drafted.append(
                    DraftedNode(token if own else -1, part.place, slot - part.first, parent, level, window)
                )
            parent = part.drafted[slot]

    def levels(self) -> list[list[int]]:
        """Indices of the drafted nodes by level; those that the pass runs come first."""
        out: list[list[int]] = [[] for _ in range(max((n.level for n in self.drafted), default=-1) + 1)]
        for i in sorted(range(len(self.drafted)), key=lambda i: self.drafted[i].token < 0):
            out[self.drafted[i].level].append(i)
        return out

    def depth_first(self) -> list[list[DraftedNode]]:
        """The drafted nodes of every row, parents before their children's siblings."""
        children: dict[tuple[int, int], list[int]] = {}
        for i, node in enumerate(self.drafted):
            children.setdefault((node.place, node.parent), []).append(i)
        out = []
        for place in range(len(self.rows)):
            walk, open_ = list[DraftedNode](), children.get((place, -1), [])[::-1]
            while open_:
                i = open_.pop()
                walk.append(self.drafted[i])
                open_ += children.get((place, i), [])[::-1]
            out.append(walk)
        return out
