"""The engine: one loop for all methods and batch sizes, for prefill and decoding."""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from weakref import WeakValueDictionary

from foretell.accept import Match
from foretell.core.context import StepResult
from foretell.distributions.processed import ProcessedDistributions
from foretell.draft.base import NoDrafter
from foretell.engine.budget import Budget
from foretell.engine.groups import DraftError, MethodGroups
from foretell.engine.live_request import LiveRequest
from foretell.engine.method import AnyMethod, BoundMethod, Method
from foretell.engine.prompt_chunks import PromptChunks
from foretell.engine.request import Completion, Request, Update, complete, validate_request
from foretell.engine.rows import RowPool
from foretell.engine.scheduler import Scheduler
from foretell.engine.statistics import RequestStatistics, StepCounts, StepTime
from foretell.engine.step import VerifiedPass, commit, context_of, make_update, nodes_to_score, sampling_in_pass
from foretell.engine.step_costs import StepLoad
from foretell.engine.tuning import NEAR_STEPS
from foretell.model.cache.block_table import OutOfBlocksError
from foretell.model.run.runner import (
    Adapts,
    LimitsCache,
    ReadsImages,
    Runner,
    SamplesTokens,
    free_tokens,
    offered,
    required,
)
from foretell.shape.base import RootOnly
from foretell.tokenizer.stream import Detokenizer
from foretell.utils.inference import in_inference_mode
from foretell.utils.names import unknown

_log = logging.getLogger(__name__)
_PLAIN: AnyMethod = Method(NoDrafter(), RootOnly(), Match())
"""Decodes the requests that allow no drafts."""


class Engine:
    """Runs requests by continuous batching and chunked prefill; `method` decodes those that name no method.

    `rows`: maximum number of requests per batch; `chunk`: maximum number of prompt tokens per step; `detokenizer` makes
    the incremental detokenizer of a request (None: tokens only, no stop strings); it is called with
    `skip_special_tokens=False` where a request shows special tokens. `prefix_caching`: a request reuses
    the longest prefix of its prompt that the cache holds of a finished or running request; a prompt that begins as one
    that is being read waits for it. `cache_bytes`: greatest size of the target's key-value cache (None: any); where it
    is full, the oldest ended requests are forgotten, then the least urgent running request waits and reads its tokens
    again later. `budget` chooses the drafts of every step by expected tokens per second (None: of methods with an
    elastic shape alone; others draft in full). `itl_target`: seconds between two tokens of an answer that chunks of
    prompts leave room for (None: chunks are always as large as `chunk`). `clock` gives seconds.

    A request whose step raises an exception ends with `finish_reason` `error`; the others go on.

    Raises:
        ValueError: `rows` or `chunk` below 1, `itl_target` not above 0, or the method is bound to another engine that
            is busy.
    """

    def __init__(
        self,
        runner: Runner,
        method: AnyMethod,
        rows: int = 16,
        chunk: int = 512,
        detokenizer: Callable[..., Detokenizer] | None = None,
        prefix_caching: bool = False,
        cache_bytes: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        budget: Budget | None = None,
        itl_target: float | None = None,
    ) -> None:
        if rows < 1 or chunk < 1:
            raise ValueError(f"an engine needs rows and chunk of at least 1, found {rows} and {chunk}")
        self.runner, self.method = runner, method
        self._detokenizer, self._clock = detokenizer, clock
        self.budget = Budget(every_method=False) if budget is None else budget
        if cache_bytes is not None:
            required(runner, LimitsCache, "cache_bytes limits the key-value cache").limit_cache(cache_bytes)
        self._cache_tokens = free_tokens(runner) or rows * runner.context
        """Tokens that the cache has room for."""
        pool, chunks = RowPool(runner, rows, prefix_caching), PromptChunks(chunk, itl_target)
        self._scheduler = Scheduler(runner, pool, chunks, self._clock)
        self._undelivered: deque[Update] = deque()
        self._last_number = 0
        self._failed_methods = set[BoundMethod]()
        """Methods whose requests the next step runs one by one to find the one that fails: their drafters failed."""
        self.last_step = StepTime(0.0, 0.0, 0.0)
        """Times of the last step that ran."""
        self._ended = clock()
        """When the last step had learned what it gave."""
        self._methods: WeakValueDictionary[int, BoundMethod] = WeakValueDictionary()
        """The methods of requests and of rows that keep their tokens, by id of the method."""
        self._bind(method)

    def submit(self, request: Request) -> int:
        """Queue a request; its number.

        Raises:
            ValueError: a field has a wrong type or is out of range, the prompt is empty or fills the model's context,
                a token is outside the vocabulary, or the method, or a part of it, is bound to another engine or method
                by now that is busy.
        """
        validate_request(request, self.runner.vocab, self.runner.context)
        adapts = offered(self.runner, Adapts)
        if request.adapter and (adapts is None or request.adapter not in adapts.adapters):
            raise unknown("adapter", request.adapter, () if adapts is None else adapts.adapters)
        if request.images is not None:
            required(self.runner, ReadsImages, "the prompt has images")
        if request.stop and self._detokenizer is None:
            raise ValueError("stop strings need a tokenizer: this engine works on tokens only")
        method = self._bind(_PLAIN if request.max_drafts == 0 else request.method or self.method)
        detokenizer = self._new_detokenizer(request)
        live = LiveRequest(self._last_number + 1, request, method, detokenizer, self.runner.context)
        method.requests += 1
        self._last_number += 1
        live.submitted_at = self._clock()
        self._scheduler.add(live)
        return self._last_number

    def _bind(self, method: AnyMethod) -> BoundMethod:
        """The method in this engine, its parts claimed."""
        is_new = id(method) not in self._methods
        bound = self._methods.setdefault(id(method), BoundMethod(method))
        changed = bound.bind()
        if changed or is_new:
            method.draft.attach(self.runner)
        if changed:
            for row in self._scheduler.rows.free:
                bound.release(row)
        return bound

    def cancel(self, number: int) -> Update | None:
        """End a request now; its last update, with the text held back and what `run` has not delivered yet, or None if
        the request was over.
        """
        r = self._scheduler.find(number)
        if r is None:
            return None
        pending = [u for u in self._undelivered if u.request == number]
        self._undelivered = deque(u for u in self._undelivered if u.request != number)
        pending.append(Update(number, (), r.text.finish().text, 0, finish_reason="cancelled"))
        return self._finish(r, Update.join(pending))

    def pause(self, number: int) -> None:
        """Set a request aside until `resume`: it gets no tokens, and others may use its row. Its tokens stay in the
        cache as those of an ended request do. Nothing happens if the request is over or paused.
        """
        self._scheduler.pause(number)

    def resume(self, number: int) -> None:
        """Let a paused request go on; it waits for a row as a new one does. Nothing happens to others."""
        self._scheduler.resume(number)

    def row(self, number: int) -> int | None:
        """The row of the cache that a running request has; None: it does not run."""
        r = self._scheduler.find_running(number)
        return None if r is None else r.row

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running; paused ones do not count."""
        return any(self.load)

    @property
    def cache_bytes(self) -> int:
        """Memory of the key-value cache; 0: unknown."""
        cache = offered(self.runner, LimitsCache)
        return 0 if cache is None else cache.cache_bytes

    @property
    def cache_usage(self) -> float:
        """Share of the cache that the tokens of running requests fill; tokens that several share count for each. Any
        thread may ask.
        """
        return min(1.0, self._scheduler.cached_tokens / self._cache_tokens)

    @property
    def unowned_rows(self) -> int:
        """Rows of the cache that hold tokens of no request, running or kept: there must be none. Any thread may ask."""
        return self._scheduler.rows.unowned

    @property
    def load(self) -> tuple[int, int]:
        """Numbers of running and of waiting requests; any thread may ask."""
        return self._scheduler.load

    @property
    def preemptions(self) -> int:
        """How often a request had to wait because the cache was full."""
        return self._scheduler.preemptions

    def request_progress(self, number: int) -> tuple[int, int]:
        """Tokens of a request's prompt that are in the cache, and those of them that were found there; zeros before it
        runs and after its end. Any thread may ask.
        """
        r = self._scheduler.find_running(number)
        if r is None or (row := r.row) < 0:
            return 0, 0
        return min(self.runner.length(row), len(r.request.prompt)), r.statistics.cached_tokens

    @property
    def statistics(self) -> Mapping[int, RequestStatistics]:
        """Statistics of the waiting, paused and running requests by number; those of a finished request are in its last
        update.
        """
        return {r.number: r.statistics for r in self._scheduler}

    def run(self) -> Iterator[Update]:
        """Run steps until every request is over or paused. Requests may be submitted, cancelled and paused between
        updates.
        """
        while self._undelivered or self.busy:
            if not self._undelivered:
                self._undelivered.extend(self.step())
            if self._undelivered:
                yield self._undelivered.popleft()

    def complete(
        self,
        requests: Sequence[Request],
        on_update: Callable[[Update], None] | None = None,
        raise_errors: bool = True,
    ) -> list[Completion]:
        """Submit requests and run until all are over; their completions in the same order.

        `on_update` is called with every update.

        Raises:
            ValueError: the engine is busy, or a request is invalid; then none is run. Exception: the one that ended a
                request, once all are over; with `raise_errors` False it is in the request's completion instead.
        """
        if self.busy:
            raise ValueError("the engine is busy with other requests: wait until they are over")
        completions = complete(self, requests, on_update)
        error = next((c.error for c in completions if c.error is not None), None)
        if error is not None and raise_errors:
            raise error
        return completions

    @property
    def prompt_progress(self) -> tuple[int, int]:
        """Tokens read, and all tokens, of the prompts that wait or are being read; equal: there are none."""
        return self._scheduler.prompt_progress

    @in_inference_mode
    def step(self) -> list[Update]:
        """One pass of the target over all requests. If a drafter fails, the requests of its method get a pass each, so
        that only those that fail end; if the pass fails, all requests do.
        """
        self._scheduler.admit()
        failed, self._failed_methods = self._failed_methods, set()
        while True:
            try:
                return self._run_scheduled(self._scheduler.schedule(), failed)
            except OutOfBlocksError as error:
                if not self._scheduler.free_memory():
                    # The request is alone: its text is longer than the whole cache.
                    too_long = ValueError(
                        f"{error}; ask for a shorter text, or give the cache more memory (--kv-cache-memory-bytes)"
                    )
                    return [self._finish_with_error(r, too_long) for r in list(self._scheduler.running)]

    def _run_scheduled(self, scheduled: dict[LiveRequest, list[int]], failed: Collection[BoundMethod]) -> list[Update]:
        """Run the requests together, and those of methods that failed one by one.

        Raises:
            OutOfBlocksError: the cache is full; no request has got anything.
        """
        together = {r: tokens for r, tokens in scheduled.items() if r.method not in failed} if failed else scheduled
        updates = list[Update]()
        while len(together) > 1:
            try:
                updates = self._run_step(together)
                break
            except DraftError as error:
                together = {r: tokens for r, tokens in together.items() if r.method is not error.method}
            except OutOfBlocksError:
                raise
            except Exception:
                _log.warning("a pass over %d requests failed: each gets one of its own", len(together), exc_info=True)
                together = {}
        else:
            together = {}
        for r, tokens in scheduled.items():
            if r not in together:
                try:
                    updates += self._step_single(r, tokens)
                except OutOfBlocksError:
                    if not updates:
                        raise
        return updates

    def _step_single(self, r: LiveRequest, tokens: list[int]) -> list[Update]:
        try:
            return self._run_step({r: tokens})
        except OutOfBlocksError:
            raise
        except Exception as error:
            return [self._finish_with_error(r, error)]

    def _run_step(self, scheduled: dict[LiveRequest, list[int]]) -> list[Update]:
        """Propose, forward, accept; then commit, observe, emit updates.

        An exception is raised only before anything is committed, so that the call may be repeated. A later one ends the
        requests: some have new tokens already, which another call would leave out of their updates.
        """
        verified = self._verify(scheduled)
        try:
            return self._conclude(scheduled, verified)
        except Exception as error:
            live = [r for r in scheduled if self._scheduler.find(r.number) is r]
            return [self._finish_with_error(r, error) for r in live]

    def _verify(self, scheduled: dict[LiveRequest, list[int]]) -> VerifiedPass:
        """Draft, read the drafts by the target, and accept; nothing is committed."""
        started = self._clock()
        context, starts = context_of(scheduled), tuple(self.runner.length(r.row) for r in scheduled)
        groups = MethodGroups(
            [r.method for r in scheduled],
            self.runner.vocab,
            budget=self.budget,
            predictions=[r.prediction for r in scheduled],
        )
        ready = [n + len(t) == r.sequence.length for n, (r, t) in zip(starts, scheduled.items(), strict=True)]
        self.budget.begin(self._load(scheduled, ready))
        tree = groups.propose(context, list(scheduled.values()), ready)
        drafted = self._clock()
        whole = [r.reads_prompt_logprobs for r in scheduled]
        sampling = sampling_in_pass(scheduled, ready)
        if sampling and (sampler := offered(self.runner, SamplesTokens)):
            sampler.sample_next(sampling)
        output = self.runner.forward(
            context.rows, tree, scored=nodes_to_score(tree, ready, whole), hidden_layers=groups.hidden_layers
        )
        verified = self._clock()
        logits, index = output.logits, output.logit_index
        distributions = ProcessedDistributions(
            context, tree, logits, index, output.argmax, context.rules, output.sampled
        )
        reads = [r.method.method.accept.reads if yes else None for r, yes in zip(scheduled, ready, strict=True)]
        distributions = distributions.on_host(reads)
        results = [
            r.method.method.accept.accept(distributions.tree, i, distributions) if yes else None
            for i, (r, yes) in enumerate(zip(scheduled, ready, strict=True))
        ]
        return VerifiedPass(context, starts, groups, tree, output, results, started, drafted, verified)

    def _conclude(self, scheduled: dict[LiveRequest, list[int]], verified: VerifiedPass) -> list[Update]:
        """Commit a pass, learn from it, and tell each request what it has got."""
        results, started = verified.results, verified.started
        paths, new_tokens = commit(self.runner, scheduled, verified.tree, results)
        committed = self._clock()
        step = verified.step_result(paths, new_tokens)
        failures = self._observe(verified.groups, step)
        ended = self._clock()
        self.last_step = step_time = StepTime(
            verified.drafted - started + ended - committed,
            verified.verified - verified.drafted,
            ended - started,
            committed - verified.verified,
            StepCounts.of(step),
            started - self._ended,
        )
        self._scheduler.observe(scheduled, step_time)
        self._ended = ended
        self.budget.observe(step, step_time, shared=len(verified.groups.groups) > 1)
        updates = list[Update]()
        for i, (r, result) in enumerate(zip(scheduled, results, strict=True)):
            try:
                update = make_update(r, result, step, i, step_time)
            except Exception as error:
                updates.append(self._finish_with_error(r, error))
                continue
            if i in failures and (update is None or update.finish_reason is None):
                updates += [] if update is None else [update]
                updates.append(self._finish_with_error(r, failures[i]))
            elif update is not None:
                updates.append(update if update.finish_reason is None else self._finish(r, update))
        return updates

    def _new_detokenizer(self, request: Request) -> Detokenizer | None:
        if self._detokenizer is None:
            return None
        hidden = request.skip_special_tokens
        detokenizer = self._detokenizer() if hidden else self._detokenizer(skip_special_tokens=False)
        detokenizer.follow(request.prompt)
        return detokenizer

    def _load(self, scheduled: Mapping[LiveRequest, list[int]], ready: Sequence[bool]) -> StepLoad:
        """What the step reads before any draft."""
        soon, sizes = self._clock() + NEAR_STEPS * self.last_step.total, [len(t) for t in scheduled.values()]
        return StepLoad(
            tokens=sum(sizes),
            is_decode=max(sizes) == 1,
            weights=[r.weight(soon) if yes else 0.0 for r, yes in zip(scheduled, ready, strict=True)],
            room=[r.room for r in scheduled],
            left=[r.remaining_tokens for r in scheduled],
            sampled=[r.request.sampling_params.temperature > 0 for r in scheduled],
            accounts=[r.account for r in scheduled],
            context=sum(r.sequence.length for r in scheduled) / len(sizes),
            crowd=sum(self.load) - 1,
        )

    def _observe(self, groups: MethodGroups, step: StepResult) -> dict[int, Exception]:
        """Update the drafters and shapes of all methods; the exceptions of those that fail for a single request, by the
        request's index in the step.

        If one with several requests fails, all their rows are released, since the drafter's state is unknown, and the
        next step runs them one by one.
        """
        failures = dict[int, Exception]()
        for group in groups.groups:
            try:
                part = groups.result_of(group, step)
                group.method.observe(part)
                if group.method.check is not None and not self.budget.governs(group.bound):
                    group.method.check.observe(part)
            except Exception as error:
                if len(group.indices) == 1:
                    failures[group.indices[0]] = error
                    continue
                for i in group.indices:
                    group.method.release(step.context.rows[i])
                self._failed_methods.add(group.bound)
        return failures

    def _finish_with_error(self, r: LiveRequest, error: Exception) -> Update:
        """End a request with an error and the text held back."""
        text = ""
        with suppress(Exception):
            text = r.text.finish().text
        return self._finish(r, Update(r.number, (), text, 0, finish_reason="error", error=error))

    def _finish(self, r: LiveRequest, update: Update) -> Update:
        r.method.requests -= 1
        self._scheduler.remove(r, keep=update.error is None)
        return replace(update, statistics=r.statistics)
