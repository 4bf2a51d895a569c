"""The engine: one loop for every method, every batch size, prompts and answers alike."""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool

from foretell.accept.base import Accepted
from foretell.context import Context, Output, Step, Text
from foretell.laws import Laws
from foretell.method import AnyMethod
from foretell.model.runner import Runner
from foretell.sampling import Noise, Sampling
from foretell.statistics import Cost, Statistics
from foretell.text import Detokenizer, StopStrings
from foretell.tree import TokenTree, concatenate, root


@dataclass(frozen=True)
class Request:
    """One prompt and what is wanted of it."""

    prompt: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
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
    """`stop` (end of sequence or stop string), `length`, `cancelled`; None: it goes on."""


class _Running:
    """A request that holds a row."""

    def __init__(self, number: int, request: Request, row: int, detokenizer: Detokenizer | None, context: int) -> None:
        self.number, self.request, self.row = number, request, row
        self.text = Text(request.prompt)
        self.noise = Noise(request.sampling.seed)
        self.detokenizer = detokenizer
        self.stops = StopStrings(request.stop)
        self.limit = min(request.max_new_tokens, context - len(request.prompt))

    @property
    def wanted(self) -> int:
        """New tokens it may still get."""
        return self.limit - len(self.text.generated)

    def write(self, tokens: Sequence[int]) -> tuple[int, str, bool]:
        """Turn new tokens into text: how many of them count, the text that may be shown, and whether a stop string ended it."""
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

    `rows`: most requests decoded together; `chunk`: most prompt tokens read in a step; `detokenizer` makes the incremental decoder of a request
    (None: tokens only, no stop strings).

    Raises:
        ValueError: no rows, or chunks of no tokens.
    """

    def __init__(
        self,
        runner: Runner,
        method: AnyMethod,
        rows: int = 16,
        chunk: int = 512,
        detokenizer: Callable[[], Detokenizer] | None = None,
    ) -> None:
        if rows < 1 or chunk < 1:
            raise ValueError(f"an engine needs rows and chunk of at least 1, found {rows} and {chunk}")
        self.runner, self.method = runner, method
        self._chunk, self._detokenizer = chunk, detokenizer
        self._free = list(range(rows))[::-1]
        self._queue: deque[tuple[int, Request]] = deque()
        self._running: list[_Running] = []
        self._count = 0
        self.statistics: dict[int, Statistics] = {}

    def submit(self, request: Request) -> int:
        """Queue a request; its number.

        Raises:
            ValueError: an empty prompt, one that leaves no room in the model's context, a token outside the vocabulary, or a negative limit.
        """
        if len(request.prompt) == 0:
            raise ValueError("the prompt is empty: give at least one token")
        if len(request.prompt) >= self.runner.context:
            raise ValueError(
                f"the prompt has {len(request.prompt)} tokens; the model reads at most {self.runner.context - 1} and writes one"
            )
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, found {request.max_new_tokens}")
        if not all(0 <= t < self.runner.vocab for t in request.prompt):
            raise ValueError(f"the prompt holds a token outside the model's vocabulary of {self.runner.vocab}")
        if not all(0 <= t < self.runner.vocab for t in request.sampling.bias):
            raise ValueError(f"the bias names a token outside the model's vocabulary of {self.runner.vocab}")
        if request.stop and self._detokenizer is None:
            raise ValueError("stop strings need a tokenizer: this engine works on tokens only")
        self._count += 1
        self._queue.append((self._count, request))
        self.statistics[self._count] = Statistics(prompt_tokens=len(request.prompt))
        return self._count

    def cancel(self, number: int) -> Update | None:
        """End a request now; its last update, with the text that was held back, or None if it was over."""
        running = next((r for r in self._running if r.number == number), None)
        if running is not None:
            return self._end(running, Update(number, (), running.flush()[0], 0, finish_reason="cancelled"))
        waiting = any(item[0] == number for item in self._queue)
        self._queue = deque(item for item in self._queue if item[0] != number)
        return Update(number, (), "", 0, finish_reason="cancelled") if waiting else None

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._queue or self._running)

    def run(self) -> Iterator[Update]:
        """Step until every request is over."""
        while self.busy:
            yield from self.step()

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """One pass of the target: admit, propose, forward, accept, keep, tell."""
        self._admit()
        unread = self._read_next()
        started = time.perf_counter()
        context = self._context(unread)
        tree, ready = self._propose(context, unread)
        drafted = time.perf_counter()
        output = self.runner.forward(context.rows, tree, scored=_scored(tree, ready), taps=self.method.draft.taps)
        verified = time.perf_counter()
        laws = Laws(context, tree, output.logits, output.at)
        verdicts = [self.method.accept.accept(tree, i, laws) if yes else None for i, yes in enumerate(ready)]
        step = self._keep(unread, context, tree, output, verdicts)
        kept = time.perf_counter()
        self.method.keep(step)
        over = time.perf_counter()
        cost = Cost(draft=drafted - started + over - kept, verify=verified - drafted, all=over - started)
        return [
            u for i, (r, v) in enumerate(zip(unread, verdicts, strict=True)) if (u := self._tell(r, v, step, i, cost))
        ]

    def _admit(self) -> None:
        while self._queue and self._free:
            number, request = self._queue.popleft()
            row = self._free.pop()
            self.runner.crop(row, 0)
            detokenizer = self._detokenizer() if self._detokenizer else None
            self._running.append(_Running(number, request, row, detokenizer, self.runner.context))

    def _read_next(self) -> dict[_Running, list[int]]:
        """Decided tokens that each request has the target read now: the whole backlog, or as much as the chunk allows."""
        left, out = self._chunk, dict[_Running, list[int]]()
        for r in self._running:
            have = self.runner.length(r.row)
            backlog = r.text.length - have
            take = min(backlog, left) if backlog > 1 else 1
            if take > 0:
                out[r] = r.text.tokens[have : have + take].tolist()
                left -= take if backlog > 1 else 0
        return out

    def _propose(self, context: Context, unread: dict[_Running, list[int]]) -> tuple[TokenTree, np.ndarray]:
        """Trees below the unread tokens: drafts for requests that have no more to read, in the order of `unread`; which those are."""
        ready = np.array([self.runner.length(r.row) + len(u) == r.text.length for r, u in unread.items()])
        drafting = np.flatnonzero(ready).tolist()
        parts = []
        if drafting:
            parts.append(self.method.propose(context.select(drafting)))
        if len(drafting) < len(unread):
            parts.append(root([u[-1] for u, yes in zip(unread.values(), ready, strict=True) if not yes]))
        tree = concatenate(parts)
        if len(parts) > 1:
            place = np.empty(len(ready), np.int64)
            place[np.concatenate([np.nonzero(ready)[0], np.nonzero(~ready)[0]])] = np.arange(len(ready))
            tree = tree.select(place)
        return tree.with_trunk(list(unread.values())), ready

    def _context(self, running: Collection[_Running]) -> Context:
        return Context(
            rows=tuple(r.row for r in running),
            texts=tuple(r.text for r in running),
            sampling=tuple(r.request.sampling for r in running),
            noise=tuple(r.noise for r in running),
            room=np.array([r.wanted - 1 for r in running]),
        )

    def _keep(
        self,
        unread: dict[_Running, list[int]],
        context: Context,
        tree: TokenTree,
        output: Output,
        verdicts: list[Accepted | None],
    ) -> Step:
        """Add the decided tokens to the texts and keep what they and the trunks put in the target's cache."""
        paths, decided = [], []
        for i, (r, verdict) in enumerate(zip(unread, verdicts, strict=True)):
            path, tokens = list(range(int(tree.trunk[i]))), list[int]()
            if verdict is not None:
                path += verdict.path
                tokens = [*tree.token[i, list(verdict.path)].tolist(), verdict.token][: r.wanted]
                tokens = _until_end(tokens, r.request.eos)
            r.text.append(tokens)
            self.runner.keep(r.row, path)
            paths.append(tuple(path))
            decided.append(tuple(tokens))
        return Step(context, tree, output, tuple(paths), tuple(decided))

    def _tell(self, r: _Running, verdict: Accepted | None, step: Step, i: int, cost: Cost) -> Update | None:
        """Account for the step and report it; None while a prompt is still being read. Tokens after a stop string do not count."""
        count, text, stopped = r.write(step.decided[i])
        trunk, tokens = int(step.tree.trunk[i]), step.decided[i][:count]
        stood = None if verdict is None else len(verdict.path)
        self.statistics[r.number].add(cost, trunk, int(step.tree.live[i].sum()) - trunk, stood, len(tokens))
        if verdict is None:
            return None
        if trunk == 1:
            self.statistics[r.number].experts_read += sum(step.output.experts)
            self.statistics[r.number].mixtures_read += len(step.output.experts)
        for toll in verdict.tolls[: len(tokens)]:
            self.statistics[r.number].price.add(toll)
        logprobs = _logprobs(step, i)[:count] if r.request.logprobs else ()
        accepted = min(len(verdict.path), len(tokens))
        reason = "stop" if stopped or tokens[-1] in r.request.eos else "length" if r.wanted <= 0 else None
        if reason is None:
            return Update(r.number, tokens, text, accepted, logprobs)
        if not stopped:
            rest, stopped = r.flush()
            text, reason = text + rest, "stop" if stopped else reason
        return self._end(r, Update(r.number, tokens, text, accepted, logprobs, reason))

    def _end(self, r: _Running, update: Update) -> Update:
        self._running.remove(r)
        self._free.append(r.row)
        self.method.clear(r.row)
        return update


def _scored(tree: TokenTree, ready: Bool[np.ndarray, " b"]) -> Bool[np.ndarray, "b n"]:
    """Nodes whose scores are needed: from the root on, of texts that have no more to read."""
    if ready.all() and tree.caught_up:
        return tree.scored
    first = np.where(ready, tree.trunk - 1, tree.nodes)
    return tree.scored & (np.arange(tree.nodes) >= first[:, None])


def _until_end(tokens: list[int], eos: tuple[int, ...]) -> list[int]:
    """Tokens up to and with the first end of sequence."""
    end = next((i for i, t in enumerate(tokens) if t in eos), len(tokens) - 1)
    return tokens[: end + 1]


def _logprobs(step: Step, i: int) -> tuple[float, ...]:
    """Log-probability of each decided token at the node it follows."""
    nodes = step.paths[i][int(step.tree.trunk[i]) - 1 :][: len(step.decided[i])]
    scores = torch.log_softmax(step.output.logits[[int(step.output.at[i, n]) for n in nodes]], -1)
    return tuple(float(scores[j, t]) for j, t in enumerate(step.decided[i]))
