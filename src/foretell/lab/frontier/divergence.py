"""What a way changes: its next-token distributions beside the exact model's, on the answers that it writes itself."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float, Int

from foretell.api import Model
from foretell.bench.competitor import Conversation, GenerationSettings, MethodCompetitor, load_drafts
from foretell.bench.metrics import mean_fidelity_loss
from foretell.bench.questions import Question
from foretell.bench.schema import FrozenModel, MeanFidelityLoss, QuestionResult
from foretell.bench.step import pass_bytes
from foretell.lab.frontier.ways import Way
from foretell.model.cache.policy import parse_target_policy
from foretell.verify.comparison import compare_logits
from foretell.verify.precision import read_sequence

Tensor = torch.Tensor
_Parts = Iterator[tuple[Float[Tensor, "t v"], Float[Tensor, "t v"], Int[Tensor, " t"]]]


class WayPrice(FrozenModel):
    """The price of a way, 0 for a lossless one, and what was predicted of its gain."""

    way: str
    family: str
    lossless: bool
    predicted_gain: float | None = None
    """In time, by the roofline model, which knows of the run how long plain decoding took."""
    bytes_gain: float | None
    """Bytes of weights and cache that a pass of the exact model moves over those of a pass of the way."""
    kl: float
    """KL(way || exact) per token, in nats."""
    total_variation: float
    changed_tokens: float
    """Share of tokens of the way's greedy answers that the exact model would not have chosen after the same text."""
    answer_perplexity: float
    """Of the way's greedy answers under the exact model."""


def price_of_model(
    way: Way, model: Model, exact: Model, results: Sequence[QuestionResult], questions: Mapping[str, Question]
) -> dict[str, Any]:
    """The price of another model, or of another cache: both read the answers that the way wrote."""
    one_by_one = way.options.kv_cache_policy is not None
    found = compare_logits(
        chain.from_iterable(
            _both(exact, model, prompt, answer, one_by_one) for prompt, answer in _texts(model, results, questions)
        )
    )
    return {
        "kl": found.kl, "total_variation": found.total_variation, "changed_tokens": 1 - found.same_top,
        "answer_perplexity": found.quantized_perplexity,
    }  # fmt: skip


def price_of_method(
    way: Way,
    exact: Model,
    results: Sequence[QuestionResult],
    questions: Mapping[str, Question],
    settings: GenerationSettings,
) -> dict[str, Any]:
    """The price of a method of the catalogue: of a lossy one the deviations that its acceptor reports, KL and total
    variation of answers sampled at temperature 1, changed tokens of the greedy answers.
    """
    texts = list(_texts(exact, results, questions))
    own = compare_logits(chain.from_iterable(_both(exact, exact, *text, False) for text in texts))
    greedy = mean_fidelity_loss(results)
    sampled = None if greedy is None else _sampled_loss(way, exact, results, questions, settings)
    return {
        "kl": 0.0 if sampled is None else sampled.kl,
        "total_variation": 0.0 if sampled is None else sampled.total_variation,
        "changed_tokens": 0.0 if greedy is None else greedy.changed,
        "answer_perplexity": own.perplexity,
    }


def _sampled_loss(
    way: Way,
    exact: Model,
    results: Sequence[QuestionResult],
    questions: Mapping[str, Question],
    settings: GenerationSettings,
) -> MeanFidelityLoss | None:
    drafts = load_drafts(",".join(way.drafts), exact.precision, "cpu")
    competitor = MethodCompetitor(exact, way.spec, settings, drafts)
    found = []
    for result in results:
        question = questions[result.question]
        answers = competitor.answer(question, None)
        found.append(result.model_copy(update={"answers": answers}))
    return mean_fidelity_loss(found)


def bytes_gain(way: Way, model: Model, exact: Model, context: int, passes: float) -> float:
    """Bytes per token of the exact model over those of a way; `passes`: of the way's model per token."""
    policy = way.options.kv_cache_policy
    kept = context if policy is None else parse_target_policy(policy).tokens_read(context)
    return pass_bytes(exact, 1, context) / (pass_bytes(model, 1, kept) * passes)


def _texts(
    model: Model, results: Sequence[QuestionResult], questions: Mapping[str, Question]
) -> Iterator[tuple[list[int], tuple[int, ...]]]:
    """Prompts and answers of the first turns."""
    for result in results:
        if result.answers and len(result.answers[0].tokens) > 1:
            yield Conversation(model).add_user(questions[result.question].turns[0]), result.answers[0].tokens


def _both(exact: Model, model: Model, prompt: Sequence[int], answer: Sequence[int], one_by_one: bool) -> _Parts:
    """Logits of the way and of the exact model at every token of an answer, and the tokens."""
    sequence, first = torch.tensor([*prompt, *answer]), len(prompt) - 1
    read = zip(
        read_sequence(model.runner(), sequence, first, one_by_one), read_sequence(exact.runner(), sequence, first),
        strict=True,
    )  # fmt: skip
    for (q, targets), (p, _) in read:
        yield q, p, targets
