"""Prompts through one engine: answers in the order of the prompts, later turns asked when the earlier ones are
answered.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from foretell.api import Answer, Model
from foretell.cli.interrupt import Interrupt, updates
from foretell.cli.prompts import BadLine, Task
from foretell.cli.show import Stream
from foretell.engine.engine import Completion, Engine, Update


@dataclass(frozen=True)
class Done:
    """An answer, and what it answers."""

    line: int
    title: str
    answer: Answer


@dataclass
class _Asked:
    """A request under way for a line."""

    line: int
    task: Task
    updates: list[Update] = field(default_factory=list)


class Batch:
    """Answers tasks; `refused` fills with the lines that the model cannot answer.

    `stream` shows text as it comes (one task only).
    """

    def __init__(self, model: Model, engine: Engine, logprobs: bool, stream: Stream | None = None) -> None:
        self._model, self._engine, self._logprobs, self._stream = model, engine, logprobs, stream
        self._asked: dict[int, _Asked] = {}
        self._open: dict[int, list[Done]] = {}
        self.refused: list[BadLine] = []

    def run(self, tasks: Sequence[tuple[int, Task]], interrupt: Interrupt) -> Iterator[Done]:
        """Every answer, those of an interrupted batch as far as they came."""
        for line, task in tasks:
            self._open[line] = []
            self._ask(line, task)
        for update in updates(self._engine, self._asked.keys(), interrupt):
            asked = self._asked[update.request]
            asked.updates.append(update)
            if self._stream is not None:
                self._stream.write(update)
            if update.finish_reason is not None:
                del self._asked[update.request]
                self._finish(asked)
                yield from self._in_order()
        self._asked.clear()
        yield from self._in_order()

    def _ask(self, line: int, task: Task) -> None:
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
            self._asked[self._engine.submit(request)] = _Asked(line, task)
        except ValueError as error:
            self.refused.append(BadLine(line, str(error)))

    def _finish(self, asked: _Asked) -> None:
        answer = Answer.of(Completion.of(asked.updates), self._engine)
        if answer.error:
            self.refused.append(BadLine(asked.line, answer.error))
        self._open[asked.line].append(Done(asked.line, asked.task.title, answer))
        if asked.task.turns and answer.finish_reason not in ("cancelled", "error"):
            self._ask(asked.line, next_turn(asked.task, answer.text))

    def _in_order(self) -> Iterator[Done]:
        """Answers whose line, and every line before it, has nothing under way."""
        busy = min((a.line for a in self._asked.values()), default=None)
        for line in sorted(self._open):
            if busy is not None and line >= busy:
                return
            yield from self._open.pop(line)


def next_turn(task: Task, answer: str) -> Task:
    """The conversation with the answer and the user's next turn added."""
    before = ({"role": "user", "content": task.prompt},) if isinstance(task.prompt, str) else task.prompt
    after = {"role": "assistant", "content": answer}, {"role": "user", "content": task.turns[0]}
    return replace(task, prompt=(*before, *after), turns=task.turns[1:])
