"""Record the target's greedy answers to a workload, with its best tokens at every position."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from foretell.api import Model
from foretell.bench.competitor import Conversation
from foretell.bench.questions import Question, QuestionSet
from foretell.bench.recording import RecordedAnswer, RecordedQuestion, RecordingSettings
from foretell.bench.tracing import TracingRunner
from foretell.engine.engine import Engine
from foretell.engine.request import Request, Update
from foretell.utils.store import RunStore


def recording_settings(
    model: Model, question_set: QuestionSet, questions: int, max_new_tokens: int, top_k: int
) -> RecordingSettings:
    """Settings of a recording of the first `questions` questions."""
    return RecordingSettings(
        model=model.name,
        dtype=model.precision,
        tasks=question_set.source,
        digest=question_set.digest,
        max_new_tokens=max_new_tokens,
        top_k=min(top_k, model.config.vocab),
        vocab=model.config.vocab,
        context=model.config.context,
        eos=model.eos,
        questions=questions,
    )


def record_questions(
    model: Model,
    questions: Sequence[Question],
    settings: RecordingSettings,
    store: RunStore[RecordedQuestion],
    report: Callable[[str], None],
) -> None:
    """Answer every question that is not in the store yet.

    Raises:
        ValueError: a question does not fit the model.
    """
    done = {r.question for r in store.records}
    for question in questions:
        if question.id not in done:
            store.append(_record_question(model, question, settings))
        report(f"{question.category} {question.id}")


def _record_question(model: Model, question: Question, settings: RecordingSettings) -> RecordedQuestion:
    runner = TracingRunner(model.runner())
    engine = Engine(runner, model.method(), rows=1)
    conversation, answers = Conversation(model), list[RecordedAnswer]()
    for text in question.turns:
        prompt = conversation.add_user(text)
        tokens, logprobs = list[np.ndarray](), list[np.ndarray]()

        def keep_top(_: Update, tokens: list[np.ndarray] = tokens, logprobs: list[np.ndarray] = logprobs) -> None:
            top = torch.log_softmax(runner.output.logits[-1].float(), -1).topk(settings.top_k)
            tokens.append(top.indices.cpu().numpy())
            logprobs.append(top.values.cpu().numpy())

        request = Request(prompt, max_new_tokens=settings.max_new_tokens, eos=model.eos)
        (completion,) = engine.complete([request], keep_top)
        answers.append(RecordedAnswer.pack(prompt, completion.tokens, np.stack(tokens), np.stack(logprobs)))
        conversation.add_answer(completion.tokens)
    return RecordedQuestion(
        question=question.id, category=question.category, group=question.group, answers=tuple(answers)
    )
