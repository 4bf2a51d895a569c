"""The three checks of a method on one model: greedy equality, distribution, batch invariance."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from foretell.api import Model
from foretell.catalogue import catalogue
from foretell.catalogue.config import SpeculativeConfig
from foretell.core.sampling import SamplingParams
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod
from foretell.engine.request import Completion, Request
from foretell.verify.batch_invariance import BatchInvariance, compare_sampled
from foretell.verify.classifier import DivergenceClassifier, TokenDivergence, mean_total_variation
from foretell.verify.distribution import DistributionTest, ExactDistribution, check_distribution, exact_distribution
from foretell.verify.greedy_equality import GreedyEquality
from foretell.verify.prompts import PROMPTS, SHORT_PROMPTS

MethodFactory = Callable[[], AnyMethod]
"""Builds a method afresh, so that its drafter has no state of an earlier run."""


@dataclass(frozen=True)
class VerifySettings:
    """Prompts and sample sizes of the checks.

    `effect_size`: the total variation for which the power of the distribution test is reported.

    Raises:
        ValueError: no prompts, or a count below 1.
    """

    prompts: tuple[str, ...] = PROMPTS
    max_new_tokens: int = 48
    samples: int = 1500
    seed: int = 0
    effect_size: float = 0.05

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError("the checks need at least one prompt")
        for name in ("max_new_tokens", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, found {getattr(self, name)}")


@dataclass(frozen=True)
class VerifyReport:
    """Results of the three checks of one method."""

    method: str
    lossless: bool
    """Whether the method claims to be lossless."""
    greedy_equality: GreedyEquality
    distribution: DistributionTest
    batch_invariance: BatchInvariance
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether all three checks passed."""
        return self.greedy_equality.passed and self.distribution.passed and self.batch_invariance.passed


class Verifier:
    """Checks methods of one model; answers of plain decoding are computed once."""

    def __init__(self, model: Model, settings: VerifySettings | None = None) -> None:
        self.model, self.settings = model, settings or VerifySettings()
        self._runner = model.runner()
        self._classifier = DivergenceClassifier(self._runner, model.precision, model.codec.decode)

    def check(self, make_method: MethodFactory) -> VerifyReport:
        """Run the three checks on the method that `make_method` builds."""
        started, method, s = time.perf_counter(), make_method(), self.settings
        alone = self._complete_alone(make_method, self._greedy)
        greedy_equality = GreedyEquality.of(alone, self._compare(self._plain, alone))
        distribution = check_distribution(self._runner, make_method(), self._exact, s.samples, s.seed, s.effect_size)
        batch_invariance = self._check_batch(make_method, alone)
        seconds = time.perf_counter() - started
        return VerifyReport(method.name, method.lossless, greedy_equality, distribution, batch_invariance, seconds)

    def _check_batch(self, make_method: MethodFactory, greedy_alone: Sequence[Completion]) -> BatchInvariance:
        sampled_alone = self._complete_alone(make_method, self._sampled)
        requests = [*self._sampled, *self._greedy]
        rows = max(2, len(requests) * 2 // 3)  # fewer rows than requests: some join while others are running
        batched = Engine(self._runner, make_method(), rows=rows).complete(requests)
        sampled, greedy = batched[: len(self._sampled)], batched[len(self._sampled) :]
        differences, p_value = compare_sampled(
            [c.tokens for c in sampled_alone], [c.tokens for c in sampled], self._rounding_variation
        )
        divergences = self._compare(greedy_alone, greedy)
        return BatchInvariance(len(greedy), len(sampled), rows, divergences, differences, p_value)

    def _complete_alone(self, make_method: MethodFactory, requests: Sequence[Request]) -> list[Completion]:
        return [Engine(self._runner, make_method(), rows=1).complete([r])[0] for r in requests]

    def _compare(self, expected: Sequence[Completion], actual: Sequence[Completion]) -> tuple[TokenDivergence, ...]:
        triples = enumerate(zip(self._greedy, expected, actual, strict=True))
        divergences = (self._classifier.classify(i, r.prompt, a.tokens, b.tokens) for i, (r, a, b) in triples)
        return tuple(d for d in divergences if d is not None)

    @cached_property
    def _greedy(self) -> list[Request]:
        return [self.model.request(p, max_new_tokens=self.settings.max_new_tokens) for p in self.settings.prompts]

    @cached_property
    def _sampled(self) -> list[Request]:
        """The same prompts at temperature 1, with seeds of their own and unequal lengths."""
        longest = self.settings.max_new_tokens
        return [
            replace(
                r,
                sampling_params=SamplingParams(temperature=1.0, top_p=0.95, seed=self.settings.seed + i),
                max_new_tokens=max(1, longest // (2 + i % 3)),
            )
            for i, r in enumerate(self._greedy)
        ]

    @cached_property
    def _plain(self) -> list[Completion]:
        return self._complete_alone(self.model.method, self._greedy)

    @cached_property
    def _exact(self) -> ExactDistribution:
        """Of the short prompts, one whose distribution rounding hardly changes, and of those the highest entropy."""
        prompts = [(t, self.model.tokens(t, raw=True)) for t in SHORT_PROMPTS]
        distributions = [exact_distribution(self._runner, text, tokens) for text, tokens in prompts if tokens]
        return max(distributions, key=lambda d: (-round(d.rounding_variation, 2), d.entropy))

    @cached_property
    def _rounding_variation(self) -> float:
        """Total variation by which rounding changes the distribution of a token."""
        tokens = [*self._greedy[0].prompt, *self._plain[0].tokens]
        return mean_total_variation(*self._classifier.logits_both_ways(tokens))


def buildable_methods(
    model: Model, drafts: Sequence[Model | Path] = (), references: Sequence[str] = ()
) -> dict[str, frozenset[str]]:
    """Methods of the catalogue that can be built with this target, `drafts` and `references`, and their inputs."""
    inputs_of = dict[str, frozenset[str]]()
    for name in catalogue():
        with suppress(ValueError):
            inputs_of[name] = model.method(name, drafts=drafts, references=references, shared=True).inputs
    return inputs_of


def verify(
    model: Model,
    names: Sequence[str] = (),
    settings: VerifySettings | None = None,
    *,
    config: SpeculativeConfig | None = None,
    drafts: Sequence[Model | Path] = (),
    references: Sequence[str] = (),
) -> list[VerifyReport]:
    """Check that methods keep the target's output.

    `names`: methods of the catalogue; none: all that can be built from the target, `drafts` and `references`.

    Raises:
        ValueError: an unknown method, or one that needs what is not there.
    """
    verifier = Verifier(model, settings)

    def factory(name: str) -> MethodFactory:
        return lambda: model.method(name, config, drafts=drafts, references=references, shared=len(names) != 1)

    return [verifier.check(factory(name)) for name in names or buildable_methods(model, drafts, references)]
