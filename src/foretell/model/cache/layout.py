"""Where the new tokens of a forward pass are in the key-value cache, and which slots they attend to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from foretell.core.tree import NodeMask, TokenTree
from foretell.utils.transfer import to_device


@dataclass(frozen=True)
class Layout:
    """Cache rows, slots, positions and visible slots of `t` new tokens: several requests flattened, without padding.

    A token attends to slots `0 .. visible_prefix-1` of its row, then to its `extra_slots`, the last of which is its own
    unless the prefix includes it. A chain has no extra slots: its prefix covers the chain. All new keys are written
    before any query reads. All tensors are int32 on the host.
    """

    row: Int[torch.Tensor, " t"]
    slot: Int[torch.Tensor, " t"]
    position: Int[torch.Tensor, " t"]
    visible_prefix: Int[torch.Tensor, " t"]
    extra_slots: Int[torch.Tensor, "t m"]
    """From the root down; padded with -1 at the end."""
    token: Int[torch.Tensor, " t"] | None = None
    """The tokens' ids, for models with per-layer inputs."""
    queries: Float[torch.Tensor, "l t h e"] | None = None
    """Receives the queries of every layer as attention multiplies them with the keys, before `ModelConfig.scale`; for
    models whose layers have the same sizes.
    """
    in_pages: Int[torch.Tensor, " t"] | None = None
    """1: the token attends to selected pages of keys, where `ModelConfig.page_budget` says so; None: no token does."""
    window_end: Int[torch.Tensor, " t"] | None = None
    """Position before which a sliding window ends: of what the token sees, the window holds what is at `window_end -
    window` and after; None: the position after the token's own.
    """

    @property
    def token_count(self) -> int:
        """Number of new tokens."""
        return len(self.row)

    def select(self, index: Int[torch.Tensor, " n"]) -> "Layout":
        """The tokens with these indices."""
        columns = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "queries"}
        return Layout(**{name: None if column is None else column[index] for name, column in columns.items()})

    @staticmethod
    def from_tree(
        tree: TokenTree, rows: Sequence[int], length: Int[np.ndarray, " b"], active: NodeMask
    ) -> "tuple[Layout, Int[np.ndarray, 'b n']]":
        """Layout of the active nodes of a tree, node `j` in slot `length + j`; and each node's index in it (-1: not
        active).

        Tokens of a longer prefix, which is a chunk of a prompt, attend to all pages. Ancestors of active nodes are
        active, too, or in the cache already. Example: length 5, a root with two children:
        visible prefixes 6, 7, 6, extra slots [], [], [7].
        """
        # Lists: on small trees, which are the common case, arrays cost several times as much.
        row, slot, position = list[int](), list[int](), list[int]()
        prefix, extra, in_pages = list[int](), list[list[int]](), list[bool]()
        for i, (cache_row, base) in enumerate(zip(rows, length.tolist(), strict=True)):
            wanted, depth = active[i].tolist(), tree.depth[i].tolist()
            chunk = int(tree.prefix_length[i])
            for node, (node_prefix, node_extra) in enumerate(_visible_slots(tree, i, base)):
                if wanted[node]:
                    row.append(cache_row)
                    slot.append(base + node)
                    position.append(base + depth[node])
                    prefix.append(node_prefix)
                    extra.append(node_extra)
                    in_pages.append(chunk == 1 or node >= chunk)
        width = max(map(len, extra), default=0)
        padded = np.array([slots + [-1] * (width - len(slots)) for slots in extra], np.int32)
        columns = *(np.array(c, np.int32) for c in (row, slot, position, prefix)), padded.reshape(len(extra), width)
        selects = torch.tensor(in_pages, dtype=torch.int32)
        layout = Layout(*map(torch.from_numpy, (*columns, tree.token[active])))
        return replace(layout, in_pages=selects), index_marked(active)


def index_marked(marked: NodeMask) -> Int[np.ndarray, "b n"]:
    """Consecutive indices of the true entries, row by row; -1 for the others."""
    out = np.full(marked.shape, -1)
    out[marked] = np.arange(np.count_nonzero(marked))
    return out


def _visible_slots(tree: TokenTree, i: int, base: int) -> Iterator[tuple[int, list[int]]]:
    """Visible prefix and extra slots of every node of row `i`; a node extends its parent's prefix where its slot is the
    next one.
    """
    prefix_length, prefix, extra = int(tree.prefix_length[i]), list[int](), list[list[int]]()
    for node, parent in enumerate(tree.parent[i].tolist()):
        slot = base + node
        if node < prefix_length:
            prefix.append(slot + 1)
            extra.append([])
        else:
            contiguous = parent >= 0 and not extra[parent] and prefix[parent] == slot
            prefix.append(slot + 1 if contiguous else prefix[parent])
            extra.append([] if contiguous else [*extra[parent], slot])
        yield prefix[node], extra[node]


@dataclass(frozen=True)
class PaddedLayout:
    """A layout padded to a rectangle on the device, `b` rows of `n` queries over `s` slots; made once per pass.

    Padding repeats a real token, so that it writes what is written already.
    """

    cache_rows: Int[torch.Tensor, " b"]
    """Cache row of every row of the rectangle."""
    token_index: Int[torch.Tensor, "b n"]
    """Index in the layout of every entry of the rectangle."""
    padded_index: Int[torch.Tensor, " t"]
    """Row-major index in the rectangle of every token of the layout."""
    row: Int[torch.Tensor, " t"]
    slot: Int[torch.Tensor, " t"]
    position: Int[torch.Tensor, " t"]
    mask: Bool[torch.Tensor, "b n s"]
    """Slots that each query attends to in layers without a window."""
    distance: Int[torch.Tensor, "b n s"]
    """Last position of the query's window minus the position of each slot's token."""
    token: Int[torch.Tensor, " t"]
    """Ids of the tokens; 0 where they are not known."""
    in_pages: Bool[torch.Tensor, " t"]
    """Whether a token attends to selected pages of keys, where the model's configuration says so."""

    @staticmethod
    def from_layout(
        layout: Layout, device: torch.device, token_index: Int[torch.Tensor, "b n"] | None = None, slots: int = 0
    ) -> "PaddedLayout":
        """Pad a layout to the rectangle `token_index` (None: the smallest); `slots`: least width of the masks."""
        index = pad_to_rectangle(layout) if token_index is None else token_index
        slots = max(slots, int(layout.visible_prefix.max()), int(layout.slot.max()) + 1)
        mask = torch.arange(slots) < layout.visible_prefix[:, None]
        key_position = torch.arange(slots).repeat(layout.token_count, 1)
        for j in range(layout.extra_slots.shape[1]):
            token = torch.nonzero(layout.extra_slots[:, j] >= 0)[:, 0]
            slot = layout.extra_slots[token, j].long()
            mask[token, slot] = True
            key_position[token, slot] = layout.visible_prefix[token].long() + j
        last = layout.position if layout.window_end is None else layout.window_end - 1
        distance = last.long()[:, None] - key_position
        tensors = (
            layout.row.long()[index[:, 0]],
            index,
            find_padded_index(index, layout.token_count),
            layout.row.long(),
            layout.slot.long(),
            layout.position.long(),
            mask[index],
            distance[index],
            torch.zeros_like(layout.row, dtype=torch.long) if layout.token is None else layout.token.long(),
            torch.zeros_like(layout.row, dtype=torch.bool) if layout.in_pages is None else layout.in_pages > 0,
        )
        return PaddedLayout(*(to_device(tensor, device) for tensor in tensors))

    def window_mask(self, window: int, chunked: bool = False) -> Bool[torch.Tensor, "b n s"]:
        """Slots that each query attends to in a layer with this sliding window (0: no window); `chunked`: it begins at
        a multiple of its size.
        """
        if not window:
            return self.mask
        seen = self.position[self.token_index][..., None] % window + 1 if chunked else window
        return self.mask & (self.distance < seen)

    def copy_(self, other: "PaddedLayout") -> None:
        """Copy the tensors of a layout of the same shapes."""
        for f in fields(self):
            getattr(self, f.name).copy_(getattr(other, f.name))


def next_power(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


def pad_to_rectangle(layout: Layout, b: int = 0, n: int = 0) -> Int[torch.Tensor, "b n"]:
    """Token indices by row, padded to at least `b` rows of `n`: short rows repeat their last token, missing rows the
    last row.
    """
    count = torch.unique_consecutive(layout.row, return_counts=True)[1]
    first = count.cumsum(0) - count
    column = torch.minimum(torch.arange(max(n, int(count.max()))), count[:, None] - 1)
    index = first[:, None] + column
    return torch.cat([index, index[-1:].expand(max(b - len(index), 0), -1)])


def find_padded_index(token_index: Int[torch.Tensor, "b n"], tokens: int) -> Int[torch.Tensor, " t"]:
    """First row-major index in the rectangle of every token."""
    padded_index = torch.empty(tokens, dtype=torch.int64)
    # Backwards, so that the first of several entries is written last.
    padded_index[token_index.flatten().flip(0)] = torch.arange(token_index.numel()).flip(0)
    return padded_index
