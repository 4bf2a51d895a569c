"""Runs plans on an engine."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from foretell.engine.engine import Engine
from foretell.engine.request import Completion, Request, Update, complete
from foretell.plan.base import PlanRun, PlanStep


class PlanEngine:
    """An engine whose requests may be plans: each gets the updates of its answer, in the order of the text.

    The engine should reuse prefixes (`prefix_caching`) and have rows for several requests; it must serve nobody else.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._runs: dict[int, PlanRun] = {}
        self._owners: dict[int, tuple[int, int]] = {}
        """Number of the run and index in it, by the engine's number of a request."""
        self._numbers: dict[tuple[int, int], int] = {}
        """The engine's number by number of the run and index."""
        self._last_number = 0
        self._undelivered = list[Update]()

    def submit(self, run: PlanRun) -> int:
        """Start a run; its number.

        Raises:
            ValueError: its first requests are invalid.
        """
        self._last_number += 1
        number = self._last_number
        self._runs[number] = run
        try:
            self._follow(number, run.start())
        except ValueError:
            self.cancel(number)
            raise
        return number

    @property
    def busy(self) -> bool:
        """Whether any run is not over."""
        return bool(self._runs)

    @property
    def prompt_progress(self) -> tuple[int, int]:
        """Tokens read, and all tokens, of the prompts that wait or are being read."""
        return self.engine.prompt_progress

    def step(self) -> list[Update]:
        """One pass of the target; the updates of the runs."""
        updates_of = dict[int, list[tuple[int, Update]]]()
        for update in self.engine.step():
            number, index = self._owners[update.request]
            if update.finish_reason is not None:
                self._forget(number, index)
            updates_of.setdefault(number, []).append((index, update))
        for number, updates in updates_of.items():
            if number in self._runs:
                self._observe(number, updates, in_step=True)
        delivered, self._undelivered = self._undelivered, []
        return delivered

    def run(self) -> Iterator[Update]:
        """Run steps until every run is over."""
        while self.busy:
            yield from self.step()

    def cancel(self, number: int) -> Update | None:
        """End a run now; its last update, or None if it was over."""
        run = self._runs.get(number)
        if run is None:
            return None
        run.end("cancelled")
        self._observe(number, [])
        last = [u for u in self._undelivered if u.request == number]
        self._undelivered = [u for u in self._undelivered if u.request != number]
        return Update.join(last) if last else None

    def complete(self, runs: Sequence[PlanRun]) -> list[Completion]:
        """Run plans until all are over; their completions in the same order.

        Raises:
            ValueError: a first request is invalid; then none is run.
        """
        return complete(self, runs)

    def _observe(self, number: int, updates: Sequence[tuple[int, Update]], in_step: bool = False) -> None:
        run = self._runs[number]
        self._follow(number, run.observe(updates, self.engine.last_step if in_step else None))

    def _follow(self, number: int, step: PlanStep) -> None:
        """Deliver, submit and cancel what a run wants."""
        if step.update is not None:
            self._undelivered.append(replace(step.update, request=number))
            if step.update.finish_reason is not None:
                del self._runs[number]
                return
        if step.make_requests is not None:
            self._submit(number, step.make_requests())
        cancelled = [(index, self._cancel(number, index)) for index in step.cancel]
        updates = [(index, update) for index, update in cancelled if update is not None]
        if updates:
            self._observe(number, updates)

    def _submit(self, number: int, requests: Sequence[Request]) -> None:
        """Give requests to the engine; they are the last ones of their run."""
        first = len(self._runs[number].requests) - len(requests)
        for index, request in enumerate(requests, first):
            submitted = self.engine.submit(request)
            self._owners[submitted], self._numbers[number, index] = (number, index), submitted

    def _cancel(self, number: int, index: int) -> Update | None:
        submitted = self._numbers.get((number, index))
        update = None if submitted is None else self.engine.cancel(submitted)
        if update is not None:
            self._forget(number, index)
        return update

    def _forget(self, number: int, index: int) -> None:
        del self._owners[self._numbers.pop((number, index))]
