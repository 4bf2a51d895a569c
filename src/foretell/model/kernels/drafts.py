"""Networks that draft from the target's hidden states, on the kernels: EAGLE-3 (arXiv 2503.01840) and P-EAGLE (arXiv
2602.01469), one level of a tree or whole dynamic trees per call, and DFlash.
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


@dataclass(frozen=True, kw_only=True)
class DraftWeights:
    """What networks on the target's hidden states have before their first layer and after the last one."""

    embedding: Tensor
    """[vocab, hidden]."""
    embedding_scale: float
    """Factor on the embeddings."""
    fuse: NativeLinear
    """From the concatenated hidden states of the target to a feature."""
    state_norms: Tensor | None
    """Norm scale of each hidden state, [states, hidden]; None: they are not normed."""
    feature_norm: Tensor
    final_norm: Tensor
    """Scale of the norm before the head, [hidden]."""
    head: NativeLinear
    token_of: Tensor | None
    """The token of each output of the head, int64; None: the output's index."""


@dataclass(frozen=True, kw_only=True)
class EagleWeights(DraftWeights):
    """EAGLE-3's."""

    embedding_norm: Tensor
    norm_before_residual: bool
    """The residual stream starts from the normed feature."""
    norm_output: bool
    """The next feature is the output after the final norm (EAGLE-3.1)."""
    mask: tuple[Tensor, Tensor] | None = None
    """Embedding and feature of a mask, [hidden] each (P-EAGLE, arXiv 2602.01469)."""


@dataclass(frozen=True, kw_only=True)
class BlockDraftWeights(DraftWeights):
    """DFlash's."""

    mask: Tensor
    """What fills the slots after the anchor, [hidden]."""
    slots: int
    depth: int
    """How many of the slots, the last ones, predict a token."""
    window_causal: bool = False
    """In layers with a window a slot attends to no later slots."""
    window_from_anchor: bool = False
    """Windows of all slots end before the anchor, in addition to which they see the block."""
    markov: tuple[Tensor, NativeLinear] | None = None
    """Rows of the tokens, [vocab, rank], and from a row to the bias of the next token's scores."""
    confidence: NativeLinear | None = None
    """From a normed state, and the token's Markov row, to a logit."""


class _NativeDrafts:
    """A network from the target's hidden states to draft tokens, in kernels alone."""

    def __init__(self, stack: NativeStack, weights: DraftWeights) -> None:
        self._stack, self._kernels = stack, build.library()
        self._table, self._embedding = pack_embedding(weights.embedding, weights.embedding_scale)
        self._kept = list[Tensor]()
        """Vectors that the kernels read."""
        self._state_count = weights.fuse.inputs // stack.config.hidden
        norms = self._pointer(weights.state_norms)
        self._fusion = structures.Fusion(count=self._state_count, norms=norms, fuse=weights.fuse.struct)
        self._final_norm, token_of = self._pointer(weights.final_norm), weights.token_of
        self._output = weights.head.struct, self._final_norm, None if token_of is None else token_of.data_ptr()

    def _pointer(self, vector: Tensor | None) -> int | None:
        """Where the kernels read a vector."""
        if vector is None:
            return None
        self._kept.append(vector.detach().float().contiguous())
        return self._kept[-1].data_ptr()

    def _sources(self, states: Sequence[Tensor], wanted: int, *places: int) -> "Array[c_void_p]":
        """Pointers to the states of the recorded layers."""
        rows = states[0].shape[0]
        for state in states:
            check_tensor(state, torch.float32, "states", rows, self._stack.config.hidden)
        if len(states) != self._state_count or any(count != wanted for count in places):
            raise ValueError(
                f"{self._state_count} states at {wanted} places are read, found {len(states)} at {places[0]}"
            )
        return (c_void_p * self._state_count)(*(state.data_ptr() for state in states))


class NativeEagle(_NativeDrafts):
    """EAGLE-3 from the target's hidden states to draft tokens."""

    def __init__(self, stack: NativeStack, weights: EagleWeights) -> None:
        super().__init__(stack, weights)
        mask, mask_feature = weights.mask or (None, None)
        self._input = structures.make(
            structures.EagleInput,
            embedding=self._embedding,
            embedding_norm=self._pointer(weights.embedding_norm),
            feature_norm=self._pointer(weights.feature_norm),
            norm_before_residual=weights.norm_before_residual,
            output_norm=self._final_norm if weights.norm_output else None,
            fusion=self._fusion,
            mask=self._pointer(mask),
            mask_feature=self._pointer(mask_feature),
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
        pointers, place = self._sources(states, len(token), len(place)), np.ascontiguousarray(place, np.int64)
        sources = pointers, len(states[0]), place.ctypes.data
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
        stack, t = self._stack, len(token)
        sources = self._sources(states, t, len(place), sum(count))
        work, at = numbers.zeros(2 * t + len(count))
        work[:t], work[t : 2 * t], work[2 * t :] = token, place, count
        read = structures.StatesRead(
            states=addressof(sources), state_rows=states[0].shape[0], token=at, place=at + 8 * t, count=at + 16 * t
        )
        layers = stack.model, stack.layers, len(stack.layers), self._input
        grown = trees.struct, stack.cache_struct(cache), torch.get_num_threads()
        if masks is None:
            invalid = self._kernels.foretell_eagle_trees(*layers, *self._output, read, *grown)
        else:
            invalid = self._kernels.foretell_mask_trees(*layers, *self._output, read, masks, *grown)
        if invalid == -2:
            raise self._unknown_token(token.tolist())
        trees.check_result(invalid, stack.model.context)

    def _unknown_token(self, token: Sequence[int]) -> ValueError:
        return ValueError(
            f"{token} is not among {self._input.embedding.vocab} tokens, or follows what is not among the features"
        )


class NativeBlockDrafts(_NativeDrafts):
    """DFlash (arXiv 2602.06036) from the target's hidden states to draft tokens: whole dynamic trees from one block per
    request, in one call.
    """

    def __init__(self, stack: NativeStack, weights: BlockDraftWeights) -> None:
        super().__init__(stack, weights)
        self._markov, markov = pack_embedding(torch.zeros(0, 0) if weights.markov is None else weights.markov[0], 1.0)
        none = structures.Weight()
        self._input = structures.BlockInput(
            embedding=self._embedding,
            mask=self._pointer(weights.mask),
            feature_norm=self._pointer(weights.feature_norm),
            slots=weights.slots,
            depth=weights.depth,
            window_causal=weights.window_causal,
            window_from_anchor=weights.window_from_anchor,
            fusion=self._fusion,
            markov=structures.Embedding() if weights.markov is None else markov,
            markov_out=none if weights.markov is None else weights.markov[1].struct,
            confidence=none if weights.confidence is None else weights.confidence.struct,
        )

    def grow_dynamic_trees(
        self,
        root: Int[np.ndarray, " b"],
        states: Sequence[Tensor],
        place: Int[np.ndarray, " t"],
        count: Sequence[int],
        trees: DynamicTrees,
        cache: KVCache,
    ) -> None:
        """Read the next positions of every request, `count` of them, and grow trees below the roots from one block
        each. Position `t` is that of row `place[t]` of every recorded layer's states, float32 [n, hidden].

        Raises:
            ValueError: a tensor has the wrong dtype or shape, a token or place does not exist, or the cache has no room
                for the blocks.
        """
        stack, rows, t = self._stack, len(states[0]), len(place)
        sources = self._sources(states, sum(count), t)
        work, at = numbers.zeros(t + 2 * len(count))
        work[:t], work[t : t + len(count)], work[t + len(count) :] = place, count, root
        read = structures.StatesRead(states=addressof(sources), state_rows=rows, token=None, place=at, count=at + 8 * t)
        invalid = self._kernels.foretell_block_trees(
            stack.model,
            stack.layers,
            len(stack.layers),
            stack.injecting.layers,
            self._input,
            *self._output,
            read,
            at + 8 * (t + len(count)),
            trees.struct,
            stack.cache_struct(cache),
            torch.get_num_threads(),
        )
        if invalid == -2:
            raise ValueError(
                f"{root.tolist()} is not among {self._input.embedding.vocab} tokens, or a place is not among {rows}"
            )
        trees.check_result(invalid, stack.model.context)
