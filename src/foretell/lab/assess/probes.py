"""Knowledge probes: facts and clozes with one right continuation among four, asked in two ways and with noise."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
from jaxtyping import Float
from pydantic import Field

from foretell.api import Model
from foretell.lab.assess.choices import Choice, score_choices
from foretell.lab.assess.confidence import calibration_error, reliability
from foretell.lab.assess.noise import NOISES, mention
from foretell.utils.validation import FrozenModel, validate_json

CLEAN, PARAPHRASE, DISTRACTOR = "as written", "in other words", "wrong candidate before"
"""Conditions beside the kinds of noise."""


class Probe(FrozenModel):
    """A line of a file of probes: two prompts or more with one answer. The answer follows a prompt after a space."""

    id: str
    relation: str
    prompts: tuple[str, ...] = Field(min_length=1)
    answer: str = Field(min_length=1)
    distractors: tuple[str, ...] = Field(min_length=1)

    @property
    def candidates(self) -> tuple[str, ...]:
        """The answer, then the wrong ones."""
        return (self.answer, *self.distractors)


def read_probes(path: Path | None = None) -> tuple[Probe, ...]:
    """The probes of a file of JSON lines, or those that come with the package.

    Raises:
        ValueError: a line is no probe, or there are none.
    """
    source = files("foretell.lab.assess").joinpath("probes.jsonl") if path is None else path
    lines = source.read_bytes().splitlines()
    probes = tuple(
        validate_json(Probe, line, f"{source}, line {i}: no probe") for i, line in enumerate(lines, 1) if line.strip()
    )
    if not probes:
        raise ValueError(f"{source}: no probes in this file; write one JSON object per line")
    return probes


@dataclass(frozen=True)
class ProbeAnswers:
    """A model's answers to probes under one condition: the distribution over the candidates, the right one first."""

    probabilities: tuple[Float[np.ndarray, " c"], ...]

    @property
    def chosen(self) -> list[int]:
        """The most probable candidate of every probe, 0 if it is the right one."""
        return [int(p.argmax()) for p in self.probabilities]

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return float(np.mean([c == 0 for c in self.chosen]))

    @property
    def confidence(self) -> float:
        """Mean probability of the chosen candidates, among the candidates."""
        return float(np.mean([p.max() for p in self.probabilities]))

    @property
    def ece(self) -> float:
        """Expected calibration error of that probability."""
        right = [c == 0 for c in self.chosen]
        return calibration_error(reliability([float(p.max()) for p in self.probabilities], right))

    @property
    def margin(self) -> float:
        """Mean of the log-probability of the right candidate minus that of the best wrong one, in nats."""
        return float(np.mean([np.log(p[0]) - np.log(p[1:].max()) for p in self.probabilities]))

    def flips(self, other: "ProbeAnswers") -> float:
        """Share of probes that the other answers choose another candidate for."""
        return float(np.mean([a != b for a, b in zip(self.chosen, other.chosen, strict=True)]))

    def new_errors(self, other: "ProbeAnswers") -> list[float]:
        """Confidences of the other's wrong answers to probes that are right here."""
        pairs = zip(self.chosen, other.chosen, other.probabilities, strict=True)
        return [float(p.max()) for mine, theirs, p in pairs if mine == 0 and theirs != 0]


def ask(
    model: Model, probes: Sequence[Probe], seed: int = 0, on_read: Callable[[int], None] = lambda tokens: None
) -> dict[str, ProbeAnswers]:
    """A model's answers by condition: the first prompt as written and with every kind of noise, behind a sentence that
    names a wrong candidate, and the second prompt. `on_read` is called with the tokens of every condition.
    """
    runner, answers = model.runner(), {}
    for condition, prompts in conditions(probes, seed):
        choices = [Choice.of(model.codec, text, p.candidates) for text, p in zip(prompts, probes, strict=True)]
        scores = score_choices(runner, choices, model.config.context)
        answers[condition] = ProbeAnswers(tuple(_softmax(s) for s in scores))
        on_read(sum(len(c.prompt) for c in choices))
    return answers


def conditions(probes: Sequence[Probe], seed: int = 0) -> Iterator[tuple[str, list[str]]]:
    """Names of conditions with the prompts that they make."""
    yield CLEAN, [p.prompts[0] for p in probes]
    yield PARAPHRASE, [p.prompts[-1] for p in probes]
    for name, change in NOISES.items():
        yield name, [change(p.prompts[0], random.Random(f"{seed} {name} {p.id}")) for p in probes]
    yield DISTRACTOR, [f"{mention(p.distractors[0])} {p.prompts[0]}" for p in probes]


def accuracy_by_relation(probes: Sequence[Probe], answers: ProbeAnswers) -> Mapping[str, float]:
    """Share of right answers of every relation, in the order of the file."""
    chosen = list(zip(probes, answers.chosen, strict=True))
    relations = dict.fromkeys(p.relation for p in probes)
    return {r: float(np.mean([c == 0 for p, c in chosen if p.relation == r])) for r in relations}


def _softmax(scores: Float[np.ndarray, " c"]) -> Float[np.ndarray, " c"]:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()
