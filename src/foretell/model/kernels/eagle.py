"""EAGLE-3's layers on the native kernels: one level of a tree, or whole trees by confidence, in one call."""

from collections.abc import Callable, Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from foretell.model.cache import KVCache, Layout
from foretell.model.kernels import build, structures
from foretell.model.kernels.beam import Trees
from foretell.model.kernels.linear import NativeLinear, embedding_of, expect
from foretell.model.kernels.stack import NativeStack


@dataclass(frozen=True)
class Surroundings:
    """What surrounds EAGLE-3's layers (arXiv 2503.01840), from the target's states to the first one and from the last
    one to tokens.
    """

    embedding: Tensor
    """[vocab, hidden]."""
    scale: float
    """What embeddings are multiplied by."""
    fuse: NativeLinear
    """From the tapped states side by side to a feature."""
    state_norms: Tensor | None
    """Scales of a norm for each of them, [taps, hidden]; None: they are not normed."""
    embedding_norm: Tensor
    feature_norm: Tensor
    normed: bool
    """The residual stream starts from the normed feature."""
    leaving: Tensor
    """Scale of the norm before the head, [hidden]."""
    head: NativeLinear
    token_of: Tensor | None
    """The token of each output of the head, int64; None: its number."""


class NativeEagle:
    """The layers of EAGLE-3 with what surrounds them, so that nothing but kernels runs between one level of a tree and
    the next.
    """

    def __init__(self, stack: NativeStack, around: Surroundings) -> None:
        self._stack, self._around, self._kernels = stack, around, build.library()
        self._table, embedding = embedding_of(around.embedding, around.scale)
        norms = (around.embedding_norm, around.feature_norm, around.leaving, around.state_norms)
        # Kept here: the kernels read them.
        self._norms = [None if n is None else n.detach().float().contiguous() for n in norms]
        first, second, self._leaving, states = (None if n is None else n.data_ptr() for n in self._norms)
        self._kinds = around.fuse.inputs // stack.config.hidden
        self._entry = structures.Entry(embedding, first, second, around.normed, self._kinds, states, around.fuse.struct)

    def read(
        self, token: Tensor, states: Sequence[Tensor], place: Int[np.ndarray, " t"], layout: Layout, cache: KVCache
    ) -> Tensor:
        """Run tokens, int64 [t], each after the target's states before it: those at `place[t]` of every recorded
        layer's, float32 [n, hidden].

        Raises:
            ValueError: as `follow`.
        """
        known = len(states[0])
        for state in states:
            expect(state, torch.float32, "states", known, self._stack.config.hidden)
        if len(states) != self._kinds or len(place) != len(token):
            raise ValueError(
                f"{self._kinds} states at {len(token)} places are read, found {len(states)} at {len(place)}"
            )
        place = np.ascontiguousarray(place, np.int64)
        given = (c_void_p * self._kinds)(*(state.data_ptr() for state in states)), known, place.ctypes.data
        return self._run(self._kernels.foretell_eagle_read, token, given, layout, cache)

    def follow(self, token: Tensor, features: Tensor, parent: Tensor, layout: Layout, cache: KVCache) -> Tensor:
        """Run tokens, int64 [t], that follow features, float32 [n, hidden]: token `i` follows feature `parent[i]`.

        Raises:
            ValueError: a tensor has the wrong type or shape, or names what is not there; or as of a call of the stack.
        """
        expect(features, torch.float32, "features", len(features), self._stack.config.hidden)
        expect(parent, torch.int64, "parent", len(token))
        given = features.data_ptr(), len(features), parent.data_ptr()
        return self._run(self._kernels.foretell_eagle, token, given, layout, cache)

    def _run(
        self, kernel: Callable[..., int], token: Tensor, given: tuple[Any, ...], layout: Layout, cache: KVCache
    ) -> Tensor:
        """Call a kernel with the tokens and what is `given` that they follow."""
        stack, count = self._stack, len(token)
        tokens, memory = stack.tokens(count, layout), stack.memory(cache)
        expect(token, torch.int64, "token", count)
        x = torch.empty(count, stack.config.hidden)
        bad = kernel(
            *(stack.model, stack.layers, len(stack.layers), self._entry, token.data_ptr(), *given, x.data_ptr()),
            *(tokens, memory, torch.get_num_threads()),
        )
        if bad == -2:
            raise ValueError(
                f"{token.tolist()} is not among {self._entry.embedding.vocab} tokens, or what it follows not among the "
                f"features"
            )
        stack.check(bad, layout, memory)
        return x

    def beam(self, roots: Tensor, trees: Trees, cache: KVCache) -> None:
        """Grow trees below roots whose outputs, float32 [b, hidden], are given; their keys go behind those of the
        texts.

        Raises:
            ValueError: the cache has no room for the trees.
        """
        b, stack, around = trees.struct, self._stack, self._around
        expect(roots, torch.float32, "roots", b.texts, stack.config.hidden)
        bad = self._kernels.foretell_beam(
            *(stack.model, stack.layers, len(stack.layers), self._entry, around.head.struct, self._leaving),
            *(None if around.token_of is None else around.token_of.data_ptr(), roots.data_ptr(), b),
            *(stack.memory(cache), *trees.out, torch.get_num_threads()),
        )
        trees.check(bad, cache.k.shape[3], stack.model.context)
