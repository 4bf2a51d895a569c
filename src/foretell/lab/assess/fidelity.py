"""Fidelity and calibration on texts: the next-token distributions of a model, beside those of another one."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int

from foretell.api import Model
from foretell.lab.assess.confidence import TokenCalibration, TokenCalibrationSums
from foretell.lab.assess.intervals import Interval, PairedSums
from foretell.verify.comparison import Comparison, compare_logits
from foretell.verify.precision import check_length, logit_parts, read_sequence

Tensor = torch.Tensor
_Parts = Iterator[tuple[Float[Tensor, "t v"], Float[Tensor, "t v"], Int[Tensor, " t"]]]


@dataclass(frozen=True)
class TextAssessment:
    """A model on texts; beside another model with its own calibration and the comparison of each domain."""

    domains: Mapping[str, TokenCalibration]
    overall: TokenCalibration
    compared: Mapping[str, Comparison]
    """By domain; empty without another model."""
    other: TokenCalibration | None = None
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    """Of the changes over all texts; empty without another model."""

    @property
    def mean_kl(self) -> float:
        """Mean over positions of KL(other || model), in nats."""
        total = sum(c.tokens for c in self.compared.values())
        return sum(c.kl * c.tokens for c in self.compared.values()) / total


def assess_texts(
    model: Model,
    against: Model | None,
    domains: Mapping[str, Int[Tensor, "b s"]],
    decoded: bool = False,
    on_read: Callable[[int], None] = lambda tokens: None,
) -> TextAssessment:
    """Read texts with a model, and with the other one if there is one.

    `decoded`: the model reads the second half of every sequence token by token, as it would decode it, and only there
    it is measured. `on_read` is called with the positions that were measured, of both models together.

    Raises:
        ValueError: the two models have other vocabularies, or a sequence does not fit into a context.
    """
    if against is not None and against.config.vocab != model.config.vocab:
        raise ValueError(
            f"{model.name} has {model.config.vocab} tokens and {against.name} {against.config.vocab}: their "
            "distributions cannot be compared; assess each alone"
        )
    overall, other = TokenCalibrationSums(), TokenCalibrationSums()
    calibrated, compared = dict[str, TokenCalibration](), dict[str, Comparison]()
    paired = PairedSums()
    for name, tokens in domains.items():
        check_length(tokens.shape[1], [m for m in (model, against) if m is not None])
        first, here = tokens.shape[1] // 2 if decoded else None, TokenCalibrationSums()
        if against is None:
            runner = model.runner()
            for sequence in tokens:
                for q, targets in read_sequence(runner, sequence, first or 0, one_by_one=decoded):
                    overall.add(q, targets)
                    here.add(q, targets)
                    on_read(len(targets))
        else:
            parts = _told(logit_parts(against, model, tokens, first), on_read)
            compared[name] = compare_logits(_counted(parts, other, (here, overall), paired))
        calibrated[name] = here.result()
    if against is None:
        return TextAssessment(calibrated, overall.result(), compared)
    return TextAssessment(calibrated, overall.result(), compared, other.result(), paired.intervals())


def _told(parts: _Parts, on_read: Callable[[int], None]) -> _Parts:
    for part in parts:
        yield part
        on_read(2 * len(part[2]))


def _counted(
    parts: _Parts, of_other: TokenCalibrationSums, of_model: tuple[TokenCalibrationSums, ...], paired: PairedSums
) -> _Parts:
    """The same parts, counted for the calibration of both models and for the intervals of the changes."""
    for p, q, targets in parts:
        of_other.add(p, targets)
        paired.add(p, q, targets)
        for sums in of_model:
            sums.add(q, targets)
        yield p, q, targets
