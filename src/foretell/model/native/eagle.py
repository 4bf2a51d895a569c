"""EAGLE-3's layers on the native kernels: one level of a tree, or whole trees by confidence, in one call."""

import ctypes

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from foretell.model.cache import Cache, Layout
from foretell.model.native import structures
from foretell.model.native.stack import NativeLinear, NativeStack, expect


class NativeEagle:
    """What surrounds EAGLE-3's layers, so that nothing but the kernels runs between one level of a tree and the next.

    The first layer sees the normed embedding of a token and the normed feature before it side by side (arXiv 2503.01840). `embedding`: [vocab,
    hidden], with what it is multiplied by. `entering`: scales of the norms of embeddings and of features, [hidden] each. `normed`: the residual
    stream starts from the normed feature. `leaving`: scale of the norm before `head`. `token_of`: the token of each of its outputs, int64.
    """

    def __init__(
        self,
        stack: NativeStack,
        embedding: Tensor,
        scale: float,
        entering: tuple[Tensor, Tensor],
        normed: bool,
        leaving: Tensor,
        head: NativeLinear,
        token_of: Tensor | None,
    ) -> None:
        if embedding.dtype not in (torch.float32, torch.bfloat16):
            embedding = embedding.float()
        self._stack, self._head, self._kernels = stack, head, structures.library()
        self._leaving, self._token_of = leaving.detach().float().contiguous(), token_of
        # Kept here: the kernels read them.
        self._tensors = embedding.detach().contiguous(), *(norm.detach().float().contiguous() for norm in entering)
        table, *norms = (tensor.data_ptr() for tensor in self._tensors)
        self._entry = structures.Entry(table, embedding.dtype == torch.bfloat16, normed, *norms, scale, len(embedding))

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
        if bad == -2:
            known = f"{self._entry.vocab} tokens and {len(features)} features"
            raise ValueError(f"a token or the feature before it is not among {known}: {token.tolist()} after {parent}")
        stack.check(bad, layout, memory)
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
        stack, kept = self._stack, self._token_of
        bad = self._kernels.foretell_beam(
            *(stack.model, stack.layers, len(stack.layers), self._entry, self._head.struct, self._leaving.data_ptr()),
            *(None if kept is None else kept.data_ptr(), roots.data_ptr(), ctypes.byref(beam), stack.memory(cache)),
            *(token.ctypes.data, parent.ctypes.data, count.ctypes.data, torch.get_num_threads()),
        )
        if bad >= 0:
            raise ValueError(
                f"a tree of {depth} levels does not fit behind a text of {length.max()} tokens: rotary tables end at {stack.model.context}"
            )
        return token, parent, count
