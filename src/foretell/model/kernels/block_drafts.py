"""DFlash (arXiv 2602.06036) on the kernels: whole dynamic trees from one block per request, in one call."""

from collections.abc import Sequence
from ctypes import addressof, c_void_p
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from foretell.model.cache.kv_cache import KVCache
from foretell.model.kernels import build, numbers, structures
from foretell.model.kernels.dynamic_tree import DynamicTrees
from foretell.model.kernels.linear import NativeLinear, check_tensor, pack_embedding
from foretell.model.kernels.stack import NativeStack


@dataclass(frozen=True)
class BlockDraftWeights:
    """DFlash's weights before its first layer and after its last one."""

    embedding: Tensor
    """[vocab, hidden]."""
    embedding_scale: float
    """Factor on the embeddings."""
    mask: Tensor
    """What fills the slots after the anchor, [hidden]."""
    slots: int
    depth: int
    """How many of the slots, the last ones, predict a token."""
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
    window_causal: bool = False
    """In layers with a window a slot attends to no later slots."""
    window_from_anchor: bool = False
    """Windows of all slots end before the anchor, in addition to which they see the block."""
    markov: tuple[Tensor, NativeLinear] | None = None
    """Rows of the tokens, [vocab, rank], and from a row to the bias of the next token's scores."""
    confidence: NativeLinear | None = None
    """From a normed state, and the token's Markov row, to a logit."""


class NativeBlockDrafts:
    """DFlash from the target's hidden states to draft tokens, in kernels alone."""

    def __init__(self, stack: NativeStack, weights: BlockDraftWeights) -> None:
        self._stack, self._weights, self._kernels = stack, weights, build.library()
        self._table, embedding = pack_embedding(weights.embedding, weights.embedding_scale)
        self._markov, markov = pack_embedding(torch.zeros(0, 0) if weights.markov is None else weights.markov[0], 1.0)
        none = structures.Weight()
        vectors = (weights.mask, weights.feature_norm, weights.final_norm, weights.state_norms)
        # Kept alive here: the kernels read them.
        self._vectors = [None if v is None else v.detach().float().contiguous() for v in vectors]
        mask, feature_norm, self._final_norm, state_norms = (None if v is None else v.data_ptr() for v in self._vectors)
        self._state_count = weights.fuse.inputs // stack.config.hidden
        self._input = structures.BlockInput(
            embedding=embedding,
            mask=mask,
            feature_norm=feature_norm,
            slots=weights.slots,
            depth=weights.depth,
            window_causal=weights.window_causal,
            window_from_anchor=weights.window_from_anchor,
            fusion=structures.Fusion(count=self._state_count, norms=state_norms, fuse=weights.fuse.struct),
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
        stack, weights, rows = self._stack, self._weights, len(states[0])
        for state in states:
            check_tensor(state, torch.float32, "states", rows, stack.config.hidden)
        if len(states) != self._state_count or len(place) != sum(count):
            raise ValueError(
                f"{self._state_count} states at {sum(count)} places are read, found {len(states)} at {len(place)}"
            )
        t = len(place)
        work, at = numbers.zeros(t + 2 * len(count))
        work[:t], work[t : t + len(count)], work[t + len(count) :] = place, count, root
        sources = (c_void_p * self._state_count)(*(state.data_ptr() for state in states))
        read = structures.StatesRead(states=addressof(sources), state_rows=rows, token=None, place=at, count=at + 8 * t)
        invalid = self._kernels.foretell_block_trees(
            stack.model,
            stack.layers,
            len(stack.layers),
            stack.injecting.layers,
            self._input,
            weights.head.struct,
            self._final_norm,
            None if weights.token_of is None else weights.token_of.data_ptr(),
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
