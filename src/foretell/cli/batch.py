"""Prompts through one engine: answers in the order of the prompts, later turns asked when the earlier ones are
answered.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from foretell.api import Answer, Model
from foretell.cli.interrupt import Interrupt, run_until_interrupt
from foretell.cli.prompts import LineError, PromptSpec
from foretell.cli.show import AnswerWriter
from foretell.engine.engine import Completion, Engine, Update


@dataclass(frozen=True)
class AnsweredPrompt:
    """An answer, and what it answers."""

    line: int
    title: str
    answer: Answer


@dataclass
class _ActiveRequest:
    """A request under way for a line."""

    line: int
    spec: PromptSpec
    updates: list[Update] = field(default_factory=list)


class Batch:
    """Answers tasks; `refused` fills with the lines that the model cannot answer.

    `stream` shows text as it comes (one task only).
    """

    def __init__(self, model: Model, engine: Engine, logprobs: bool, stream: AnswerWriter | None = None) -> None:
        self._model, self._engine, self._logprobs, self._stream = model, engine, logprobs, stream
        self._active: dict[int, _ActiveRequest] = {}
        self._answered: dict[int, list[AnsweredPrompt]] = {}
        self.errors: list[LineError] = []

    def run(self, tasks: Sequence[tuple[int, PromptSpec]], interrupt: Interrupt) -> Iterator[AnsweredPrompt]:
        """Every answer, those of an interrupted batch as far as they came."""
        for line, task in tasks:
            self._answered[line] = []
            self._submit(line, task)
        for update in run_until_interrupt(self._engine, self._active.keys(), interrupt):
            asked = self._active[update.request]
            asked.updates.append(update)
            if self._stream is not None:
                self._stream.write(update)
            if update.finish_reason is not None:
                del self._active[update.request]
                self._complete(asked)
                yield from self._in_order()
        self._active.clear()
        yield from self._in_order()

    def _submit(self, line: int, task: PromptSpec) -> None:
        try:
            request = self._model.request(
                task.prompt,
                task.sampling,
                max_new_tokens=task.max_new_tokens,
                stop=task.stop,
                raw=task.raw,
                logprobs=self._logprobs,
                allow_special_tokens=task.allow_special_tokens,
            )
            self._active[self._engine.submit(request)] = _ActiveRequest(line, task)
        except ValueError as error:
            self.errors.append(LineError(line, str(error)))

    def _complete(self, asked: _ActiveRequest) -> None:
        answer = Answer.from_completion(Completion.of(asked.updates), self._engine)
        if answer.error:
            self.errors.append(LineError(asked.line, answer.error))
        self._answered[asked.line].append(AnsweredPrompt(asked.line, asked.spec.title, answer))
        if asked.spec.turns and answer.finish_reason not in ("cancelled", "error"):
            self._submit(asked.line, next_turn(asked.spec, answer.text))

    def _in_order(self) -> Iterator[AnsweredPrompt]:
        """Answers whose line, and every line before it, has nothing under way."""
        busy = min((a.line for a in self._active.values()), default=None)
        for line in sorted(self._answered):
            if busy is not None and line >= busy:
                return
            yield from self._answered.pop(line)


def next_turn(task: PromptSpec, answer: str) -> PromptSpec:
    """The conversation with the answer and the user's next turn added."""
    before = ({"role": "user", "content": task.prompt},) if isinstance(task.prompt, str) else task.prompt
    after = {"role": "assistant", "content": answer}, {"role": "user", "content": task.turns[0]}
    return replace(task, prompt=(*before, *after), turns=task.turns[1:])
