"""Record once: the target's greedy answers to a workload, with its best scores at every token."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Bool

from foretell.api import Model
from foretell.bench.competitor import TracingRunner, conversation
from foretell.bench.questions import Question, QuestionSet
from foretell.bench.recording import RecordedAnswer, RecordedQuestion, RecordingSettings
from foretell.core.context import ModelOutput
from foretell.core.tree import TokenTree
from foretell.engine.engine import Engine, Request, Update
from foretell.tokenizer.codec import Message
from foretell.utils.store import RunStore


class Heard(TracingRunner):
    """Also remembers what the last pass gave."""

    output: ModelOutput

    def forward(
        self,
        rows: Sequence[int],
        tree: TokenTree,
        *,
        active: Bool[np.ndarray, "b n"] | None = None,
        scored: Bool[np.ndarray, "b n"] | None = None,
        hidden_layers: Sequence[int] = (),
    ) -> ModelOutput:
        """Read nodes of a tree; see `Runner.forward`."""
        self.output = super().forward(rows, tree, active=active, scored=scored, hidden_layers=hidden_layers)
        return self.output


def recording_settings(
    model: Model, tasks: QuestionSet, questions: int, max_new_tokens: int, top_k: int
) -> RecordingSettings:
    """What a recording of these questions is headed with."""
    return RecordingSettings(
        model=model.name,
        dtype=model.precision,
        tasks=tasks.source,
        digest=tasks.digest,
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
    setting: RecordingSettings,
    store: RunStore[RecordedQuestion],
    tick: Callable[[str], None],
) -> None:
    """Answer every question that the store does not hold yet.

    Raises:
        ValueError: a question does not fit the model.
    """
    done = {r.question for r in store.records}
    for question in questions:
        if question.id not in done:
            store.append(_record_question(model, question, setting))
        tick(f"{question.category} {question.id}")


def _record_question(model: Model, question: Question, setting: RecordingSettings) -> RecordedQuestion:
    heard = Heard(model.runner())
    engine = Engine(heard, model.method(), rows=1)
    messages, turns = list[Message](), list[RecordedAnswer]()
    for text in question.turns:
        messages.append({"role": "user", "content": text})
        prompt = conversation(model, messages)
        best, scores = list[np.ndarray](), list[np.ndarray]()

        def note(update: Update, best: list[np.ndarray] = best, scores: list[np.ndarray] = scores) -> None:
            top = torch.log_softmax(heard.output.logits[-1].float(), -1).topk(setting.top_k)
            best.append(top.indices.cpu().numpy())
            scores.append(top.values.cpu().numpy())

        (done,) = engine.complete([Request(prompt, max_new_tokens=setting.max_new_tokens, eos=model.eos)], note)
        turns.append(RecordedAnswer.pack(prompt, done.tokens, np.stack(best), np.stack(scores)))
        messages.append({"role": "assistant", "content": model.codec.decode(done.tokens)})
    return RecordedQuestion(
        question=question.id, category=question.category, group=question.group, answers=tuple(turns)
    )
