"""EAGLE-3's layers on the native kernels: one level of a tree, or whole trees by confidence, in one call."""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from foretell.model.cache import Cache, Layout
from foretell.model.native import structures
from foretell.model.native.stack import NativeLinear, NativeStack, expect


@dataclass(frozen=True)
class Surroundings:
    """What surrounds EAGLE-3's layers (arXiv 2503.01840), from the target's states to the first one and from the last one to tokens."""

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
    """The layers of EAGLE-3 with what surrounds them, so that nothing but kernels runs between one level of a tree and the next."""

    def __init__(self, stack: NativeStack, around: Surroundings) -> None:
        self._stack, self._around, self._kernels = stack, around, structures.library()
        table, count = around.embedding.detach(), around.fuse.inputs // stack.config.hidden
        if table.dtype not in (torch.float32, torch.bfloat16):
            table = table.float()
        norms = (around.embedding_norm, around.feature_norm, around.leaving, around.state_norms)
        # Kept here: the kernels read them.
        self._tensors = table.contiguous(), *(None if n is None else n.detach().float().contiguous() for n in norms)
        where, embedding, feature, self._leaving, states = (None if t is None else t.data_ptr() for t in self._tensors)
        self._entry = structures.Entry(
            *(where, table.dtype == torch.bfloat16, around.normed, embedding, feature, around.scale, len(table)),
            *(count, states, around.fuse.struct),
        )

    def read(self, token: Tensor, states: Tensor, layout: Layout, cache: Cache) -> Tensor:
        """Run tokens, int64 [t], each after the target's states before it, float32 [t, taps * hidden].

        Raises:
            ValueError: as `follow`.
        """
        stack, count = self._stack, len(token)
        tokens, memory = stack.tokens(count, layout), stack.memory(cache)
        expect(token, torch.int64, "token", count)
        expect(states, torch.float32, "states", count, self._around.fuse.inputs)
        x = torch.empty(count, stack.config.hidden)
        bad = self._kernels.foretell_eagle_read(
            *(stack.model, stack.layers, len(stack.layers), self._entry, token.data_ptr(), states.data_ptr()),
            *(x.data_ptr(), tokens, memory, torch.get_num_threads()),
        )
        return self._checked(x, bad, layout, memory, token, f"{count} states")

    def follow(self, token: Tensor, features: Tensor, parent: Tensor | None, layout: Layout, cache: Cache) -> Tensor:
        """Run tokens, int64 [t], that follow features, float32 [n, hidden]: token `i` follows feature `parent[i]`, or feature `i`.

        Raises:
            ValueError: a tensor has the wrong type or shape, or names what is not there; or as of a call of the stack.
        """
        stack, count = self._stack, len(token)
        tokens, memory = stack.tokens(count, layout), stack.memory(cache)
        expect(token, torch.int64, "token", count)
        expect(features, torch.float32, "features", len(features), stack.config.hidden)
        if parent is not None:
            expect(parent, torch.int64, "parent", count)
        x = torch.empty(count, stack.config.hidden)
        bad = self._kernels.foretell_eagle(
            *(stack.model, stack.layers, len(stack.layers), self._entry, token.data_ptr(), features.data_ptr()),
            *(len(features), None if parent is None else parent.data_ptr(), x.data_ptr(), tokens, memory),
            torch.get_num_threads(),
        )
        return self._checked(x, bad, layout, memory, token, f"{len(features)} features: {parent}")

    def _checked(
        self, x: Tensor, bad: int, layout: Layout, memory: structures.Memory, token: Tensor, before: str
    ) -> Tensor:
        if bad == -2:
            raise ValueError(
                f"{token.tolist()} is not among {self._entry.vocab} tokens, or what it follows not among {before}"
            )
        self._stack.check(bad, layout, memory)
        return x

    def beam(
        self,
        roots: Tensor,
        where: tuple[Int[np.ndarray, " b"], Int[np.ndarray, " b"], Int[np.ndarray, " b"]],
        sizes: tuple[int, int, int],
        bounds: tuple[float, float],
        cache: Cache,
    ) -> tuple[Int[np.ndarray, "b n"], Int[np.ndarray, "b n"], Int[np.ndarray, " b"]]:
        """Trees as `shape.Beam` grows them, below roots whose outputs, float32 [b, hidden], are given.

        `where`: of every text its row in the cache, the positions that it holds there, the root's included, and its room for tokens, 1 or more.
        `sizes`: depth, width and budget. `bounds`: the least score of a node, and that of the best one of a level to be gone on from. Returns
        tokens, the places of their parents (the root's is 0, the first token's 1), and how many there are of each text.

        Raises:
            ValueError: the cache has no room for the trees.
        """
        (depth, width, budget), (row, length, room) = sizes, (np.ascontiguousarray(x, np.int64) for x in where)
        expect(roots, torch.float32, "roots", len(row), self._stack.config.hidden)
        cache.reserve(int(row.max()) + 1, int(length.max()) + depth * width)
        token, parent = np.zeros((len(row), budget), np.int64), np.zeros((len(row), budget), np.int64)
        count = np.zeros(len(row), np.int64)
        beam = structures.Beam(len(row), depth, width, budget, *bounds, *(x.ctypes.data for x in (row, length, room)))
        stack, around, kept = self._stack, self._around, self._around.token_of
        bad = self._kernels.foretell_beam(
            *(stack.model, stack.layers, len(stack.layers), self._entry, around.head.struct, self._leaving),
            *(None if kept is None else kept.data_ptr(), roots.data_ptr(), ctypes.byref(beam), stack.memory(cache)),
            *(token.ctypes.data, parent.ctypes.data, count.ctypes.data, torch.get_num_threads()),
        )
        if bad >= 0:
            raise ValueError(
                f"a tree of {depth} levels does not fit behind a text of {length.max()} tokens: rotary tables end at {stack.model.context}"
            )
        return token, parent, count
