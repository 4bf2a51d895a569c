"""Runners whose cache holds a part of a text's keys and values, at the positions that they have in the text."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import Context, ModelOutput
from foretell.core.tree import NodeMask, TokenTree
from foretell.model.block.decoder import BlockRange
from foretell.model.cache.kv_cache import KVCache
from foretell.model.cache.layout import Layout
from foretell.model.cache.packed_groups import KIVI_BITS
from foretell.model.cache.policy import CachePolicy
from foretell.model.config.model import ModelConfig
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.model.run.network_runner import NetworkRunner
from foretell.model.run.partial_pass import further_state
from foretell.model.run.runner import Layers, Marks, Rows, Runner


def check_compactible(config: ModelConfig) -> None:
    """Refuse models whose layers do not all attend to the whole text.

    Raises:
        ValueError: the model has sliding windows, recurrent states, latent attention, shared keys and values, or
            per-layer inputs.
    """
    if config.cache_dtype in KIVI_BITS:
        raise ValueError(
            f"a part of the cache can be selected where keys are stored one by one, and {config.cache_dtype} stores "
            "them in groups; use another --kv-cache-dtype"
        )
    if config.page_budget:
        raise ValueError(
            "a part of the cache can be selected where tokens read all of it, and this target's tokens read selected "
            "pages (--kv-cache-policy quest); use another method, or another policy"
        )
    hindrance = further_state(config) or ("sliding windows" if any(map(config.window_of, range(config.layers))) else "")
    if hindrance:
        raise ValueError(
            f"a part of the cache can be selected where all layers attend to the whole text, and this model "
            f"({config.architecture}) has {hindrance}"
        )


class CompactRunner(NetworkRunner):
    """A runner whose rows may lack keys and values of some tokens: a token's slot is its position minus their number.

    Raises:
        ValueError: see `check_compactible`.
    """

    def __init__(self, network: Network) -> None:
        check_compactible(network.config)
        super().__init__(network)
        self.missing: dict[int, int] = {}
        """Number of tokens of a row that have no slot."""

    @property
    def store(self) -> KVCache:
        """The cache."""
        assert isinstance(self.cache, KVCache)
        return self.cache

    def slots(self, row: int) -> int:
        """Number of slots that the tokens of a row take."""
        return self.length(row) - self.missing.get(row, 0)

    def forward(
        self, rows: Rows, tree: TokenTree, *, active: Marks = None, scored: Marks = None, hidden_layers: Layers = ()
    ) -> ModelOutput:
        """Run nodes of a tree; see `Runner.forward`."""
        active = tree.active if active is None else active
        self._reserve_active(rows, active)
        slots = [self.slots(row) for row in rows]
        return self._forward_layers(rows, tree, slots, active, scored, hidden_layers)

    def _layout(
        self, tree: TokenTree, rows: Sequence[int], length: Sequence[int], active: NodeMask
    ) -> tuple[Layout, Int[np.ndarray, "b n"]]:
        layout, index = super()._layout(tree, rows, length, active)
        missing = np.array([self.missing.get(row, 0) for row in rows], np.int32).repeat(active.sum(1))
        return replace(layout, position=layout.position + torch.from_numpy(missing)), index


def check_whole(runner: Runner) -> None:
    """Refuse a target that keeps a part of its keys and values.

    Raises:
        ValueError: it does.
    """
    if isinstance(runner.innermost, CompactRunner):
        raise ValueError(
            "this method drafts with the target's own cache, and with a KV cache policy the target keeps a part of it "
            "only; use another method"
        )


class DraftsBesideTarget(NetworkRunner):
    """A runner that drafts with what another runner, the target's, has cached."""

    _target: DecoderRunner | None = None

    def attach(self, target: Runner) -> None:
        """Draft with the cache of this runner.

        Raises:
            ValueError: it is not a runner of the own decoder, with the whole cache.
        """
        target = target.innermost
        check_whole(target)
        if not isinstance(target, DecoderRunner):
            raise ValueError(
                f"this method drafts with the target's cache, and {type(target).__name__} is not of the own decoder; "
                "use another method"
            )
        self._target = target

    @property
    def target(self) -> DecoderRunner:
        """The runner with the whole cache.

        Raises:
            ValueError: none was attached.
        """
        if self._target is None:
            raise ValueError("a drafter with the target's cache works in an engine only")
        return self._target


@torch.inference_mode()
def observe_queries(
    runner: NetworkRunner, row: int, tokens: Sequence[int], slots: int
) -> Float[torch.Tensor, "l w g q e"]:
    """Queries of the last tokens of a row, whose first `slots` slots hold its `length` tokens or what is left of them:
    times the scale of the scores, by key-value head.

    They run again, in slots after the row's tokens, which stay as they are.
    """
    network, count, c = runner.network, len(tokens), runner.network.config
    runner.cache.reserve([row], [slots + count])
    after = torch.arange(count, dtype=torch.int32)
    position = runner.length(row) - count + after
    queries = torch.zeros(c.layers, count, c.heads, c.head_dim, device=network.device)
    layout = Layout(
        row=torch.full((count,), row, dtype=torch.int32),
        slot=slots + after,
        position=position,
        visible_prefix=slots - count + after + 1,
        extra_slots=torch.zeros(count, 0, dtype=torch.int32),
        queries=queries,
    )
    network.run(runner.embed(np.array(tokens), layout), layout, runner.cache, BlockRange(0, c.layers))
    return queries.view(c.layers, count, c.kv_heads, -1, c.head_dim) * c.scale


@torch.inference_mode()
def select_slots(
    runner: NetworkRunner, row: int, policy: CachePolicy, tokens: Sequence[int], slots: int
) -> Int[np.ndarray, "l g b"]:
    """The slots, of the first `slots` of a row, that a policy keeps in every layer and key-value head, ascending.

    `tokens`: the last tokens of the row, at least as many as the policy observes, or all.
    """
    store, c = runner.cache, runner.network.config
    assert isinstance(store, KVCache)
    if slots <= policy.budget:
        return np.broadcast_to(np.arange(slots), (c.layers, c.kv_heads, slots))
    seen = tokens[max(0, len(tokens) - policy.observed) :] if policy.observed else []
    sums = runner.attention_sums.of(row, slots) if policy.accumulates and runner.attention_sums else None
    queries = observe_queries(runner, row, seen, slots) if seen else torch.zeros(c.layers, 0, c.kv_heads, 1, c.head_dim)
    which, selected = torch.tensor([row], device=store.k.device), list[torch.Tensor]()
    for layer in range(c.layers):
        # The keys' numbers do not matter to a policy without queries.
        keys = store.read_keys(layer, which, slots)[0].float() if seen else torch.zeros(c.kv_heads, slots, 0)
        selected.append(policy.select(queries[layer], keys, None if sums is None else sums[layer]))
    return torch.stack(selected).cpu().numpy()


class SparseCacheRunner(CompactRunner, DraftsBesideTarget):
    """A target that attends to a part of what another runner of it has cached: a draft of itself for long texts
    (MagicDec, arXiv 2408.11049; TriForce, arXiv 2404.11912).

    The selected keys and values are copied to a small cache, with those of every token that the target reads later;
    after `refresh` of these the selection is made anew. What this runner reads itself is never kept: `commit` forgets
    it, and `follow` takes over what the target has computed.

    Raises:
        ValueError: see `check_compactible`, or `refresh` is below 1.
    """

    def __init__(self, network: Network, policy: CachePolicy, refresh: int) -> None:
        super().__init__(network)
        if refresh < 1:
            raise ValueError(f"a selection is made anew after 1 token or more, found {refresh}")
        self.policy, self.refresh = policy, refresh
        self.selections = 0
        """Selections made so far."""

    def attach(self, target: Runner) -> None:
        """Select from the cache of this runner; see `DraftsBesideTarget.attach`."""
        super().attach(target)
        if self.policy.accumulates:
            self.target.record_attention()

    @torch.inference_mode()
    def follow(self, context: Context) -> None:
        """Take over what the target has read of all requests with a draft."""
        for row, text, depth in zip(context.rows, context.sequences, context.max_depth.tolist(), strict=True):
            if depth:
                self._follow_row(row, text.tokens[: self.target.length(row)])

    def _follow_row(self, row: int, tokens: Int[np.ndarray, " n"]) -> None:
        count, store = len(tokens), self.target.cache
        assert isinstance(store, KVCache)
        new, have = count - self.length(row), self.slots(row)
        if new < 0 or not have or have + new > self.policy.budget + self.refresh:
            seen = tokens[max(0, count - self.policy.observed) :].tolist()
            slots = select_slots(self.target, row, self.policy, seen, count)
            self.selections += 1
            self.truncate(row, 0)
            have = 0
        else:
            c = self.network.config
            slots = np.broadcast_to(np.arange(count - new, count), (c.layers, c.kv_heads, new))
        self._length += [0] * (row + 1 - len(self._length))
        self.cache.reserve([row], [have + slots.shape[2]])
        self.store.copy_slots(store, row, slots, row, have)
        self._length[row] = count
        self.missing[row] = count - have - slots.shape[2]

    def commit(self, row: int, path: Sequence[int]) -> None:
        """Keep nothing: the target's own keys and values come with `follow`."""

    def truncate(self, row: int, length: int) -> None:
        """Forget the row, unless it keeps all its tokens: the next draft selects anew."""
        if row < len(self._length) and length < self._length[row]:
            self.missing.pop(row, None)
            self._length[row] = 0
            self.cache.truncate(row, 0)

    def restorable(self, row: int, length: int) -> int:
        """All of a row's tokens, or none."""
        return length if length == self.length(row) else 0
