"""A run: every competitor answers every question, interleaved, so that drift of the machine affects all alike."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from foretell.api import Model
from foretell.bench.competitor import PLAIN, Competitor, Conversation
from foretell.bench.questions import Question
from foretell.bench.schema import AnswerDivergence, QuestionResult
from foretell.bench.tracing import prefill
from foretell.utils.store import RunStore
from foretell.verify.classifier import first_difference

ProgressCallback = Callable[[str], None]
_SHIFT = 3
"""Places by which the order of the competitors is rotated from repeat to repeat."""


@dataclass(frozen=True)
class BenchRun:
    """Competitors, number of repeats, and the target by precision, which scores divergences.

    The first competitor is plain decoding. `batch`: questions answered at a time; the last ones may be fewer. `notes`:
    which methods use what was named for all of them, and which are left out.
    """

    competitors: Sequence[Competitor]
    models: Mapping[str, Model]
    repeats: int
    batch: int = 1
    notes: tuple[str, ...] = ()

    @property
    def answers_per_question(self) -> int:
        """Of all competitors and repeats."""
        return len(self.competitors) * self.repeats

    def run(
        self,
        questions: Sequence[Question],
        store: RunStore[QuestionResult],
        report: ProgressCallback,
        seconds: float = inf,
    ) -> None:
        """Answer every question whose result is not in the store yet; none after the first that would, with the time of
        the slowest one before, end after these seconds.
        """
        done = {(r.question, r.competitor, r.repeat): r for r in store.records}
        if len(done) < len(questions) * self.answers_per_question:
            self._warm_up()
        started, slowest = time.monotonic(), 0.0
        for start in range(0, len(questions), self.batch):
            begun = time.monotonic()
            if begun - started + slowest > seconds:
                break
            together = questions[start : start + self.batch]
            for repeat in range(self.repeats):
                for competitor in self._order(repeat):
                    keys = [(q.id, competitor.name, repeat) for q in together]
                    if any(key not in done for key in keys):
                        for key, result in zip(keys, self._answer(competitor, together, repeat, done), strict=True):
                            if key not in done:
                                done[key] = result
                                store.append(result)
                    for question in together:
                        report(f"{question.category} {question.id}: {competitor.name}")
            slowest = max(slowest, time.monotonic() - begun)

    def _warm_up(self) -> None:
        """Answer a short question that is not counted: first calls allocate, compile and page in."""
        question = Question("warm-up", "warm-up", ("Count from one to ten, then count from one to ten again.",))
        plain = None
        for competitor in self.competitors:
            answers = competitor.answer(question, plain, -1)
            plain = plain or _result(competitor, question, 0).model_copy(update={"answers": answers})

    def _order(self, repeat: int) -> Sequence[Competitor]:
        """Rotated, so that neighbours change from repeat to repeat.

        In the first repeat plain decoding comes first, since peers write as many tokens as it.
        """
        shift = repeat * _SHIFT % len(self.competitors)
        return [*self.competitors[shift:], *self.competitors[:shift]]

    def _answer(
        self,
        competitor: Competitor,
        questions: Sequence[Question],
        repeat: int,
        done: Mapping[tuple[str, str, int], QuestionResult],
    ) -> list[QuestionResult]:
        """Results of questions answered together; one that does not fit the model fails with all of them."""
        method, precision = competitor.name.split("/")
        same = [done.get((q.id, f"{PLAIN}/{precision}", 0)) for q in questions]
        first = [done.get((q.id, self.competitors[0].name, 0)) for q in questions]
        plain = [a or b for a, b in zip(same, first, strict=True)]
        results = [_result(competitor, question, repeat) for question in questions]
        try:
            answers = competitor.answer_together(questions, plain, repeat)
        except ValueError as error:
            return [r.model_copy(update={"error": " ".join(str(error).split())}) for r in results]
        results = [r.model_copy(update={"answers": a}) for r, a in zip(results, answers, strict=True)]
        if method == PLAIN or repeat:
            return results
        models = [self.models[precision if s else next(iter(self.models))] for s in same]
        return [_compared(*each) for each in zip(results, plain, questions, models, strict=True)]


def _compared(result: QuestionResult, plain: QuestionResult | None, question: Question, model: Model) -> QuestionResult:
    """A result with its first difference from plain decoding, if that has an answer."""
    if plain is None or plain.error:
        return result
    return result.model_copy(update={"compared": True, "divergence": first_divergence(result, plain, question, model)})


def _result(competitor: Competitor, question: Question, repeat: int) -> QuestionResult:
    """A result without answers."""
    return QuestionResult(
        question=question.id,
        category=question.category,
        group=question.group,
        competitor=competitor.name,
        repeat=repeat,
    )


def first_divergence(
    result: QuestionResult, plain: QuestionResult, question: Question, model: Model
) -> AnswerDivergence | None:
    """The first token in which the answers differ, with the margin of the target's logits; None if there is none."""
    conversation = Conversation(model)
    for turn, (mine, theirs) in enumerate(zip(result.answers, plain.answers, strict=True)):
        prompt = conversation.add_user(question.turns[turn])
        at = first_difference(mine.tokens, theirs.tokens)
        if at is not None:
            if at == min(len(mine.tokens), len(theirs.tokens)):
                return AnswerDivergence(
                    question=question.id, turn=turn, position=at, token=None, plain_token=None, margin=None
                )
            token, plain_token = mine.tokens[at], theirs.tokens[at]
            logits = prefill(model.runner(), [*prompt, *theirs.tokens[:at]])
            return AnswerDivergence(
                question=question.id,
                turn=turn,
                position=at,
                token=token,
                plain_token=plain_token,
                margin=float(logits[plain_token] - logits[token]),
            )
        conversation.add_answer(theirs.tokens)
    return None
