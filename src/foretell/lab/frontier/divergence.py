"""What a variant changes: its next-token distributions beside the exact model's, on the answers that it writes."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float, Int

from foretell.api import Model
from foretell.bench.competitor import Conversation, GenerationSettings, MethodCompetitor, load_drafts
from foretell.bench.metrics import mean_fidelity_loss
from foretell.bench.questions import Question
from foretell.bench.schema import MeanFidelityLoss, QuestionResult
from foretell.bench.step import pass_bytes
from foretell.lab.frontier.variants import Variant
from foretell.model.cache.policy import parse_target_policy
from foretell.utils.validation import FrozenModel
from foretell.verify.comparison import compare_logits
from foretell.verify.precision import read_sequence

Tensor = torch.Tensor
_Parts = Iterator[tuple[Float[Tensor, "t v"], Float[Tensor, "t v"], Int[Tensor, " t"]]]


class VariantDivergence(FrozenModel):
    """The divergence of a variant, 0 for a lossless one, and what was predicted of its gain."""

    way: str
    """Name of the variant; `way` and `price` are keys of saved files."""
    family: str
    lossless: bool
    predicted_gain: float | None = None
    """In time, by the roofline model, which knows of the run how long plain decoding took."""
    bytes_gain: float | None
    """Bytes of weights and cache that a pass of the exact model moves over those of a pass of the variant."""
    kl: float
    """KL(variant || exact) per token, in nats."""
    total_variation: float
    changed_tokens: float
    """Share of tokens of its greedy answers that the exact model would not have chosen after the same text."""
    answer_perplexity: float
    """Of its greedy answers under the exact model."""


def divergence_of_model(
    variant: Variant, model: Model, exact: Model, results: Sequence[QuestionResult], questions: Mapping[str, Question]
) -> dict[str, Any]:
    """The divergence of another model, or of another cache: both read the answers that the variant wrote."""
    one_by_one = variant.options.kv_cache_policy is not None
    comparison = compare_logits(
        chain.from_iterable(
            _both(exact, model, prompt, answer, one_by_one) for prompt, answer in _texts(model, results, questions)
        )
    )
    return {
        "kl": comparison.kl, "total_variation": comparison.total_variation, "changed_tokens": 1 - comparison.same_top,
        "answer_perplexity": comparison.quantized_perplexity,
    }  # fmt: skip


def divergence_of_method(
    variant: Variant,
    exact: Model,
    results: Sequence[QuestionResult],
    questions: Mapping[str, Question],
    settings: GenerationSettings,
) -> dict[str, Any]:
    """The divergence of a method of the catalogue: of a lossy one the deviations that its acceptor reports, KL and
    total variation of answers sampled at temperature 1, changed tokens of the greedy answers.
    """
    texts = list(_texts(exact, results, questions))
    own = compare_logits(chain.from_iterable(_both(exact, exact, *text, False) for text in texts))
    greedy = mean_fidelity_loss(results)
    sampled = None if greedy is None else _sampled_loss(variant, exact, results, questions, settings)
    return {
        "kl": 0.0 if sampled is None else sampled.kl,
        "total_variation": 0.0 if sampled is None else sampled.total_variation,
        "changed_tokens": 0.0 if greedy is None else greedy.changed,
        "answer_perplexity": own.perplexity,
    }


def _sampled_loss(
    variant: Variant,
    exact: Model,
    results: Sequence[QuestionResult],
    questions: Mapping[str, Question],
    settings: GenerationSettings,
) -> MeanFidelityLoss | None:
    drafts = load_drafts(",".join(variant.drafts), exact.precision, "cpu")
    competitor = MethodCompetitor(exact, variant.spec, settings, drafts)
    sampled = []
    for result in results:
        question = questions[result.question]
        answers = competitor.answer(question, None)
        sampled.append(result.model_copy(update={"answers": answers}))
    return mean_fidelity_loss(sampled)


def bytes_gain(variant: Variant, model: Model, exact: Model, context: int, passes: float) -> float:
    """Bytes per token of the exact model over those of a variant; `passes`: of the variant's model per token."""
    policy = variant.options.kv_cache_policy
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
    """Logits of the variant and of the exact model at every token of an answer, and the tokens."""
    sequence, first = torch.tensor([*prompt, *answer]), len(prompt) - 1
    read = zip(
        read_sequence(model.runner(), sequence, first, one_by_one), read_sequence(exact.runner(), sequence, first),
        strict=True,
    )  # fmt: skip
    for (q, targets), (p, _) in read:
        yield q, p, targets
