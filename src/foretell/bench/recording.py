"""Recordings: the target's greedy answers to a workload, with its best tokens at every position."""

import base64
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.api import Model
from foretell.bench.competitor import Conversation
from foretell.bench.questions import Question, QuestionSet
from foretell.bench.schema import BenchSettings, FileModel
from foretell.bench.tracing import TracingRunner
from foretell.engine.engine import Engine
from foretell.engine.request import Request, Update
from foretell.utils.store import RunStore, read_records, read_settings
from foretell.utils.validation import FrozenModel


class RecordedAnswer(FrozenModel):
    """One answer: the prompt, the greedy tokens, and the most probable tokens at each of their positions."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    top_tokens: str
    """Token ids `[tokens, k]`, best first: base64 of little-endian int32."""
    top_logprobs: str
    """Their log-probabilities: base64 of little-endian float32."""

    @staticmethod
    def pack(
        prompt: Sequence[int],
        tokens: Sequence[int],
        top_tokens: Int[np.ndarray, "n k"],
        top_logprobs: Float[np.ndarray, "n k"],
    ) -> "RecordedAnswer":
        """Encode arrays."""
        return RecordedAnswer(
            prompt=tuple(prompt),
            tokens=tuple(tokens),
            top_tokens=base64.b64encode(top_tokens.astype("<i4").tobytes()).decode(),
            top_logprobs=base64.b64encode(top_logprobs.astype("<f4").tobytes()).decode(),
        )

    def unpack(self) -> tuple[Int[np.ndarray, "n k"], Float[np.ndarray, "n k"]]:
        """Decode `top_tokens` and `top_logprobs`.

        Raises:
            ValueError: the arrays do not fit the tokens.
        """
        try:
            tokens = np.frombuffer(base64.b64decode(self.top_tokens, validate=True), "<i4")
            logprobs = np.frombuffer(base64.b64decode(self.top_logprobs, validate=True), "<f4")
            return tokens.reshape(len(self.tokens), -1), logprobs.reshape(len(self.tokens), -1)
        except ValueError as error:
            raise ValueError(f"a recorded distribution is damaged ({error}); record the workload again") from error


class RecordedQuestion(FrozenModel):
    """The answers to all turns of one question."""

    question: str
    category: str
    group: str
    answers: tuple[RecordedAnswer, ...]


class RecordingSettings(FileModel):
    """Settings of a recording, and the properties of the model that replay needs."""

    format: str = "foretell recording 2"
    model: str
    dtype: str
    tasks: str
    digest: str
    max_new_tokens: int
    top_k: int
    vocab: int
    context: int
    eos: tuple[int, ...]
    questions: int
    """Questions of the complete recording."""

    def bench_settings(self) -> BenchSettings:
        """Settings of results that come from a replay."""
        return BenchSettings(
            model=self.model, tasks=self.tasks, digest=self.digest, max_new_tokens=self.max_new_tokens,
            temperature=0.0, seed=0, threads=1, dtypes=(self.dtype,),
        )  # fmt: skip


def load_recording(folder: Path) -> tuple[RecordingSettings, list[RecordedQuestion]]:
    """A complete recording.

    Raises:
        ValueError: there is none here, it is damaged, or it was interrupted.
    """
    settings = read_settings(folder, RecordingSettings)
    questions = list(read_records(folder, RecordedQuestion))
    if len(questions) < settings.questions:
        raise ValueError(
            f"{folder}: the recording was interrupted, it holds {len(questions)} of {settings.questions} questions; "
            "run `foretell bench record` with the same settings and --out to finish it"
        )
    return settings, questions


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
