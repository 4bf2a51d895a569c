"""The engine: one loop for every method, every batch size, prompts and answers alike."""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Bool, Int

from foretell.accept.base import AcceptResult
from foretell.core.context import Context, StepResult, TokenBuffer
from foretell.core.sampling import CounterRNG, SamplingParams, whole
from foretell.core.tree import TokenTree, concatenate_trees, root_tree
from foretell.distributions.processed import ProcessedDistributions
from foretell.engine.method import AnyMethod
from foretell.engine.statistics import RequestStatistics, StepTime
from foretell.model.runner import Runner
from foretell.tokenizer.stream import Detokenizer, StopStrings


@dataclass(frozen=True)
class Request:
    """One prompt and what is wanted of it."""

    prompt: Sequence[int]
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    eos: tuple[int, ...] = ()
    logprobs: bool = False
    """Report the natural logarithm of every token's probability under the model's own softmax."""


@dataclass(frozen=True)
class Update:
    """What one step gave one request."""

    request: int
    tokens: tuple[int, ...]
    text: str
    accepted: int
    """How many of `tokens`, counted from the front, were drafted."""
    logprobs: tuple[float, ...] = ()
    finish_reason: str | None = None
    """`stop` (end of sequence or stop string), `length`, `cancelled`, `error`; None: it goes on."""
    error: Exception | None = None
    """What ended the request, where `finish_reason` is `error`."""
    statistics: RequestStatistics | None = None
    """What the request cost, in its last update."""


@dataclass(frozen=True)
class Completion:
    """What a request got in all."""

    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    finish_reason: str
    error: Exception | None
    statistics: RequestStatistics

    @staticmethod
    def of(updates: Sequence[Update]) -> "Completion":
        """From all updates of a request.

        Raises:
            ValueError: the last update is not among them.
        """
        last = updates[-1] if updates else None
        if last is None or last.finish_reason is None or last.statistics is None:
            raise ValueError("the request is not over: its last update is missing")
        return Completion(
            tokens=tuple(t for u in updates for t in u.tokens),
            text="".join(u.text for u in updates),
            logprobs=tuple(p for u in updates for p in u.logprobs),
            finish_reason=last.finish_reason,
            error=last.error,
            statistics=last.statistics,
        )


class _Running:
    """A request that holds a row."""

    def __init__(self, number: int, request: Request, row: int, detokenizer: Detokenizer | None, context: int) -> None:
        self.number, self.request, self.row = number, request, row
        self.statistics = RequestStatistics(prompt_tokens=len(request.prompt))
        self.text = TokenBuffer(request.prompt)
        self.noise = CounterRNG(request.sampling_params.seed)
        self.detokenizer = detokenizer
        self.stops = StopStrings(request.stop)
        self.limit = min(request.max_new_tokens, context - len(request.prompt))

    @property
    def wanted(self) -> int:
        """New tokens it may still get."""
        return self.limit - len(self.text.generated)

    def write(self, tokens: Sequence[int]) -> tuple[int, str, bool]:
        """Turn new tokens into text: how many of them count, the text that may be shown, and whether a stop string
        ended it.
        """
        if self.detokenizer is None:
            return len(tokens), "", False
        if not self.request.stop:
            return len(tokens), self.detokenizer.push(tokens), False
        shown = ""
        for count, token in enumerate(tokens, 1):
            text, stopped = self.stops.push(self.detokenizer.push([token]))
            shown += text
            if stopped:
                return count, shown, True
        return len(tokens), shown, False

    def flush(self) -> tuple[str, bool]:
        """The text held back so far, and whether a stop string ended it after all."""
        if self.detokenizer is None:
            return "", False
        text, stopped = self.stops.push(self.detokenizer.finish())
        return (text if stopped else text + self.stops.finish()), stopped


class Engine:
    """Runs requests of unequal length with one method; they join and leave at any step.

    `rows`: most requests decoded together; `chunk`: most prompt tokens read in a step; `detokenizer` makes the
    incremental decoder of a request (None: tokens only, no stop strings). `prefix_caching`: a request goes on from the
    longest prefix of its prompt that the cache of a finished request still holds. `clock` gives seconds.

    A request whose step fails ends with `finish_reason` `error`; the others go on.

    Raises:
        ValueError: no rows, chunks of no tokens, or the method serves another engine that is busy.
    """

    def __init__(
        self,
        runner: Runner,
        method: AnyMethod,
        rows: int = 16,
        chunk: int = 512,
        detokenizer: Callable[[], Detokenizer] | None = None,
        prefix_caching: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if rows < 1 or chunk < 1:
            raise ValueError(f"an engine needs rows and chunk of at least 1, found {rows} and {chunk}")
        self.runner, self.method = runner, method
        self._chunk, self._detokenizer, self._clock = chunk, detokenizer, clock
        self._free = list(range(rows))[::-1]
        self._prefix_caching, self._cached = prefix_caching, dict[int, TokenBuffer]()
        """Texts of finished requests whose rows hold their keys and values still, oldest first."""
        self._queue: deque[tuple[int, Request]] = deque()
        self._running: list[_Running] = []
        self._undelivered: deque[Update] = deque()
        self._count = 0
        self._one_by_one = False
        """The drafter failed in the last step: step requests one by one, to see whose it was."""
        self._claim()

    def submit(self, request: Request) -> int:
        """Queue a request; its number.

        Raises:
            ValueError: a field of a wrong type or out of range, an empty prompt, one that leaves no room in the model's
                context, a token outside the
                vocabulary; or the method serves another engine by now.
        """
        check(request, self.runner.vocab, self.runner.context)
        if request.stop and self._detokenizer is None:
            raise ValueError("stop strings need a tokenizer: this engine works on tokens only")
        self._claim()
        self._count += 1
        self._queue.append((self._count, request))
        return self._count

    def _claim(self) -> None:
        if self.method.claim(self):
            self._cached.clear()
            for row in self._free:
                self.method.release(row)

    def cancel(self, number: int) -> Update | None:
        """End a request now; its last update, with the text that was held back and what `run` has not yet given of it,
        or None if it was over.
        """
        running = next((r for r in self._running if r.number == number), None)
        if running is not None:
            given = [u for u in self._undelivered if u.request == number]
            self._undelivered = deque(u for u in self._undelivered if u.request != number)
            text = "".join(u.text for u in given) + running.flush()[0]
            tokens, logprobs = tuple(t for u in given for t in u.tokens), tuple(p for u in given for p in u.logprobs)
            accepted = sum(u.accepted for u in given)
            return self._end(running, Update(number, tokens, text, accepted, logprobs, finish_reason="cancelled"))
        waiting = next((request for n, request in self._queue if n == number), None)
        if waiting is None:
            return None
        self._queue = deque(item for item in self._queue if item[0] != number)
        statistics = RequestStatistics(prompt_tokens=len(waiting.prompt))
        return Update(number, (), "", 0, finish_reason="cancelled", statistics=statistics)

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._queue or self._running)

    @property
    def statistics(self) -> Mapping[int, RequestStatistics]:
        """What the requests that wait and run have cost so far, by number; those of a finished request are in its last
        update.
        """
        waiting = {number: RequestStatistics(prompt_tokens=len(request.prompt)) for number, request in self._queue}
        return waiting | {r.number: r.statistics for r in self._running}

    def run(self) -> Iterator[Update]:
        """Step until every request is over. Requests may be submitted and cancelled between updates."""
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
        """Submit requests and run until all are over; what each got, in their order.

        `on_update` sees every update as it comes.

        Raises:
            ValueError: the engine is busy, or a request is refused: then none is run. Exception: what ended a request,
                once all are over; with `raise_errors` False it is in the request's completion instead.
        """
        if self.busy:
            raise ValueError("the engine is busy with other requests: wait until they are over")
        numbers = list[int]()
        try:
            for request in requests:
                numbers.append(self.submit(request))
        except ValueError:
            for number in numbers:
                self.cancel(number)
            raise
        updates: dict[int, list[Update]] = {number: [] for number in numbers}
        for update in self.run():
            updates[update.request].append(update)
            if on_update is not None:
                on_update(update)
        completions = [Completion.of(updates[number]) for number in numbers]
        error = next((c.error for c in completions if c.error is not None), None)
        if error is not None and raise_errors:
            raise error
        return completions

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """One pass of the target over all requests; where it fails, one pass for each, so that only those end that fail
        by themselves.
        """
        self._admit()
        unread = self._read_next()
        together, self._one_by_one = not self._one_by_one, False
        if together and len(unread) > 1:
            with suppress(Exception):
                return self._advance(unread)
        return [update for r, tokens in unread.items() for update in self._alone(r, tokens)]

    def _alone(self, r: _Running, tokens: list[int]) -> list[Update]:
        try:
            return self._advance({r: tokens})
        except Exception as error:
            return [self._fail(r, error)]

    def _advance(self, unread: dict[_Running, list[int]]) -> list[Update]:
        """Propose, forward, accept, keep, tell.

        What it raises, it raises before anything is kept, so that it may be called again.
        """
        started = self._clock()
        context, starts = self._context(unread), tuple(self.runner.length(r.row) for r in unread)
        tree, ready = self._propose(context, unread, starts)
        drafted = self._clock()
        output = self.runner.forward(
            context.rows, tree, scored=_scored(tree, ready), hidden_layers=self.method.draft.hidden_layers
        )
        verified = self._clock()
        distributions = ProcessedDistributions(context, tree, output.logits, output.logit_index)
        verdicts = [self.method.accept.accept(tree, i, distributions) if yes else None for i, yes in enumerate(ready)]
        try:
            paths, decided = self._commit(unread, tree, verdicts)
        except Exception as error:
            # Some texts have grown and some have not: none can be gone on with.
            return [self._fail(r, error) for r in unread]
        kept = self._clock()
        step = StepResult(context, tree, output, paths, decided, starts, drafted - started, kept - drafted)
        failure = self._observe(step)
        over = self._clock()
        cost = StepTime(draft=drafted - started + over - kept, verify=verified - drafted, total=over - started)
        updates = list[Update]()
        for i, (r, verdict) in enumerate(zip(unread, verdicts, strict=True)):
            try:
                update = self._emit_update(r, verdict, step, i, cost)
            except Exception as error:
                updates.append(self._fail(r, error))
                continue
            if failure is not None and (update is None or update.finish_reason is None):
                updates += [] if update is None else [update]
                updates.append(self._fail(r, failure))
            elif update is not None:
                updates.append(update if update.finish_reason is None else self._end(r, update))
        return updates

    def _admit(self) -> None:
        while self._queue and self._free:
            number, request = self._queue.popleft()
            row, length = self._row_for(request.prompt)
            self.runner.truncate(row, length)
            detokenizer = self._detokenizer() if self._detokenizer else None
            running = _Running(number, request, row, detokenizer, self.runner.context)
            running.statistics.cached_tokens = length
            self._running.append(running)

    def _row_for(self, prompt: Sequence[int]) -> tuple[int, int]:
        """A free row, and how many tokens of the prompt it holds already."""
        if not self._prefix_caching:
            return self._free.pop(), 0
        tokens = np.asarray(prompt, np.int64)
        # The last common token is read again: drafters need the target's state at it, and what follows it may differ.
        common = {row: _common_prefix(text.tokens, tokens) - 1 for row, text in self._cached.items()}
        row = max(common, key=lambda r: common[r], default=-1)
        length = common.get(row, 0)
        if length <= 0:
            row = next((r for r in self._free if r not in common), row)
        self._free.remove(row)
        length = max(min(length, self.runner.length(row)), 0)
        if self._cached.pop(row, None) is None:
            return row, 0
        if length == 0:
            self.method.release(row)
            return row, 0
        return row, self.method.rewind(row, length)

    def _read_next(self) -> dict[_Running, list[int]]:
        """Decided tokens that each request has the target read now: the whole backlog, or as much as the chunk
        allows.
        """
        left, out = self._chunk, dict[_Running, list[int]]()
        for r in self._running:
            have = self.runner.length(r.row)
            backlog = r.text.length - have
            take = min(backlog, left) if backlog > 1 else 1
            if take > 0:
                out[r] = r.text.tokens[have : have + take].tolist()
                left -= take if backlog > 1 else 0
        return out

    def _propose(
        self, context: Context, unread: dict[_Running, list[int]], starts: Sequence[int]
    ) -> tuple[TokenTree, np.ndarray]:
        """Trees below the unread tokens: drafts for requests that have no more to read, in the order of `unread`; which
        those are.
        """
        ready = np.array([n + len(u) == r.text.length for n, (r, u) in zip(starts, unread.items(), strict=True)])
        drafting = np.flatnonzero(ready).tolist()
        parts = []
        if drafting:
            parts.append(self.method.propose(context.select(drafting)))
        if len(drafting) < len(unread):
            parts.append(root_tree([u[-1] for u, yes in zip(unread.values(), ready, strict=True) if not yes]))
        tree = concatenate_trees(parts)
        if len(parts) > 1:
            place = np.empty(len(ready), np.int64)
            place[np.concatenate([np.nonzero(ready)[0], np.nonzero(~ready)[0]])] = np.arange(len(ready))
            tree = tree.select(place)
        return tree.with_prefix(list(unread.values())), ready

    def _context(self, running: Collection[_Running]) -> Context:
        return Context(
            rows=tuple(r.row for r in running),
            sequences=tuple(r.text for r in running),
            sampling_params=tuple(r.request.sampling_params for r in running),
            rngs=tuple(r.noise for r in running),
            max_depth=np.array([r.wanted - 1 for r in running]),
        )

    def _commit(
        self, unread: dict[_Running, list[int]], tree: TokenTree, verdicts: list[AcceptResult | None]
    ) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        """Add the decided tokens to the texts and keep what they and the trunks put in the target's cache: paths and
        tokens.
        """
        paths, decided = [], []
        for i, (r, verdict) in enumerate(zip(unread, verdicts, strict=True)):
            path, tokens = list(range(int(tree.prefix_length[i]))), list[int]()
            if verdict is not None:
                path += verdict.path
                tokens = [*tree.token[i, list(verdict.path)].tolist(), verdict.token][: r.wanted]
                tokens = _until_end(tokens, r.request.eos)
            r.text.append(tokens)
            self.runner.commit(r.row, path)
            paths.append(tuple(path))
            decided.append(tuple(tokens))
        return tuple(paths), tuple(decided)

    def _observe(self, step: StepResult) -> Exception | None:
        """Tell drafter and shape what happened; what they raised, where it is a single request's.

        Where there are several, the drafter forgets all of them, for nobody knows what it has taken in, and the next
        step is taken one by one.
        """
        try:
            self.method.observe(step)
        except Exception as error:
            if len(step.context.rows) == 1:
                return error
            for row in step.context.rows:
                self.method.release(row)
            self._one_by_one = True
        return None

    def _emit_update(
        self, r: _Running, verdict: AcceptResult | None, step: StepResult, i: int, cost: StepTime
    ) -> Update | None:
        """Account for the step and report it; None while a prompt is still being read.

        Tokens after a stop string do not count.
        """
        count, text, stopped = r.write(step.new_tokens[i])
        prefix_length, tokens, statistics = int(step.tree.prefix_length[i]), step.new_tokens[i][:count], r.statistics
        stood = None if verdict is None else len(verdict.path)
        statistics.add(cost, prefix_length, int(step.tree.valid[i].sum()) - prefix_length, stood, len(tokens))
        if verdict is None:
            return None
        if prefix_length == 1:
            statistics.experts_read += sum(step.output.experts)
            statistics.mixtures_read += len(step.output.experts)
        for toll in verdict.fidelity[: len(tokens)]:
            statistics.fidelity.add(toll)
        logprobs = _logprobs(step, i)[:count] if r.request.logprobs else ()
        accepted = min(len(verdict.path), len(tokens))
        reason = "stop" if stopped or tokens[-1] in r.request.eos else "length" if r.wanted <= 0 else None
        if reason is not None and not stopped:
            rest, stopped = r.flush()
            text, reason = text + rest, "stop" if stopped else reason
        return Update(r.number, tokens, text, accepted, logprobs, reason)

    def _fail(self, r: _Running, error: Exception) -> Update:
        """End a request whose step raised this, with the text that was held back."""
        text = ""
        with suppress(Exception):
            text = r.flush()[0]
        return self._end(r, Update(r.number, (), text, 0, finish_reason="error", error=error))

    def _end(self, r: _Running, update: Update) -> Update:
        self._running.remove(r)
        self._free.append(r.row)
        if self._prefix_caching and update.error is None:
            self._cached[r.row] = r.text
        else:
            self.method.release(r.row)
        return replace(update, statistics=r.statistics)


def check(request: Request, vocab: int, context: int) -> None:
    """See that a model of this vocabulary and context can answer a request.

    Raises:
        ValueError: it cannot.
    """
    if isinstance(request.prompt, str) or not all(whole(t) for t in request.prompt):
        raise ValueError("the prompt must be a sequence of token ids, which are whole numbers; encode text first")
    if not isinstance(request.sampling_params, SamplingParams):
        raise ValueError(f"sampling must be a Sampling, found {type(request.sampling_params).__name__}")
    if not whole(request.max_new_tokens):
        raise ValueError(f"max_new_tokens must be a whole number, found {request.max_new_tokens!r}")
    if isinstance(request.stop, str) or not all(isinstance(s, str) and s for s in request.stop):
        raise ValueError(f"stop must be a sequence of strings that are not empty, found {request.stop!r}")
    if not all(whole(t) for t in request.eos):
        raise ValueError(f"eos must be a sequence of token ids, found {request.eos!r}")
    if len(request.prompt) == 0:
        raise ValueError("the prompt is empty: give at least one token")
    if len(request.prompt) >= context:
        raise ValueError(
            f"the prompt has {len(request.prompt)} tokens; the model reads at most {context - 1} and writes one"
        )
    if request.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, found {request.max_new_tokens}")
    if not all(0 <= t < vocab for t in request.prompt):
        raise ValueError(f"the prompt holds a token outside the model's vocabulary of {vocab}")
    if not all(0 <= t < vocab for t in request.sampling_params.logit_bias):
        raise ValueError(f"the bias names a token outside the model's vocabulary of {vocab}")


def describe(error: Exception) -> str:
    """What ended a request, in one line."""
    lines = str(error).strip().splitlines()
    sentence = lines[0] if lines else "no reason given"
    return sentence if isinstance(error, ValueError) else f"{type(error).__name__}: {sentence}"


def _common_prefix(a: Int[np.ndarray, " s"], b: Int[np.ndarray, " t"]) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def _scored(tree: TokenTree, ready: Bool[np.ndarray, " b"]) -> Bool[np.ndarray, "b n"]:
    """Nodes whose scores are needed: from the root on, of texts that have no more to read."""
    if ready.all() and tree.is_decode:
        return tree.scored
    first = np.where(ready, tree.prefix_length - 1, tree.nodes)
    return tree.scored & (np.arange(tree.nodes) >= first[:, None])


def _until_end(tokens: list[int], eos: tuple[int, ...]) -> list[int]:
    """Tokens up to and with the first end of sequence."""
    end = next((i for i, t in enumerate(tokens) if t in eos), len(tokens) - 1)
    return tokens[: end + 1]


def _logprobs(step: StepResult, i: int) -> tuple[float, ...]:
    """Log-probability of each decided token at the node it follows."""
    nodes = step.paths[i][int(step.tree.prefix_length[i]) - 1 :][: len(step.new_tokens[i])]
    scores = torch.log_softmax(step.output.logits[[int(step.output.logit_index[i, n]) for n in nodes]], -1)
    return tuple(float(scores[j, t]) for j, t in enumerate(step.new_tokens[i]))
