"""A run: every competitor answers every question, interleaved, so that drift of the machine affects all alike."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from foretell.api import Model
from foretell.bench.competitor import PLAIN, Competitor, Conversation
from foretell.bench.questions import Question
from foretell.bench.schema import AnswerDivergence, QuestionResult
from foretell.bench.tracing import prefill
from foretell.utils.store import RunStore

ProgressCallback = Callable[[str], None]
_SHIFT = 3
"""Places by which the order of the competitors is rotated from repeat to repeat."""


@dataclass(frozen=True)
class BenchRun:
    """Competitors, number of repeats, and the target by precision, which scores divergences.

    The first competitor is plain decoding.
    """

    competitors: Sequence[Competitor]
    models: Mapping[str, Model]
    repeats: int

    @property
    def answers_per_question(self) -> int:
        """Of all competitors and repeats."""
        return len(self.competitors) * self.repeats

    def run(self, questions: Sequence[Question], store: RunStore[QuestionResult], report: ProgressCallback) -> None:
        """Answer every question whose result is not in the store yet."""
        done = {(r.question, r.competitor, r.repeat): r for r in store.records}
        if len(done) < len(questions) * self.answers_per_question:
            self._warm_up()
        for question in questions:
            for repeat in range(self.repeats):
                for competitor in self._order(repeat):
                    key = question.id, competitor.name, repeat
                    if key not in done:
                        done[key] = self._answer(competitor, question, repeat, done)
                        store.append(done[key])
                    report(f"{question.category} {question.id}: {competitor.name}")

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
        question: Question,
        repeat: int,
        done: Mapping[tuple[str, str, int], QuestionResult],
    ) -> QuestionResult:
        method, precision = competitor.name.split("/")
        same_precision = done.get((question.id, f"{PLAIN}/{precision}", 0))
        plain = same_precision or done.get((question.id, self.competitors[0].name, 0))
        result = _result(competitor, question, repeat)
        try:
            result = result.model_copy(update={"answers": competitor.answer(question, plain, repeat)})
        except ValueError as error:
            return result.model_copy(update={"error": " ".join(str(error).split())})
        if method == PLAIN or plain is None or plain.error or repeat:
            return result
        model = self.models[precision if same_precision else next(iter(self.models))]
        divergence = first_divergence(result, plain, question, model)
        return result.model_copy(update={"compared": True, "divergence": divergence})


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
        if mine.tokens != theirs.tokens:
            pairs = enumerate(zip(mine.tokens, theirs.tokens, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), None)
            if at is None:
                end = min(len(mine.tokens), len(theirs.tokens))
                return AnswerDivergence(
                    question=question.id, turn=turn, position=end, token=None, plain_token=None, margin=None
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
