"""What a step takes from its requests, and what it gives them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from foretell.accept import AcceptResult
from foretell.core.context import Context, ModelOutput, StepResult
from foretell.core.draft_origins import DraftOrigins
from foretell.core.tree import NodeMask, TokenTree
from foretell.engine.groups import MethodGroups
from foretell.engine.live_request import LiveRequest
from foretell.engine.logprobs import TokenLogprobs, new_token_logprobs, prompt_token_logprobs
from foretell.engine.provenance import describe_pass
from foretell.engine.repetition import REPETITION, REPETITION_DETECTED
from foretell.engine.request import Update
from foretell.engine.statistics import StepTime
from foretell.model.kernels.structures import Sampling
from foretell.model.run.runner import Runner

_NO_SAMPLING = Sampling()


@dataclass(frozen=True)
class VerifiedPass:
    """A pass of the target over a step's drafts, before anything is committed. Times are the engine's clock's."""

    context: Context
    starts: tuple[int, ...]
    """Tokens of each request in the cache before the pass."""
    groups: MethodGroups
    tree: TokenTree
    output: ModelOutput
    results: list[AcceptResult | None]
    """None: the request's prompt is being read."""
    started: float
    drafted: float
    verified: float

    def step_result(self, paths: tuple[tuple[int, ...], ...], new_tokens: tuple[tuple[int, ...], ...]) -> StepResult:
        """The step, once the kept `paths` and `new_tokens` of the requests have been committed."""
        groups = self.groups.groups
        # Of a single method this is its step; parts of it are made for several.
        asked = self.groups.asked(groups[0]) if len(groups) == 1 else ()
        return StepResult(self.context, self.tree, self.output, paths, new_tokens, self.starts, *asked)


def context_of(running: Collection[LiveRequest]) -> Context:
    """What the parts of a method see of the requests of a step."""
    limits, salts = [r.request.max_drafts for r in running], [r.request.cache_salt for r in running]
    return Context(
        rows=tuple(r.row for r in running),
        sequences=tuple(r.sequence for r in running),
        sampling_params=tuple(r.request.sampling_params for r in running),
        rngs=tuple(r.rng for r in running),
        max_depth=np.array([r.remaining_tokens - 1 for r in running]),
        rules=tuple(r.rules for r in running) if any(r.rules is not None for r in running) else (),
        max_drafts=tuple(limits) if limits.count(None) < len(limits) else (),
        origins=DraftOrigins(asking) if (asking := [r.row for r in running if r.request.return_drafts]) else None,
        cache_salts=tuple(salts) if any(salts) else (),
    )


def nodes_to_score(tree: TokenTree, ready: Sequence[bool], whole: Sequence[bool]) -> NodeMask:
    """Nodes whose logits are needed: those from the root on, of requests that are ready to decode, and all of the
    requests marked in `whole`.
    """
    if tree.is_decode and all(ready):
        return tree.scored
    first = np.where(whole, 0, np.where(ready, tree.prefix_length - 1, tree.nodes))
    return tree.scored & (np.arange(tree.nodes) >= first[:, None])


def sampling_in_pass(running: Collection[LiveRequest], ready: Sequence[bool]) -> list[Sampling]:
    """How the pass samples for requests that are ready to decode; empty: for none of them."""
    if not any(r.sampling for r in running):
        return []
    return [r.sampling if r.sampling and yes else _NO_SAMPLING for r, yes in zip(running, ready, strict=True)]


def commit(
    runner: Runner, scheduled: Collection[LiveRequest], tree: TokenTree, results: Sequence[AcceptResult | None]
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Append the new tokens to the sequences, and keep the keys and values of prefixes and accepted drafts.

    Returns the kept paths and the new tokens.
    """
    paths, new_tokens = [], []
    decided = zip(scheduled, results, tree.prefix_length.tolist(), tree.token.tolist(), strict=True)
    for r, result, prefix_length, drafted in decided:
        path, tokens = list(range(prefix_length)), list[int]()
        if result is not None:
            path += result.path
            tokens = [*(drafted[node] for node in result.path), result.token]
            tokens = r.until_end(tokens[: r.remaining_tokens])
        if tokens:
            r.sequence.append(tokens)
        runner.commit(r.row, path)
        paths.append(tuple(path))
        new_tokens.append(tuple(tokens))
    return tuple(paths), tuple(new_tokens)


def make_update(r: LiveRequest, result: AcceptResult | None, step: StepResult, i: int, time: StepTime) -> Update | None:
    """Count the step for a request and make its update; None while its prompt is being read.

    Tokens after a stop string do not count.
    """
    r.count_prediction()
    ended = result is not None and r.has_ended()
    new = r.text.push(step.new_tokens[i], hidden=int(ended and not r.shows_end))
    prefix_length, tokens, statistics = int(step.tree.prefix_length[i]), step.new_tokens[i][: new.count], r.statistics
    accepted = None if result is None else min(len(result.path), len(tokens))
    drafted = step.num_drafted(i)
    statistics.add(time, prefix_length, drafted, accepted, len(tokens))
    if r.request.prompt_logprobs is not None and step.start_positions[i] == len(r.prompt_logprobs.logprobs):
        r.prompt_logprobs += prompt_token_logprobs(step, i, r.request.prompt_logprobs)
    if result is None or accepted is None:
        return None
    if prefix_length == 1:
        statistics.experts_read += sum(step.output.experts)
        statistics.moe_layers_read += len(step.output.experts)
    for token_fidelity in result.fidelity[: len(tokens)]:
        statistics.fidelity.add(token_fidelity)
    asked, logprobs, prompt = r.request.logprobs, TokenLogprobs(), TokenLogprobs()
    if asked is not None and asked is not False:
        most, wanted = 0 if asked is True else asked, r.request.logprob_token_ids
        logprobs = new_token_logprobs(step, i, len(tokens), most, wanted)
    if statistics.new_tokens == len(tokens):
        prompt = r.prompt_logprobs
    text, stop = new.text, new.stop
    reason = "stop" if stop is not None or ended else r.reason_to_end
    if reason is not None and stop is None:
        rest = r.text.finish()
        text, stop, reason = text + rest.text, rest.stop, "stop" if rest.stop is not None else reason
    by_token = reason == "stop" and stop is None and tokens[-1] in r.request.stop_token_ids
    return Update(
        r.number,
        tokens,
        text,
        accepted=accepted,
        logprobs=logprobs.logprobs,
        top_logprobs=logprobs.top,
        prompt_logprobs=prompt.logprobs,
        prompt_top_logprobs=prompt.top,
        finish_reason=reason,
        stop_reason=REPETITION_DETECTED if reason == REPETITION else tokens[-1] if by_token else stop,
        drafted=drafted,
        passes=(describe_pass(step, i, tokens, r.method.method.draft.origin, time),) if r.request.return_drafts else (),
    )
