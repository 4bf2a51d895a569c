"""The three checks of a method, on one model."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from foretell.api import Model
from foretell.catalogue import catalogue
from foretell.catalogue.config import SpeculativeConfig
from foretell.core.sampling import SamplingParams
from foretell.engine.engine import Request
from foretell.engine.method import AnyMethod
from foretell.verify.batch_invariance import BatchInvariance, rounding_explains
from foretell.verify.classifier import DivergenceClassifier, TokenDivergence, mean_total_variation
from foretell.verify.distribution import DistributionTest, ExactDistribution, check_distribution, exact_distribution
from foretell.verify.greedy_equality import GreedyEquality
from foretell.verify.prompts import PROMPTS, SHORT_PROMPTS
from foretell.verify.run import Result, run, tokens_per_pass

MethodFactory = Callable[[], AnyMethod]
"""Builds a method afresh: what one run taught its drafter must not help the next."""


@dataclass(frozen=True)
class VerifySettings:
    """How hard to look.

    `effect`: the total variation whose chance to be seen is reported.

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
    """What the checks of one method found."""

    method: str
    lossless: bool
    """What the method claims."""
    greedy_equality: GreedyEquality
    distribution: DistributionTest
    batch_invariance: BatchInvariance
    seconds: float

    @property
    def passed(self) -> bool:
        """All three checks found nothing."""
        return self.greedy_equality.passed and self.distribution.passed and self.batch_invariance.passed


class Verifier:
    """Checks methods of one model; what plain decoding says is computed once."""

    def __init__(self, model: Model, settings: VerifySettings | None = None) -> None:
        self.model, self.settings = model, settings or VerifySettings()
        self._runner = model.runner()
        self._classifier = DivergenceClassifier(self._runner, model.precision, model.codec.decode)

    def check(self, make_method: MethodFactory) -> VerifyReport:
        """Run the three checks on the method that `make` builds."""
        started, method = time.perf_counter(), make_method()
        alone = self._run_alone(make_method, self._greedy)
        identity = GreedyEquality(
            prompts=len(alone),
            tokens=sum(len(r.tokens) for r in alone),
            tokens_per_pass=tokens_per_pass(alone),
            divergences=self._compare(self._plain, alone),
        )
        s = self.settings
        distribution = check_distribution(self._runner, make_method, self._exact, s.samples, s.seed, s.effect_size)
        company = self._batch_invariance(make_method, alone)
        return VerifyReport(
            method.name, method.lossless, identity, distribution, company, time.perf_counter() - started
        )

    def _batch_invariance(self, make_method: MethodFactory, alone: Sequence[Result]) -> BatchInvariance:
        sampled_alone = self._run_alone(make_method, self._sampled)
        count = len(self._greedy) + len(self._sampled)
        rows = max(2, count * 2 // 3)
        together = run(self._runner, make_method(), [*self._sampled, *self._greedy], rows)
        sampled, greedy = together[: len(self._sampled)], together[len(self._sampled) :]
        differ, p_value = rounding_explains(
            [r.tokens for r in sampled_alone], [r.tokens for r in sampled], self._rounding_variation
        )
        return BatchInvariance(len(greedy), len(sampled), rows, self._compare(alone, greedy), differ, p_value)

    def _run_alone(self, make_method: MethodFactory, requests: Sequence[Request]) -> list[Result]:
        return [run(self._runner, make_method(), [r], rows=1)[0] for r in requests]

    def _compare(self, expected: Sequence[Result], found: Sequence[Result]) -> tuple[TokenDivergence, ...]:
        triples = enumerate(zip(self._greedy, expected, found, strict=True))
        judged = (self._classifier.classify(i, r.prompt, a.tokens, b.tokens) for i, (r, a, b) in triples)
        return tuple(d for d in judged if d is not None)

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
    def _plain(self) -> list[Result]:
        return self._run_alone(self.model.method, self._greedy)

    @cached_property
    def _exact(self) -> ExactDistribution:
        """Of the short texts, one whose law rounding hardly moves, and of those the least certain."""
        texts = [(t, self.model.tokens(t, raw=True)) for t in SHORT_PROMPTS]
        distributions = [exact_distribution(self._runner, text, tokens) for text, tokens in texts if tokens]
        return max(
            distributions, key=lambda distribution: (-round(distribution.rounding_variation, 2), distribution.entropy)
        )

    @cached_property
    def _rounding_variation(self) -> float:
        """How much rounding blurs the distribution of a token, as total variation."""
        readings = [
            self._classifier.logits_both_ways([*r.prompt, *a.tokens])
            for r, a in zip(self._greedy[:1], self._plain, strict=False)
        ]
        return max(mean_total_variation(a, b) for a, b in readings)


def buildable_methods(model: Model, drafts: Sequence[Model | Path] = (), references: Sequence[str] = ()) -> list[str]:
    """Methods of the catalogue that can be built from what is there."""

    def can(name: str) -> bool:
        try:
            model.method(name, drafts=drafts, references=references)
        except ValueError:
            return False
        return True

    return [name for name in catalogue() if can(name)]


def checks(
    model: Model,
    names: Sequence[str],
    settings: VerifySettings | None = None,
    *,
    config: SpeculativeConfig | None = None,
    drafts: Sequence[Model | Path] = (),
    references: Sequence[str] = (),
) -> Iterator[VerifyReport]:
    """As `verify`, one report after another."""
    verifier = Verifier(model, settings)
    for name in names or buildable_methods(model, drafts, references):
        yield verifier.check(lambda n=name: model.method(n, config, drafts=drafts, references=references))  # type: ignore[misc]


def verify(
    model: Model,
    names: Sequence[str] = (),
    settings: VerifySettings | None = None,
    *,
    config: SpeculativeConfig | None = None,
    drafts: Sequence[Model | Path] = (),
    references: Sequence[str] = (),
) -> list[VerifyReport]:
    """Check that methods change nothing about what a model says.

    `names`: methods of the catalogue; none: all that can be built from the target, `drafts` and `references`.

    Raises:
        ValueError: an unknown method, or one that needs what is not there.
    """
    return list(checks(model, names, settings, config=config, drafts=drafts, references=references))
