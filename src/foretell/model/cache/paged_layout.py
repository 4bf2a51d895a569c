"""A pass as kernels over the blocks of a cache read it: integers per token in one buffer, ancestors as packed bits."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int

from foretell.model.cache.layout import Layout, next_power
from foretell.utils.transfer import to_device

SPLIT = 512
"""Slots that are summed together: a multiple of the slots of a block."""
WORD_BITS = 16
"""Slots of a word."""
_FIELDS = 7


@dataclass(frozen=True)
class PagedLayout:
    """A layout on a device, copied there at once; its sizes alone decide the shapes of a pass.

    The fields of a token are its cache row, its slot (-1: it is padding), its position, the slots of its prefix, the
    last position before the end of its window, the slot after the last one that it sees, and its id. Its words say
    which slots from its prefix on it sees: 16 bits each, and above them the number of those seen in the words before.
    A tile is some consecutive tokens of a row: the first, and their number (0: it is padding).
    """

    buffer: Int[torch.Tensor, " n"]
    tokens: int
    words_per_token: int
    tile_count: int
    splits: int
    """Parts of `SPLIT` slots of the longest row."""

    @property
    def fields(self) -> Int[torch.Tensor, "7 t"]:
        """The fields of the tokens."""
        return self.buffer[: _FIELDS * self.tokens].view(_FIELDS, self.tokens)

    @property
    def words(self) -> Int[torch.Tensor, "t w"]:
        """The words of the tokens."""
        first = _FIELDS * self.tokens
        return self.buffer[first : first + self.tokens * self.words_per_token].view(self.tokens, self.words_per_token)

    @property
    def tiles(self) -> Int[torch.Tensor, "n 2"]:
        """The tiles."""
        return self.buffer[len(self.buffer) - 2 * self.tile_count :].view(self.tile_count, 2)

    @property
    def row(self) -> Int[torch.Tensor, " t"]:
        """Cache rows of the tokens."""
        return self.fields[0]

    @property
    def slot(self) -> Int[torch.Tensor, " t"]:
        """Slots of the tokens."""
        return self.fields[1]

    @property
    def position(self) -> Int[torch.Tensor, " t"]:
        """Positions of the tokens."""
        return self.fields[2]

    @property
    def token(self) -> Int[torch.Tensor, " t"]:
        """Ids of the tokens; 0 where they are not known."""
        return self.fields[6]

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        return self.tokens, self.words_per_token, self.tile_count, self.splits

    @staticmethod
    def from_layout(layout: Layout, device: torch.device, tile: int, fixed: bool = False) -> "PagedLayout":
        """A layout in tiles of at most `tile` tokens; `fixed`: its sizes are rounded up to powers of two, so that few
        of them serve all passes.
        """
        prefix, extra = layout.visible_prefix.numpy(), layout.extra_slots.numpy()
        end = np.maximum(prefix, extra.max(1, initial=-1) + 1)
        last = layout.position if layout.window_end is None else layout.window_end - 1
        token = torch.zeros_like(layout.row) if layout.token is None else layout.token
        columns = (layout.row, layout.slot, layout.position, prefix, last, end, token)
        fields, words = np.stack([np.asarray(column, np.int32) for column in columns]), _words(prefix, extra)
        tiles, splits = _tiles(layout.row.numpy(), tile), -(-int(end.max()) // SPLIT)
        if fixed:
            count, splits = next_power(fields.shape[1]), next_power(splits)
            padding = np.zeros((_FIELDS, count - fields.shape[1]), np.int32)
            padding[1] = -1
            fields = np.concatenate((fields, padding), 1)
            words = _padded(words, count, next_power(words.shape[1]) if words.size else 0)
            tiles = _padded(tiles, next_power(len(tiles)), 2)
        buffer = torch.from_numpy(np.concatenate([part.ravel() for part in (fields, words, tiles)]))
        return PagedLayout(to_device(buffer, device), fields.shape[1], words.shape[1], len(tiles), splits)

    def copy_(self, other: "PagedLayout") -> None:
        """Take the numbers of a layout of the same sizes."""
        self.buffer.copy_(other.buffer)


def _padded(part: Int[np.ndarray, "n m"], rows: int, columns: int) -> Int[np.ndarray, "r c"]:
    out = np.zeros((rows, columns), np.int32)
    out[: part.shape[0], : part.shape[1]] = part
    return out


def _words(prefix: Int[np.ndarray, " t"], extra: Int[np.ndarray, "t m"]) -> Int[np.ndarray, "t w"]:
    """The words of tokens that see `extra` slots (-1: none), ascending, beside their prefix."""
    token, rank = np.nonzero(extra >= 0)
    behind = extra[token, rank] - prefix[token]
    assert (behind >= 0).all() and (np.diff(behind)[np.diff(token) == 0] > 0).all(), "extra slots ascend"
    words = np.zeros((len(prefix), -(-(int(behind.max(initial=-1)) + 1) // WORD_BITS)), np.int32)
    counts = np.zeros_like(words)
    np.add.at(words, (token, behind // WORD_BITS), 1 << behind % WORD_BITS)
    np.add.at(counts, (token, behind // WORD_BITS), 1)
    return words | (counts.cumsum(1, dtype=np.int32) - counts) << WORD_BITS


def _tiles(row: Int[np.ndarray, " t"], tile: int) -> Int[np.ndarray, "n 2"]:
    """First token and number of tokens of every tile."""
    ends = [*(np.flatnonzero(np.diff(row)) + 1).tolist(), len(row)]
    firsts = [0, *ends[:-1]]
    tiles = [
        (at, min(tile, end - at)) for first, end in zip(firsts, ends, strict=True) for at in range(first, end, tile)
    ]
    return np.array(tiles, np.int32)
