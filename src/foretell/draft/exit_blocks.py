"""Decoder blocks of an exit between the target's first layers and the exit's head (Kangaroo, arXiv 2404.18911)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import Context, StepResult, StepState
from foretell.core.tree import NodeMask, TokenTree
from foretell.draft.cached_states import layout_of
from foretell.draft.target_states import PrefixState, TargetStates, concatenate_states
from foretell.model.block.decoder import BlockRange, Decoder
from foretell.model.block.layer import DecoderBlock
from foretell.model.cache.base import LayeredCache
from foretell.model.cache.kv_cache import KVCache
from foretell.model.cache.layout import Layout
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.runner import Runner, offered


class ExitBlocks:
    """The blocks of one exit in the cache of a target, where they have layers of their own.

    So their keys and values are shared, moved and forgotten with the target's. They are made of the target's hidden
    states after `layer` layers: those of tokens that the target has read come from its passes, and are read before the
    next draft; the drafts run the layers themselves.

    Raises:
        ValueError: the runner has no cache of keys and values of one size, or runs another kind of network.
    """

    def __init__(self, blocks: Sequence[DecoderBlock], layer: int, runner: Runner) -> None:
        inner = offered(runner, DecoderRunner)
        network, cache = (None, None) if inner is None else (inner.network, inner.cache)
        if not isinstance(network, NativeDecoder | Decoder) or not isinstance(cache, KVCache):
            raise ValueError(
                "exits with decoder blocks need a model of the own decoder whose layers have keys and values of one "
                "size, all in memory; use exits without blocks"
            )
        self.layer, self.last = layer, layer + len(blocks)
        place = cache.add_layers(len(blocks))
        self.network: NativeDecoder | Decoder
        """The target's first layers, and the blocks after them."""
        if isinstance(network, NativeDecoder):
            self.network = network.followed_by(layer, blocks, place)
        else:
            self.network = network.followed_by(layer, blocks)
        places = [*range(layer), *range(place, place + len(blocks))]
        self._cache = LayeredCache([cache], [(0, index) for index in places])
        self._prefixes: dict[int, PrefixState] = {}
        self._read_by_drafts = StepState[dict[int, int]]()
        """How many pending tokens of each row the drafts of a step have read."""

    def ready(self, row: int, length: int) -> bool:
        """Whether the states of the first `length` tokens of a row are known."""
        known = self._prefixes.get(row)
        return known is not None and known.end == length

    @torch.inference_mode()
    def read_roots(
        self, context: Context, requests: Sequence[int], roots: Float[torch.Tensor, "b d"]
    ) -> Float[torch.Tensor, "b d"]:
        """Outputs of the blocks at the roots of some requests, from the outputs of the first layers there; reads what
        is pending before them.
        """
        rows = [context.rows[i] for i in requests]
        prefixes = [self._prefixes[row] for row in rows]
        parts, counts = list[torch.Tensor](), list[int]()
        pending = [prefix.pending_count for prefix in prefixes]
        self._read_by_drafts.put(context, dict(zip(rows, pending, strict=True)))
        for prefix, count, root in zip(prefixes, pending, roots, strict=True):
            if prefix.pending:
                states, place = concatenate_states(prefix.pending)
                parts.append(states[0][torch.from_numpy(place).to(root.device)].to(root.dtype))
            parts.append(root[None])
            counts.append(count + 1)
        first = [prefix.length for prefix in prefixes]
        slot = np.concatenate([np.arange(f, f + n) for f, n in zip(first, counts, strict=True)])
        out = self._run(torch.cat(parts), layout_of(np.repeat(rows, counts), slot, slot, slot + 1))
        return out[torch.from_numpy(np.cumsum(counts) - 1).to(out.device)]

    @torch.inference_mode()
    def read_nodes(
        self,
        tree: TokenTree,
        rows: Sequence[int],
        length: Int[np.ndarray, " b"],
        nodes: NodeMask,
        states: Float[torch.Tensor, "k d"],
    ) -> Float[torch.Tensor, "k d"]:
        """Outputs of the blocks at nodes below the roots, whose ancestors they have read; `length`: committed tokens of
        the rows.
        """
        return self._run(states, Layout.from_tree(tree, rows, length, nodes)[0])

    def _run(self, states: Float[torch.Tensor, "k d"], layout: Layout) -> Float[torch.Tensor, "k d"]:
        blocks = BlockRange(self.layer, self.last)
        return self.network.run(states.contiguous(), layout, self._cache, blocks).hidden_states[-1]

    def observe(self, step: StepResult) -> None:
        """Keep the target's states at the accepted nodes."""
        output = step.output
        for row, count in self._read_by_drafts.of(step.context, {}).items():
            self._prefixes[row].count_as_read(count)
        for i, (row, start) in enumerate(zip(step.context.rows, step.start_positions, strict=True)):
            known = self._prefixes.get(row)
            if start == 0:
                known = self._prefixes[row] = PrefixState()
            if known is None or known.end != start:
                self._prefixes.pop(row, None)
                continue
            places = output.hidden_index[i, list(step.paths[i])][: step.context.sequences[i].length - 1 - start]
            if len(places):
                known.pending.append(TargetStates(output.hidden_states, places))

    def release(self, row: int) -> None:
        """Forget a row."""
        self._prefixes.pop(row, None)

    def keep(self, row: int, length: int) -> int:
        """Keep what is known of the first `length` tokens of a row; how many these are."""
        return self.copy(row, row, length)

    def copy(self, source: int, target: int, length: int) -> int:
        """Let a row that shares the first `length` tokens of another have what is known of these; how many they are."""
        known = self._prefixes.get(source)
        if known is None:
            self._prefixes.pop(target, None)
            return 0
        copied = self._prefixes[target] = replace(known)
        copied.truncate(length)
        return copied.end
