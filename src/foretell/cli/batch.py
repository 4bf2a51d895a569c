"""Runs prompts through one engine. Answers come in the order of the prompts; the next turn of a conversation is
submitted when the one before it is answered.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from foretell.api import Answer
from foretell.cli.interrupt import Interrupt, run_until_interrupt
from foretell.cli.prompts import LineError, PromptSpec
from foretell.cli.setup import ModelSetup
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod
from foretell.engine.request import Completion, Update
from foretell.plan import Plan, PlanEngine, PlanRun


class UpdateWriter(Protocol):
    """Shows an answer as it comes."""

    def write(self, update: Update, /) -> None:
        """Show one update."""


@dataclass(frozen=True)
class AnsweredPrompt:
    """An answer with the line and the title of its prompt."""

    line: int
    title: str
    answer: Answer


@dataclass
class _ActiveRequest:
    """A request in the engine and its updates so far."""

    line: int
    prompt: PromptSpec
    run: PlanRun | None
    """The run of the plan that answers it."""
    updates: list[Update] = field(default_factory=list)


class Batch:
    """Answers prompts with one engine, which decodes those that name no other method by its own.

    `logprobs`, `prompt_logprobs`: as in `Request`. `errors` collects the lines that the model cannot answer. `writer`
    shows text as it comes (one prompt only). `plan`: how each answer is put together.
    """

    def __init__(
        self,
        setup: ModelSetup,
        engine: Engine,
        logprobs: int | None = None,
        writer: UpdateWriter | None = None,
        prompt_logprobs: int | None = None,
        plan: Plan | None = None,
    ) -> None:
        self._setup, self._engine, self._writer, self._plan = setup, engine, writer, plan
        self._planned = None if plan is None else PlanEngine(engine)
        self._logprobs, self._prompt_logprobs = logprobs, prompt_logprobs
        self._methods = {engine.method.name: engine.method}
        self._active: dict[int, _ActiveRequest] = {}
        self._answered: dict[int, list[AnsweredPrompt]] = {}
        self.errors: list[LineError] = []

    def run(self, prompts: Sequence[tuple[int, PromptSpec]], interrupt: Interrupt) -> Iterator[AnsweredPrompt]:
        """Every answer; after an interrupt, the partial answers of what was running."""
        for line, prompt in prompts:
            self._answered[line] = []
            self._submit(line, prompt)
        for update in run_until_interrupt(self._planned or self._engine, self._active.keys(), interrupt):
            request = self._active[update.request]
            request.updates.append(update)
            if self._writer is not None:
                self._writer.write(update)
            if update.finish_reason is not None:
                del self._active[update.request]
                self._complete(request)
                yield from self._in_order()
        self._active.clear()
        yield from self._in_order()

    def inputs(self, prompts: Iterable[PromptSpec]) -> dict[str, frozenset[str]]:
        """What the methods of these prompts are built from, by their names; those that cannot be built are left out."""
        inputs_by_method = {self._engine.method.name: self._engine.method.inputs}
        for prompt in prompts:
            with suppress(ValueError):
                method = self._method(prompt)
                inputs_by_method[method.name] = method.inputs
        return inputs_by_method

    def _submit(self, line: int, prompt: PromptSpec) -> None:
        model, asked = self._setup.model, dict(prompt.options)
        asked |= {"logprobs": self._logprobs, "prompt_logprobs": self._prompt_logprobs}
        try:
            asked["method"] = self._method(prompt)
            if self._plan is not None and self._planned is not None:
                run = model.plan_run(prompt.prompt, self._plan, **asked)
                self._active[self._planned.submit(run)] = _ActiveRequest(line, prompt, run)
                return
            request = replace(model.request(prompt.prompt, **asked), priority=prompt.priority)
            self._active[self._engine.submit(request)] = _ActiveRequest(line, prompt, None)
        except ValueError as error:
            self.errors.append(LineError(line, str(error)))

    def _method(self, prompt: PromptSpec) -> AnyMethod:
        """The method of a prompt, built when the first prompt names it."""
        if prompt.method is None:
            return self._engine.method
        if prompt.method not in self._methods:
            self._methods[prompt.method] = self._setup.other_method(prompt.method)
        return self._methods[prompt.method]

    def _complete(self, request: _ActiveRequest) -> None:
        completion = Completion.of(request.updates)
        report = None if request.run is None else request.run.report
        answer = Answer.from_completion(completion, self._engine, self._method(request.prompt), report)
        if answer.error:
            self.errors.append(LineError(request.line, answer.error))
        self._answered[request.line].append(AnsweredPrompt(request.line, request.prompt.title, answer))
        if request.prompt.turns and answer.finish_reason not in ("cancelled", "error"):
            self._submit(request.line, next_turn(request.prompt, answer.text))

    def _in_order(self) -> Iterator[AnsweredPrompt]:
        """Answers of the lines before the first that has an active request."""
        first_active = min((r.line for r in self._active.values()), default=None)
        for line in sorted(self._answered):
            if first_active is not None and line >= first_active:
                return
            yield from self._answered.pop(line)


def next_turn(prompt: PromptSpec, answer: str) -> PromptSpec:
    """The conversation with the answer and the user's next turn added."""
    before = ({"role": "user", "content": prompt.prompt},) if isinstance(prompt.prompt, str) else prompt.prompt
    after = {"role": "assistant", "content": answer}, {"role": "user", "content": prompt.turns[0]}
    return replace(prompt, prompt=(*before, *after), turns=prompt.turns[1:])
