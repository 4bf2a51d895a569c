"""What a network keeps of the tokens it has read: the interface of all caches, and a cache of several stores."""

from abc import ABC, abstractmethod
from collections.abc import Sequence


class Cache(ABC):
    """What the layers of a network keep of the tokens of every batch row: keys and values, or recurrent states.

    A cache is one store for all layers (`KVCache`), or one store per kind of layer (`LayeredCache`).
    """

    any_length = True
    """Whether a row can go back to every earlier length."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """Number of batch rows that there is room for."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the tensors."""

    @abstractmethod
    def reserve(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        """Give row `rows[i]` room for `slots[i]` tokens, the nodes of a tree included; the contents stay.

        Raises:
            OutOfBlocksError: the cache is limited and full; then nothing is changed.
        """

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of keys and values in all layers."""
        return 0

    def limit(self, nbytes: int) -> None:
        """Let keys and values use at most so many bytes."""
        return

    @property
    def free_slots(self) -> int | None:
        """Tokens that there is room for without forgetting others; None: any number."""
        return None

    @abstractmethod
    def copy_row(self, source: int, target: int, length: int) -> None:
        """Make the first `length` tokens of row `source`, which `restorable` returned, those of row `target`."""

    def begin(self, rows: Sequence[int], lengths: Sequence[int], prefixes: Sequence[int], nodes: int) -> None:
        """Announce a pass over a tree of `nodes` nodes, for each of its rows after `lengths[i]` tokens; the first
        `prefixes[i]` nodes are the tree's prefix.
        """
        return

    @abstractmethod
    def keep(self, row: int, length: int, path: Sequence[int]) -> None:
        """Keep these nodes of the row's last tree, in order, as the tokens after its first `length`; forget the others.

        The path includes the tree's prefix, or is empty.
        """

    def restorable(self, row: int, length: int) -> int:
        """The most tokens, up to `length` of those kept, that `truncate` can go back to."""
        return length

    def truncate(self, row: int, length: int) -> None:
        """Forget a row's tokens from `length` on, which `restorable` returned, and free their memory."""
        return

    def store(self, layer: int) -> "tuple[Cache, int]":
        """The store of a layer, and the layer's index in it."""
        return self, layer

    def all_stores(self) -> "tuple[Cache, ...]":
        """The stores of all layers."""
        return (self,)


class LayeredCache(Cache):
    """A cache of several stores.

    `places`: for every layer the index of its store and its index there. Layers with the same place share what is
    kept, as the last layers of Gemma 4 share keys and values.
    """

    def __init__(self, stores: Sequence[Cache], places: Sequence[tuple[int, int]]) -> None:
        self.stores, self._places = tuple(stores), tuple(places)
        self.any_length = all(store.any_length for store in self.stores)

    @property
    def rows(self) -> int:
        """Number of batch rows that there is room for."""
        return min(store.rows for store in self.stores)

    @property
    def nbytes(self) -> int:
        """Bytes of all stores."""
        return sum(store.nbytes for store in self.stores)

    def reserve(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        """Reserve in every store."""
        for store in self.stores:
            store.reserve(rows, slots)

    @property
    def block_bytes(self) -> int:
        """The sum of all stores: each has a block for every block of the others."""
        return sum(store.block_bytes for store in self.stores)

    def limit(self, nbytes: int) -> None:
        """Limit the stores of keys and values, which grow with the texts, to as many blocks each."""
        for store in self.stores:
            store.limit(nbytes * store.block_bytes // max(1, self.block_bytes))

    @property
    def free_slots(self) -> int | None:
        """The least of all stores."""
        return min((free for store in self.stores if (free := store.free_slots) is not None), default=None)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy tokens of a row in every store."""
        for store in self.stores:
            store.copy_row(source, target, length)

    def begin(self, rows: Sequence[int], lengths: Sequence[int], prefixes: Sequence[int], nodes: int) -> None:
        """Announce a pass to every store."""
        for store in self.stores:
            store.begin(rows, lengths, prefixes, nodes)

    def keep(self, row: int, length: int, path: Sequence[int]) -> None:
        """Keep these nodes in every store."""
        for store in self.stores:
            store.keep(row, length, path)

    def restorable(self, row: int, length: int) -> int:
        """The most tokens up to `length` that every store can go back to."""
        reachable = length
        while (least := min(store.restorable(row, reachable) for store in self.stores)) < reachable:
            reachable = least
        return reachable

    def truncate(self, row: int, length: int) -> None:
        """Forget a row's tokens from `length` on."""
        for store in self.stores:
            store.truncate(row, length)

    def store(self, layer: int) -> tuple[Cache, int]:
        """The store of a layer, and the layer's index in it."""
        store, index = self._places[layer]
        return self.stores[store], index

    def all_stores(self) -> tuple[Cache, ...]:
        """The stores of all layers."""
        return self.stores
