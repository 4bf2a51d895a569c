"""Foretell's retrieval in vLLM: a proposer for vLLM's speculative method `custom_class`.

    vllm serve MODEL --additional-config '{"foretell": {"method": "sam_recycling"}}' --speculative-config \
        '{"method": "custom_class", "model": "foretell_vllm.ForetellProposer", "num_speculative_tokens": 8}'

vLLM calls the proposer after every pass, in its model runner V1, and verifies the drafts, so texts stay its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch

from foretell.catalogue.other_engines import context_of_texts, free_row, output_without_logits, retrieval_method
from foretell.core.context import Context, StepResult, TokenBuffer
from foretell.core.tree import TokenTree
from foretell.draft.base import Continuation, Retriever
from foretell.engine.budget import Budget
from foretell.engine.draft_account import DraftAccount
from foretell.engine.groups import MethodGroups
from foretell.engine.method import BoundMethod
from foretell.engine.statistics import StepTime
from foretell.engine.step_costs import StepLoad
from foretell.shape.base import Shape
from foretell.shape.trie import trie_from_prefixes

__all__ = ["BestChain", "ForetellProposer"]


@dataclass(frozen=True)
class BestChain(Shape[Retriever]):
    """Of all continuations the one with the most expected accepted tokens, up to `length` of them."""

    label = "chain"

    length: int
    elastic: bool = True

    drafter_type = Retriever

    def grow(self, draft: Retriever, context: Context) -> TokenTree:
        """A chain for each request."""
        chains = list[list[tuple[tuple[int, ...], float]]]()
        retrieved = draft.retrieve(context, self.length)
        for continuations, depth in zip(retrieved, context.max_depth.tolist(), strict=True):
            best = max(continuations, key=lambda c: sum(c.cumulative_acceptance[:depth]), default=Continuation((), ()))
            chances = [p for p in best.cumulative_acceptance[:depth] if p >= context.least_score]
            chains.append([(best.tokens[: n + 1], chance) for n, chance in enumerate(chances)])
        return trie_from_prefixes(context.last_tokens, chains)


@dataclass(eq=False)
class _Request:
    """A request of vLLM's batch, known by its tokens."""

    row: int
    text: TokenBuffer
    account: DraftAccount = field(default_factory=DraftAccount)
    draft: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Step:
    """Drafts that vLLM verifies now."""

    requests: list[_Request]
    groups: MethodGroups
    context: Context
    tree: TokenTree
    drafting: float
    ended: float


class ForetellProposer:
    """Drafts chains by a retrieval method of the catalogue; Foretell's budget chooses how long they are.

    Reads `additional_config["foretell"]`: `method` (default: suffix matches and recycled tokens), `references` (text
    files), and the options of the method.

    Raises:
        ValueError: the method needs parts of the target or is unknown, or an option is.
    """

    def __init__(self, vllm_config: Any) -> None:
        model, drafts = vllm_config.model_config, vllm_config.speculative_config
        options = dict((vllm_config.additional_config or {}).get("foretell") or {})
        self.length, self._vocab, self._longest = (
            drafts.num_speculative_tokens, model.get_vocab_size(), model.max_model_len,
        )  # fmt: skip
        method = retrieval_method(options, self._vocab, model.tokenizer)
        self._bound, self._budget = BoundMethod(replace(method, tree=BestChain(self.length))), Budget()
        self._bound.bind()
        self._requests = list[_Request]()
        self._logits: torch.Tensor | None = None
        self._step: _Step | None = None

    def load_model(self, target: torch.nn.Module) -> None:
        """Keep the logits of every pass, which recycling reads."""
        processor = getattr(target, "logits_processor", None)
        if isinstance(processor, torch.nn.Module):
            processor.register_forward_hook(self._keep)

    def _keep(self, module: torch.nn.Module, inputs: object, logits: torch.Tensor) -> None:
        self._logits = logits

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Drafts for every request of the batch, after its new tokens `sampled_token_ids` (none: its prompt is being
        read); `token_ids_cpu[i, : num_tokens_no_spec[i]]` are all its tokens.
        """
        begun, drafts = perf_counter(), [list[int]() for _ in sampled_token_ids]
        known, batch = list(self._requests), dict[int, _Request]()
        for i, new in enumerate(sampled_token_ids):
            if len(new):
                tokens = token_ids_cpu[i, : int(num_tokens_no_spec[i])]
                batch[i] = self._request(known, tokens, len(new), batch.values())
        self._learn(batch, sampled_token_ids, begun, whole=not known and len(batch) == len(drafts))
        for gone in known:
            self._bound.release(gone.row)
        self._requests, self._logits, self._step = list(batch.values()), None, None
        if batch:
            self._draft(begun)
        for i, request in batch.items():
            drafts[i] = list(request.draft)
        return drafts

    def _request(self, known: list[_Request], tokens: np.ndarray, new: int, others: Iterable[_Request]) -> _Request:
        """The request with these tokens, of which the last are `new`: the first of the `known`, which it leaves, that
        has those before; else a new one in a row that no other has.
        """
        before = tokens[: len(tokens) - new]
        for place, request in enumerate(known):
            text = request.text
            if text.length == len(before) and (text.tokens == before).all():
                text.append(tokens[len(before) :].tolist())
                return known.pop(place)
        return _Request(free_row({r.row for r in (*self._requests, *others)}), TokenBuffer(tokens.tolist()))

    def _learn(
        self, batch: Mapping[int, _Request], sampled: Sequence[Sequence[int]], begun: float, whole: bool
    ) -> None:
        """Learn from the last step; `whole`: the pass read its requests and nothing else."""
        step, new, first, rows = self._step, dict[_Request, tuple[int, ...]](), dict[_Request, int](), 0
        if step is None:
            return
        for i, decided in enumerate(sampled):
            drafted = 0
            if (request := batch.get(i)) in step.requests and request is not None:
                new[request], first[request], drafted = tuple(map(int, decided)), rows, len(request.draft)
            rows += 1 + drafted
        if not new:
            return
        # vLLM's scheduler may have cut drafts; then the rows of logits are not where they are expected.
        output, tokens = output_without_logits(step.tree, self._vocab), [new.get(r, ()) for r in step.requests]
        if self._logits is not None and len(self._logits) == rows:
            pairs = np.array([(first.get(r, -1), len(r.draft)) for r in step.requests])
            begins, counts, nodes = pairs[:, :1], pairs[:, 1:], np.arange(step.tree.token.shape[1])
            rows_of = np.where((begins >= 0) & (nodes <= counts), begins + nodes, -1)
            output = replace(output, logits=self._logits, logit_index=rows_of)
        result = StepResult(
            step.context,
            step.tree,
            output,
            paths=tuple(tuple(range(max(1, len(decided)))) for decided in tokens),
            new_tokens=tuple(tokens),
            start_positions=tuple(r.text.length - len(t) - 1 for r, t in zip(step.requests, tokens, strict=True)),
        )
        (group,) = step.groups.groups
        stay = [n for n, request in enumerate(step.requests) if request in new]
        self._bound.method.observe(step.groups.result_of(group, result.select(stay)))
        if whole and len(stay) == len(step.requests):
            self._budget.observe(result, StepTime(step.drafting, 0.0, begun - step.ended + step.drafting), False)

    def _draft(self, begun: float) -> None:
        """Draft for all requests."""
        requests, count = self._requests, len(self._requests)
        depth = [max(0, min(self.length, self._longest - r.text.length - 1)) for r in requests]
        context = context_of_texts([r.row for r in requests], [r.text for r in requests], depth)
        self._budget.begin(
            StepLoad(
                tokens=count,
                is_decode=True,
                weights=[1.0] * count,
                room=depth,
                left=[most + 1 for most in depth],
                sampled=[False] * count,
                accounts=[r.account for r in requests],
                context=sum(r.text.length for r in requests) / count,
            )
        )
        groups = MethodGroups([self._bound] * count, self._vocab, self._budget)
        tree = groups.propose(context, [[token] for token in context.last_tokens], [True] * count)
        for request, tokens, valid in zip(requests, tree.token.tolist(), tree.valid.tolist(), strict=True):
            request.draft = tuple(token for token, drafted in zip(tokens[1:], valid[1:], strict=True) if drafted)
        ended = perf_counter()
        self._step = _Step(requests, groups, context, tree, ended - begun, ended)
