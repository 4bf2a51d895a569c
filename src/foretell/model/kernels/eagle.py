"""EAGLE-3 (arXiv 2503.01840) and P-EAGLE (arXiv 2602.01469) on the kernels: one level of a tree, or whole dynamic
trees, per call.
"""

from collections.abc import Callable, Sequence
from ctypes import Array, addressof, c_void_p
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from foretell.model.cache.kv_cache import KVCache
from foretell.model.cache.layout import Layout
from foretell.model.kernels import build, numbers, structures
from foretell.model.kernels.dynamic_tree import DynamicTrees
from foretell.model.kernels.linear import NativeLinear, check_tensor, pack_embedding
from foretell.model.kernels.stack import NativeStack


@dataclass(frozen=True)
class EagleWeights:
    """EAGLE-3's weights before its first layer and after its last one."""

    embedding: Tensor
    """[vocab, hidden]."""
    embedding_scale: float
    """Factor on the embeddings."""
    fuse: NativeLinear
    """From the concatenated hidden states of the target to a feature."""
    state_norms: Tensor | None
    """Norm scale of each hidden state, [states, hidden]; None: they are not normed."""
    embedding_norm: Tensor
    feature_norm: Tensor
    norm_before_residual: bool
    """The residual stream starts from the normed feature."""
    norm_output: bool
    """The next feature is the output after the final norm (EAGLE-3.1)."""
    final_norm: Tensor
    """Scale of the norm before the head, [hidden]."""
    head: NativeLinear
    token_of: Tensor | None
    """The token of each output of the head, int64; None: the output's index."""
    mask: tuple[Tensor, Tensor] | None = None
    """Embedding and feature of a mask, [hidden] each (P-EAGLE, arXiv 2602.01469)."""


class NativeEagle:
    """EAGLE-3 from the target's hidden states to draft tokens, in kernels alone."""

    def __init__(self, stack: NativeStack, weights: EagleWeights) -> None:
        self._stack, self._weights, self._kernels = stack, weights, build.library()
        self._table, embedding = pack_embedding(weights.embedding, weights.embedding_scale)
        norms = (weights.embedding_norm, weights.feature_norm, weights.final_norm, weights.state_norms)
        # Kept alive here: the kernels read them.
        self._vectors = [
            None if v is None else v.detach().float().contiguous() for v in (*norms, *(weights.mask or (None, None)))
        ]
        embedding_norm, feature_norm, self._final_norm, state_norms, mask, mask_feature = (
            None if v is None else v.data_ptr() for v in self._vectors
        )
        self._state_count = weights.fuse.inputs // stack.config.hidden
        self._input = structures.make(
            structures.EagleInput,
            embedding=embedding,
            embedding_norm=embedding_norm,
            feature_norm=feature_norm,
            norm_before_residual=weights.norm_before_residual,
            output_norm=self._final_norm if weights.norm_output else None,
            fusion=structures.Fusion(count=self._state_count, norms=state_norms, fuse=weights.fuse.struct),
            mask=mask,
            mask_feature=mask_feature,
        )

    def forward_from_target(
        self, token: Tensor, states: Sequence[Tensor], place: Int[np.ndarray, " t"], layout: Layout, cache: KVCache
    ) -> Tensor:
        """Run tokens, int64 [t], that follow hidden states of the target: token `t` those at row `place[t]` of every
        recorded layer's states, float32 [n, hidden].

        Raises:
            ValueError: as `forward`.
        """
        return self._run_from_target(self._stack.layers, token, states, place, layout, cache)

    def store_from_target(
        self, token: Tensor, states: Sequence[Tensor], place: Int[np.ndarray, " t"], layout: Layout, cache: KVCache
    ) -> None:
        """The same where nothing reads the outputs: of the last layer, keys and values suffice."""
        self._run_from_target(self._storing, token, states, place, layout, cache)

    @cached_property
    def _storing(self) -> "Array[structures.Layer]":
        """The layers, the last one reduced to storing its keys and values."""
        layers = type(self._stack.layers).from_buffer_copy(self._stack.layers)
        layers[-1] = self._stack.keys_only.layers[-1]
        return layers

    def _run_from_target(
        self,
        layers: "Array[structures.Layer]",
        token: Tensor,
        states: Sequence[Tensor],
        place: Int[np.ndarray, " t"],
        layout: Layout,
        cache: KVCache,
    ) -> Tensor:
        rows = len(states[0])
        for state in states:
            check_tensor(state, torch.float32, "states", rows, self._stack.config.hidden)
        if len(states) != self._state_count or len(place) != len(token):
            raise ValueError(
                f"{self._state_count} states at {len(token)} places are read, found {len(states)} at {len(place)}"
            )
        place = np.ascontiguousarray(place, np.int64)
        sources = (c_void_p * self._state_count)(*(state.data_ptr() for state in states)), rows, place.ctypes.data
        return self._run(self._kernels.foretell_eagle_forward_from_target, layers, token, sources, layout, cache)

    def forward(self, token: Tensor, features: Tensor, parent: Tensor, layout: Layout, cache: KVCache) -> Tensor:
        """Run tokens, int64 [t], that follow features, float32 [n, hidden]: token `i` follows feature `parent[i]`.

        Raises:
            ValueError: a tensor has the wrong dtype or shape, or a token or parent does not exist; or as
                `NativeStack.run`.
        """
        check_tensor(features, torch.float32, "features", len(features), self._stack.config.hidden)
        check_tensor(parent, torch.int64, "parent", len(token))
        sources = features.data_ptr(), len(features), parent.data_ptr()
        return self._run(self._kernels.foretell_eagle_forward, self._stack.layers, token, sources, layout, cache)

    def _run(
        self,
        kernel: Callable[..., int],
        layers: "Array[structures.Layer]",
        token: Tensor,
        sources: tuple[Any, ...],
        layout: Layout,
        cache: KVCache,
    ) -> Tensor:
        """Call a kernel with the tokens and the arguments for the states or features that they follow."""
        stack, count = self._stack, len(token)
        structs = stack.layout_struct(count, layout), stack.cache_struct(cache)
        check_tensor(token, torch.int64, "token", count)
        x = torch.empty(count, stack.config.hidden)
        invalid = kernel(
            stack.model,
            layers,
            len(layers),
            self._input,
            token.data_ptr(),
            *sources,
            x.data_ptr(),
            *structs,
            torch.get_num_threads(),
        )
        if invalid == -2:
            raise self._unknown_token(token.tolist())
        stack.check_result(invalid, layout, structs[1])
        return x

    def grow_dynamic_trees(
        self,
        token: Int[np.ndarray, " t"],
        states: Sequence[Tensor],
        place: Int[np.ndarray, " t"],
        count: Sequence[int],
        trees: DynamicTrees,
        cache: KVCache,
        masks: int | None = None,
    ) -> None:
        """Run the next positions of every request, `count` of them, and grow trees below the last ones, whose keys are
        cached after the requests' own; `token`, `states` and `place` as in `forward_from_target`. `masks`: so many
        masks after every request's positions, run in the same pass, predict the levels below the first; None: the
        layers run every level.

        Raises:
            ValueError: the cache has no room for the trees; or as `forward_from_target`.
        """
        stack, weights, rows = self._stack, self._weights, states[0].shape[0]
        for state in states:
            check_tensor(state, torch.float32, "states", rows, stack.config.hidden)
        if len(states) != self._state_count or not len(place) == len(token) == sum(count):
            raise ValueError(
                f"{self._state_count} states at {len(token)} places are read, found {len(states)} at {len(place)}"
            )
        t = len(token)
        work, at = numbers.zeros(2 * t + len(count))
        work[:t], work[t : 2 * t], work[2 * t :] = token, place, count
        sources = (c_void_p * self._state_count)(*(state.data_ptr() for state in states))
        read = structures.StatesRead(
            states=addressof(sources), state_rows=rows, token=at, place=at + 8 * t, count=at + 16 * t
        )
        layers = stack.model, stack.layers, len(stack.layers), self._input
        output = (
            weights.head.struct,
            self._final_norm,
            None if weights.token_of is None else weights.token_of.data_ptr(),
        )
        grown = trees.struct, stack.cache_struct(cache), torch.get_num_threads()
        if masks is None:
            invalid = self._kernels.foretell_eagle_trees(*layers, *output, read, *grown)
        else:
            invalid = self._kernels.foretell_mask_trees(*layers, *output, read, masks, *grown)
        if invalid == -2:
            raise self._unknown_token(token.tolist())
        trees.check_result(invalid, stack.model.context)

    def _unknown_token(self, token: Sequence[int]) -> ValueError:
        return ValueError(
            f"{token} is not among {self._input.embedding.vocab} tokens, or follows what is not among the features"
        )
