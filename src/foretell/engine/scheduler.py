"""Which requests run, in which rows of the cache, and how many tokens each step reads for them."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from foretell.engine.live_request import LiveRequest
from foretell.engine.logprobs import TokenLogprobs
from foretell.engine.prompt_chunks import PromptChunks
from foretell.engine.rows import RowPool
from foretell.engine.statistics import StepTime
from foretell.model.run.runner import Adapts, ReadsImages, Runner, free_tokens, offered

ROOM_FOR_DRAFTS = 128
"""Tokens of the cache that a request needs beside those of its sequence: about a tree."""
_PROMPT_LOGPROBS_CHUNK = 128
"""Most prompt tokens per step of a request whose prompt's logits are needed: they take 4 bytes times the vocabulary."""


class Scheduler:
    """The requests of an engine that are not over. `rows` gives them rows of the cache, `chunks` sizes what a step
    reads of their prompts, `clock` gives seconds.

    Properties may be read by any thread.
    """

    def __init__(self, runner: Runner, rows: RowPool, chunks: PromptChunks, clock: Callable[[], float]) -> None:
        self.rows, self.chunks = rows, chunks
        self._runner, self._clock = runner, clock
        self._adapts, self._images = offered(runner, Adapts), offered(runner, ReadsImages)
        self.waiting = dict[int, LiveRequest]()
        """By number."""
        self.running: list[LiveRequest] = []
        self.paused = dict[int, LiveRequest]()
        """By number."""
        self.preemptions = 0
        """How often a request had to wait because the cache was full."""

    def __iter__(self) -> Iterator[LiveRequest]:
        """All requests: those that wait, are paused or run."""
        return iter([*self.waiting.values(), *self.paused.values(), *self.running])

    @property
    def load(self) -> tuple[int, int]:
        """Numbers of running and of waiting requests."""
        return len(self.running), len(self.waiting)

    @property
    def cached_tokens(self) -> int:
        """Tokens of running requests in the cache; tokens that several share count for each."""
        return sum(self._runner.length(r.row) for r in list(self.running))

    @property
    def prompt_progress(self) -> tuple[int, int]:
        """Tokens read, and all tokens, of the prompts that wait or are being read; equal: there are none."""
        running = [(self._runner.length(r.row), len(r.request.prompt)) for r in list(self.running)]
        reading = [(read, total) for read, total in running if read < total - 1]
        waiting = sum(len(r.request.prompt) for r in list(self.waiting.values()))
        return sum(read for read, _ in reading), sum(total for _, total in reading) + waiting

    def find(self, number: int) -> LiveRequest | None:
        """The request of this number, unless it is over."""
        return self.waiting.get(number) or self.paused.get(number) or self.find_running(number)

    def find_running(self, number: int) -> LiveRequest | None:
        """The request of this number, if it runs; any thread may ask."""
        return next((r for r in list(self.running) if r.number == number), None)

    def add(self, r: LiveRequest) -> None:
        """Let a new request wait."""
        self.waiting[r.number] = r

    def remove(self, r: LiveRequest, keep: bool) -> None:
        """Forget a request that is over. `keep`: its tokens may be of use to a later one."""
        if (self.waiting.pop(r.number, None) or self.paused.pop(r.number, None)) is None:
            self.running.remove(r)
            self.rows.release(r.row, keep)

    def pause(self, number: int) -> None:
        """Set a request aside; see `Engine.pause`."""
        r = self.find(number)
        if r is None or number in self.paused:
            return
        self.remove(r, keep=True)
        self.paused[number] = r

    def resume(self, number: int) -> None:
        """Let a paused request wait for a row; nothing happens to others."""
        r = self.paused.pop(number, None)
        if r is not None:
            self.waiting[number] = r

    def free_memory(self) -> bool:
        """Make room in a full cache: forget the oldest ended request, or else let the least urgent of several running
        ones wait, which reads its tokens again later. Returns whether that was possible.
        """
        if self.rows.evict():
            return True
        if len(self.running) < 2:
            return False
        r = self._by_urgency(self.running)[-1]
        self.running.remove(r)
        self.rows.release(r.row, keep=False)
        r.statistics.preemptions += 1
        self.preemptions += 1
        self.waiting[r.number] = r
        return True

    def admit(self) -> None:
        """Give free rows to waiting requests. A prompt waits while another request reads tokens that it begins with,
        and while the cache has no room for it.
        """
        if not self.waiting or not self.rows.available:
            return
        for r in self._by_urgency(self.waiting.values()):
            if not self.rows.available:
                return
            reuses = not r.reads_prompt_logprobs
            if reuses and self.rows.awaits(r.sequence, r.method, r.request.prefix_salt):
                continue
            if not self._make_room(ROOM_FOR_DRAFTS):
                return
            row, cached = self.rows.allocate(r.sequence, r.method, r.request.prefix_salt, reuses)
            if self._adapts is not None:
                self._adapts.adapt(row, r.request.adapter)
            if self._images is not None:
                self._images.show(row, r.request.images)
            if not self._make_room(r.sequence.length - cached + ROOM_FOR_DRAFTS):
                self.rows.release(row, keep=True)
                return
            del self.waiting[r.number]
            r.row = row
            if not r.statistics.queue_seconds:
                r.statistics.queue_seconds = self._clock() - r.submitted_at
            if not r.sequence.generated.size:
                r.statistics.cached_tokens, r.prompt_logprobs = cached, TokenLogprobs()
            self.running.append(r)

    def schedule(self) -> dict[LiveRequest, list[int]]:
        """Tokens that the target reads in this step for each request: all that it has not read yet up to its
        `reading_end`, as far as the chunk allows, and then its last one.
        """
        out, reading = dict[LiveRequest, list[int]](), list[LiveRequest]()
        for r in self.running:
            if r.sequence.length - self._runner.length(r.row) > 1:
                reading.append(r)
            else:
                out[r] = [r.sequence.last_token]
        left = self.chunks.size(decoding=bool(out))
        for r in self._by_urgency(reading) if len(reading) > 1 else reading:
            most = min(left, _PROMPT_LOGPROBS_CHUNK) if r.reads_prompt_logprobs else left
            unread = r.sequence.tokens[self._runner.length(r.row) : r.reading_end][:most]
            if len(unread):
                out[r] = unread.tolist()
                left -= len(unread)
        return out

    def observe(self, scheduled: Mapping[LiveRequest, list[int]], time: StepTime) -> None:
        """Learn the time of a step."""
        prompts = [len(tokens) for tokens in scheduled.values() if len(tokens) > 1]
        self.chunks.update(sum(prompts), len(prompts) < len(scheduled), time.total)

    def _make_room(self, tokens: int) -> bool:
        """Whether the cache has room for so many tokens beside those that running requests have yet to read; forgets
        ended requests where it must. A request that runs alone is always given a try.
        """
        needed = tokens + sum(r.sequence.length - self._runner.length(r.row) for r in self.running)
        while (free := free_tokens(self._runner)) is not None and free < needed:
            if not self.rows.evict():
                return not self.running
        return True

    def _by_urgency(self, requests: Iterable[LiveRequest]) -> list[LiveRequest]:
        """Requests that are late first, then by priority, then by arrival."""
        now = self._clock()

        def rank(r: LiveRequest) -> tuple[bool, int, int]:
            deadline = r.request.deadline
            return deadline is None or deadline > now, r.request.priority, r.number

        return sorted(requests, key=rank)
