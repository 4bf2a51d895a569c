"""Drafting with several layers of multi-token prediction, each of which reads the outputs of the one before it."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import Context, TokenBuffer
from foretell.core.tree import TokenTree
from foretell.draft.cached_states import layout_of
from foretell.draft.eagle import MTPDrafter
from foretell.draft.target_states import PrefixState
from foretell.model.run.mtp import MTPLayer


class MTPModulesDrafter(MTPDrafter):
    """Several layers of multi-token prediction, of which layer `k` gives the scores after nodes at depth `k`
    (DeepSeek-V3, arXiv 2412.19437; transformers' `MtpModel`).

    At position `j` layer `k` reads the output there of layer `k - 1` and token `j + k + 1`. So where the target has
    read up to position `p`, token `p + 1` is the root, and positions up to `p - k` of layer `k` stay in the cache. A
    node at depth `k` reads the last `k` positions anew, with the drafted tokens of its path.
    """

    label = "the checkpoint's multi-token prediction layers"
    network: MTPLayer

    def __init__(self, network: MTPLayer, max_pending: int = 32, window: int | None = None) -> None:
        super().__init__(network, max_pending, window)
        self._carried: dict[int, dict[int, Float[torch.Tensor, "m d"]]] = {}
        """Of a row that was read up to some number of positions: the last output of every layer that stays."""
        self._node_out: dict[tuple[int, int], Float[torch.Tensor, "k d"]] = {}
        """Outputs of a drafted node at the positions that it reads, by request of the batch and node."""
        self._roots: dict[int, tuple[int, int]] = {}
        """By request of the batch its row and the number of positions that the target has read."""
        self._drafted = np.zeros((0, 0), np.int64)
        """Slots that drafted nodes have in each layer, by layer and request."""

    def max_depths(self, context: Context) -> Int[np.ndarray, " b"]:
        """The number of layers at most."""
        return np.minimum(super().max_depths(context), len(self.network.modules))

    def _can_truncate(self, row: int, known: PrefixState, length: int) -> bool:
        """Where it knows the outputs that the layers carry over."""
        left = min(known.length, length - known.start)
        return super()._can_truncate(row, known, length) and (not left or left in self._carried.get(row, ()))

    def copy_row(self, source: int, target: int, length: int) -> int:
        """Copy the positions of the shared tokens, with what the layers carry over."""
        carried = dict(self._carried.get(source, {}))
        kept = super().copy_row(source, target, length)
        self._carried[target] = carried
        return kept

    def _forget(self, row: int) -> None:
        self._carried.pop(row, None)
        super()._forget(row)

    def _forward_roots(self, active: Sequence[int], context: Context) -> Float[torch.Tensor, "a d"]:
        self._node_out, self._drafted = {}, np.zeros((len(self.network.modules), len(context.rows)), np.int64)
        rows = [context.rows[i] for i in active]
        if not rows:
            return self._cache.k.new_zeros(0, self.network.hidden, dtype=self.network.dtype)
        counts = self._count_pending(rows, context)
        self._read_pending(rows, [context.sequences[i] for i in active], counts)
        self._roots = {i: (row, self._prefixes[row].count) for i, row in zip(active, rows, strict=True)}
        return torch.stack([self._carried[row][length][0] for row, length in self._roots.values()])

    @torch.inference_mode()
    def _read_pending(self, rows: Sequence[int], texts: Sequence[TokenBuffer], counts: Sequence[int]) -> None:
        """Layer `k` reads the same tokens as the first one, `k` positions before."""
        token, (states, place) = self._pending(rows, texts, counts)
        self._reserve_pending(rows, counts)
        first, ends = np.array([self._prefixes[row].length for row in rows]), np.cumsum(counts).tolist()
        hidden = list(states[0][torch.from_numpy(place).to(states[0].device)].split(list(counts)))
        carried = [self._carried.get(row, {}).get(f) for row, f in zip(rows, first.tolist(), strict=True)]
        last = [list[torch.Tensor]() for _ in rows]
        for k in range(len(self.network.modules)):
            sizes = [len(part) for part in hidden]
            slots = [np.arange(f + n - k - size, f + n - k) for f, n, size in zip(first, counts, sizes, strict=True)]
            chosen = np.concatenate([np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)])
            if not len(chosen):
                break
            slot = np.concatenate(slots)
            layout = layout_of(np.repeat(rows, sizes), slot, slot, slot + 1)
            out = self.network.forward_module(
                k, torch.from_numpy(token[chosen]), torch.cat(hidden), layout, self._cache
            ).split(sizes)
            for i, part in enumerate(out):
                last[i] += [part[-1]] if len(part) else []
                before = carried[i]
                # Layer `k` has read the position before those, if there is one.
                joined = before is not None and first[i] > k
                hidden[i] = torch.cat((before[k : k + 1], part[:-1])) if joined and before is not None else part[:-1]
        for row, f, n, outs in zip(rows, first.tolist(), counts, last, strict=True):
            known = self._carried.get(row, {})
            self._carried[row] = {at: known[at] for at in (f,) if at in known} | {f + n: torch.stack(outs)}

    def _forward_nodes(
        self, tree: TokenTree, batch_row: Int[np.ndarray, " k"], node: Int[np.ndarray, " k"]
    ) -> Float[torch.Tensor, "k d"]:
        out, depth = self._nodes.out.new_zeros(len(node), self.network.hidden), tree.depth[batch_row, node]
        for k in np.unique(depth).tolist():
            which = np.flatnonzero(depth == k)
            pairs = list(zip(batch_row[which].tolist(), node[which].tolist(), strict=True))
            read = self._read_nodes(tree, pairs, k)
            for pair, part in zip(pairs, read, strict=True):
                self._node_out[pair] = part
            out[torch.from_numpy(which)] = torch.stack([part[-1] for part in read])
        return out

    def _read_nodes(
        self, tree: TokenTree, pairs: Sequence[tuple[int, int]], depth: int
    ) -> tuple[Float[torch.Tensor, "n d"], ...]:
        """Outputs of nodes at one depth, at the positions that they read."""
        token, hidden, sizes = list[int](), list[torch.Tensor](), list[int]()
        row, slot, first, seen = list[int](), list[int](), list[int](), list[list[int]]()
        for i, node in pairs:
            cache_row, length = self._roots[i]
            size, path = min(depth, length), [node]
            while len(path) < size:
                path.append(int(tree.parent[i, path[-1]]))
            token += tree.token[i, path[::-1]].tolist()
            hidden += [self._carried[cache_row][length][depth - 1 : depth]] if length >= depth else []
            hidden += [self._node_out[i, int(tree.parent[i, node])]] if depth > 1 else []
            begin = length - size + self._drafted[depth, i]
            own = list(range(begin, begin + size))
            self._drafted[depth, i] += size
            row, slot, first = row + [cache_row] * size, slot + own, first + [length - size] * size
            seen += [own[: j + 1] for j in range(size)]
            sizes.append(size)
        self._cache.reserve(row, [each + 1 for each in slot])
        prefix = np.array(first)
        position = prefix + [len(slots) - 1 for slots in seen]
        layout = layout_of(np.array(row), np.array(slot), position, prefix, seen)
        out = self.network.forward_module(depth, torch.tensor(token), torch.cat(hidden), layout, self._cache)
        parts: tuple[torch.Tensor, ...] = out.split(sizes)
        return parts
