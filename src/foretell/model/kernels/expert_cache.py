"""Experts within a budget of memory: the most used ones stay, the others are read from a file when a pass needs them.

Those that the next layer will probably need are read ahead by threads while a layer runs.
"""

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from ctypes import POINTER, c_float, c_int32
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from foretell.model.kernels import structures
from foretell.model.kernels.pack import allocate

Key = tuple[int, int]
"""A mixture-of-experts layer, counted among these, and an expert."""
Pointer = tuple[ctypes.Structure, str, int]
"""A field of a structure that points into an expert's bytes, and the distance from their first one."""
_LOAD = ctypes.CFUNCTYPE(c_int32, c_int32, POINTER(c_int32), c_int32, POINTER(c_float), c_int32)
_READERS = 4
"""Threads that read: a disk serves several requests faster than one."""
_DECAY = 0.9
"""Share of an expert's count of uses that is kept per pass."""


@dataclass(frozen=True)
class ExpertBytes:
    """Where an expert lies in the file, in whole pages, and the pointers to be set when it is in memory."""

    offset: int
    size: int
    pointers: Sequence[Pointer]


@dataclass
class ExpertReads:
    """What passes needed, added up: experts in all; those in memory before; those that were read ahead in time, or
    were being read; experts that were read ahead, needed or not; and bytes that were read.
    """

    needed: int = 0
    in_memory: int = 0
    ahead: int = 0
    read_ahead: int = 0
    bytes: int = 0

    @property
    def memory_share(self) -> float:
        """Share of the needed experts that were in memory."""
        return self.in_memory / max(self.needed, 1)

    @property
    def ahead_share(self) -> float:
        """Share of the needed experts that were not in memory which were read ahead."""
        return self.ahead / max(self.needed - self.in_memory, 1)

    def to_dict(self) -> Mapping[str, float]:
        """As a dictionary for JSON."""
        return {**vars(self), "memory_share": self.memory_share, "ahead_share": self.ahead_share}


class ExpertCache:
    """Slots for experts, which all layers share.

    A layer keeps its most used experts, equally many in each layer; where a layer has more, for a pass that needs them,
    its least used ones leave first. A layer that needs more experts than half of the slots runs them in rounds.

    `layers`: the experts of every mixture-of-experts layer. `read(key, target)`: writes an expert's bytes from the
    file to memory. `predict(layer, x)`: the experts that a layer will probably need where the residual stream is
    `x`, the most probable first.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[ExpertBytes]],
        read: Callable[[Key, memoryview], None],
        predict: Callable[[int, Float[np.ndarray, "t d"]], Sequence[int]],
        hidden: int,
        slots: int,
    ) -> None:
        self._layers, self._read, self._predict, self._hidden = layers, read, predict, hidden
        self._slot_bytes = max(each.size for layer in layers for each in layer)
        self.slots = min(slots, sum(map(len, layers)))
        """Experts that memory has room for."""
        self._memory = allocate(self.slots * self._slot_bytes)
        self._view = self._memory.numpy().data
        self._free = list(range(self.slots))
        self._slot = dict[Key, int]()
        self._reading = dict[Key, Future[None]]()
        self._ahead, self._pinned = set[Key](), set[Key]()
        self._resident: list[set[int]] = [set() for _ in layers]
        self._uses = [np.zeros(len(layer)) for layer in layers]
        self._share = self.slots // (len(layers) + 1)
        """Experts that every layer keeps; as many again are for those that a pass needs beside them."""
        self._layer = -1
        self._pool = ThreadPoolExecutor(min(_READERS, self.slots), "experts")
        self._callback = _LOAD(self._load)
        self.address = ctypes.cast(self._callback, ctypes.c_void_p).value
        """Of the function that the kernels call; see `Experts.load` in csrc/interface.h."""
        self._error: BaseException | None = None
        self.reads = ExpertReads()

    @property
    def nbytes(self) -> int:
        """Bytes of memory for experts."""
        return self.slots * self._slot_bytes

    def raise_error(self) -> None:
        """Raise what ended the last pass.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is damaged.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error

    def begin_pass(self, expected: Iterable[int]) -> None:
        """Read ahead what the first layer is expected to need, the most probable first."""
        self._pinned.clear()
        self._layer = -1
        self._read_ahead([(0, expert) for expert in expected], set())

    def wait(self) -> None:
        """Wait until what is being read is there."""
        wait(self._reading.values())

    def _load(self, layer: int, experts: Any, count: int, x: Any, tokens: int) -> int:
        try:
            return self._provide(layer, experts[:count], np.ctypeslib.as_array(x, (tokens, self._hidden)))
        except BaseException as error:  # nothing may pass through the kernels
            self._error = error
            return 0

    def _provide(self, layer: int, wanted: list[int], x: Float[np.ndarray, "t d"]) -> int:
        """Bring the first of some experts into memory; returns how many."""
        self._pinned.clear()
        needed = [(layer, expert) for expert in wanted]
        if layer != self._layer:
            self._begin_layer(layer, wanted)
        most = len(needed) if len(needed) <= self.slots // 2 else max(1, self.slots // 2)
        round_ = self._start_round(needed[:most], set(needed))
        rest = needed[len(round_) :]
        if rest:
            self._read_ahead(rest, set(needed))
        elif layer + 1 < len(self._layers):
            self._read_ahead([(layer + 1, expert) for expert in self._predict(layer + 1, x)], set(needed))
        for key in round_:
            self._finish(key)
        return len(round_)

    def _begin_layer(self, layer: int, wanted: list[int]) -> None:
        """Count the uses of a layer's experts, and forget what is being read for it in vain."""
        self._layer = layer
        self._uses[layer] *= _DECAY
        self._uses[layer][wanted] += 1
        for key in [key for key in self._ahead if key[0] == layer and key[1] not in wanted]:
            self._ahead.discard(key)
            if key in self._reading and self._reading[key].cancel():
                self._drop(key)
                self.reads.read_ahead -= 1
                self.reads.bytes -= self._layers[layer][key[1]].size

    def _start_round(self, keys: Sequence[Key], kept: set[Key]) -> list[Key]:
        """Start to read those of some experts that are not in memory, as far as there are slots; returns those that
        will be there. `kept` may not leave, unless nothing else can.
        """
        started = list[Key]()
        for key in keys:
            resident = key in self._slot
            if not resident and not self._start(key, kept):
                if started:
                    break
                self._give_up_ahead()
                self._start(key, set())
            self.reads.needed += 1
            if key in self._ahead:
                self._ahead.discard(key)
                self.reads.ahead += 1
            else:
                self.reads.in_memory += resident
            self._pinned.add(key)
            started.append(key)
        return started

    def _give_up_ahead(self) -> None:
        """Let experts leave that were read ahead: all slots are theirs."""
        self._ahead.clear()
        self.wait()

    def _read_ahead(self, keys: Sequence[Key], kept: set[Key]) -> None:
        """Start to read those of some experts that are not in memory, as far as experts that a layer has beside its
        share make room for them.
        """
        kept = kept | set(keys)
        for key in keys:
            if key in self._slot:
                continue
            if not self._start(key, kept, ahead=True):
                return
            self._ahead.add(key)
            self.reads.read_ahead += 1

    def _start(self, key: Key, kept: set[Key], ahead: bool = False) -> bool:
        """Start to read an expert into a slot; False: there is none."""
        if not self._free and not self._evict(kept, ahead):
            return False
        slot = self._free.pop()
        self._slot[key] = slot
        self._resident[key[0]].add(key[1])
        begin, size = slot * self._slot_bytes, self._layers[key[0]][key[1]].size
        self._reading[key] = self._pool.submit(self._read, key, self._view[begin : begin + size])
        self.reads.bytes += size
        return True

    def _evict(self, kept: set[Key], ahead: bool) -> bool:
        """Free the slot of the least used expert of the layer that has most beyond its share; False: none may leave."""
        for layer in sorted(range(len(self._layers)), key=lambda i: -len(self._resident[i])):
            if ahead and len(self._resident[layer]) <= self._share:
                return False
            evictable = [e for e in self._resident[layer] if self._may_leave((layer, e), kept)]
            if evictable:
                self._drop((layer, min(evictable, key=self._uses[layer].__getitem__)))
                return True
        return False

    def _may_leave(self, key: Key, kept: set[Key]) -> bool:
        if key in kept or key in self._pinned or key in self._ahead:
            return False
        future = self._reading.get(key)
        return future is None or future.done()

    def _drop(self, key: Key) -> None:
        self._free.append(self._slot.pop(key))
        self._resident[key[0]].discard(key[1])
        self._reading.pop(key, None)

    def _finish(self, key: Key) -> None:
        """Wait until an expert is in memory, and let the kernels' structures point to it."""
        future = self._reading.get(key)
        if future is None:
            return
        try:
            future.result()
        except BaseException:
            self._pinned.discard(key)
            self._drop(key)
            raise
        del self._reading[key]
        start = self._memory.data_ptr() + self._slot[key] * self._slot_bytes
        for struct, name, distance in self._layers[key[0]][key[1]].pointers:
            setattr(struct, name, start + distance)


class RouterForecast:
    """Predicts the experts of a layer from the residual stream before it, by the layer's own router: the stream changes
    little from layer to layer (Eliseev and Mazur, arXiv 2312.17238).
    """

    def __init__(self, layers: Sequence[structures.Layer], hidden: int, eps: float, kernels: ctypes.CDLL) -> None:
        self._layers, self._hidden, self._eps, self._kernels = layers, hidden, eps, kernels
        self._experts = [structures.Experts.from_address(layer.experts) for layer in layers]

    def __call__(self, layer: int, x: Float[np.ndarray, "t d"]) -> list[int]:
        """The experts that a layer will probably need, those of most tokens first."""
        e, tokens = self._experts[layer], len(x)
        normed, logits = np.empty_like(x), np.empty((tokens, e.router.outputs), np.float32)
        norm = e.router_norm or self._layers[layer].mlp_norm
        self._kernels.foretell_rms_norm(x.ctypes.data, norm, self._eps, normed.ctypes.data, tokens, self._hidden, 1)
        self._kernels.foretell_linear(e.router, normed.ctypes.data, logits.ctypes.data, tokens, e.router.outputs, 1)
        score = logits[:, : e.count]
        if e.selection_bias:
            bias = np.ctypeslib.as_array((c_float * e.count).from_address(e.selection_bias))
            score = 1 / (1 + np.exp(-score)) + bias if e.scoring else score + bias
        chosen = np.argpartition(-score, e.active - 1, axis=1)[:, : e.active]
        count = np.bincount(chosen.ravel(), minlength=e.count)
        order: list[int] = np.argsort(-count, kind="stable")[: np.count_nonzero(count)].tolist()
        return order
