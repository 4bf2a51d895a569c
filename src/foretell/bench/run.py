"""A run: every question to every competitor, in turn, so that drift of the machine meets all alike."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foretell.api import Model
from foretell.bench.competitor import PLAIN, Competitor, conversation
from foretell.bench.questions import Question
from foretell.bench.schema import AnswerDivergence, QuestionResult
from foretell.core.tree import root_tree
from foretell.tokenizer.codec import Message
from foretell.utils.store import RunStore

ProgressCallback = Callable[[str], None]


@dataclass(frozen=True)
class BenchRun:
    """Who answers, how often, and the models that judge where answers diverge, by precision.

    The first competitor is plain decoding.
    """

    competitors: Sequence[Competitor]
    models: Mapping[str, Model]
    repeats: int

    @property
    def answers_per_question(self) -> int:
        """Answers per question."""
        return len(self.competitors) * self.repeats

    def run(self, questions: Sequence[Question], store: RunStore[QuestionResult], tick: ProgressCallback) -> None:
        """Ask everything that the store has no answer to yet."""
        done = {(r.question, r.competitor, r.repeat): r for r in store.records}
        if len(done) < len(questions) * self.answers_per_question:
            self._warm_up()
        for question in questions:
            for repeat in range(self.repeats):
                for competitor in self._order(repeat):
                    key = question.id, competitor.name, repeat
                    if key not in done:
                        done[key] = self._ask(competitor, question, repeat, done)
                        store.append(done[key])
                    tick(f"{question.category} {question.id}: {competitor.name}")

    def _warm_up(self) -> None:
        """A short question that is not counted: first calls allocate, compile and page in."""
        question = Question("warm-up", "warm-up", ("Count from one to ten, then count from one to ten again.",))
        plain = None
        for competitor in self.competitors:
            turns = competitor.answer(question, plain, -1)
            plain = plain or QuestionResult(
                question=question.id, category="", group="", competitor=competitor.name, repeat=0, answers=turns
            )

    def _order(self, repeat: int) -> Sequence[Competitor]:
        """Everyone's neighbours change from repeat to repeat; in the first, plain decoding comes first, since peers
        follow its lengths.
        """
        shift = repeat * 3 % len(self.competitors)
        return [*self.competitors[shift:], *self.competitors[:shift]]

    def _ask(
        self,
        competitor: Competitor,
        question: Question,
        repeat: int,
        done: Mapping[tuple[str, str, int], QuestionResult],
    ) -> QuestionResult:
        name, precision = competitor.name.split("/")
        own = done.get((question.id, f"{PLAIN}/{precision}", 0))
        plain = own or done.get((question.id, self.competitors[0].name, 0))
        record = QuestionResult(
            question=question.id,
            category=question.category,
            group=question.group,
            competitor=competitor.name,
            repeat=repeat,
        )
        try:
            record = record.model_copy(update={"turns": competitor.answer(question, plain, repeat)})
        except ValueError as error:
            return record.model_copy(update={"refused": " ".join(str(error).split())})
        if name == PLAIN or plain is None or plain.error or repeat:
            return record
        judge = self.models[precision if own else next(iter(self.models))]
        return record.model_copy(
            update={"compared": True, "divergence": first_divergence(record, plain, question, judge)}
        )


def first_divergence(
    record: QuestionResult, plain: QuestionResult, question: Question, judge: Model
) -> AnswerDivergence | None:
    """Where the answers first differ, and how nearly the target was undecided there; None if they are identical."""
    messages = list[Message]()
    for turn, (mine, theirs) in enumerate(zip(record.answers, plain.answers, strict=True)):
        messages.append({"role": "user", "content": question.turns[turn]})
        if mine.tokens != theirs.tokens:
            at = next((i for i, (a, b) in enumerate(zip(mine.tokens, theirs.tokens, strict=False)) if a != b), None)
            if at is None:
                ends = min(len(mine.tokens), len(theirs.tokens))
                return AnswerDivergence(
                    question=question.id, turn=turn, position=ends, token=None, plain_token=None, margin=None
                )
            token, chosen = mine.tokens[at], theirs.tokens[at]
            text = [*conversation(judge, messages), *theirs.tokens[:at]]
            return AnswerDivergence(
                question=question.id,
                turn=turn,
                position=at,
                token=token,
                plain_token=chosen,
                margin=logit_margin(judge, text, chosen, token),
            )
        messages.append({"role": "assistant", "content": judge.codec.decode(theirs.tokens)})
    return None


def logit_margin(model: Model, text: Sequence[int], first: int, second: int) -> float:
    """Logit of `first` less that of `second` after a text, read without speculation."""
    runner = model.runner()
    for start in range(0, len(text), 512):
        part = list(text[start : start + 512])
        tree = root_tree([part[-1]]).with_prefix([part])
        output = runner.forward([0], tree, scored=np.arange(len(part))[None] == len(part) - 1)
        runner.commit(0, range(len(part)))
    return float(output.logits[0, first] - output.logits[0, second])
