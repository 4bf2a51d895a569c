"""What the draft budget did, and why not more."""

from collections import Counter
from dataclasses import dataclass, field

NO_CHOICE, LOAD, MEASURED, COST = "no_choice", "load", "measured", "cost"
REASONS = NO_CHOICE, LOAD, MEASURED, COST
"""Why a request got no drafts in a step: it may have none; more requests than `disable_by_batch_size`; a plain pass is
measured, or none was before a prompt is read; drafts would not pay, or cost a request more than it may lose.
"""


@dataclass
class BudgetStatistics:
    """Sums over all steps that decode."""

    steps: int = 0
    drafting_steps: int = 0
    """Steps with drafts to verify."""
    trials: int = 0
    """Steps in which drafters that do not pay were tried."""
    switched_on: int = 0
    """How often a drafter was asked again at a load where it had not paid."""
    switched_off: int = 0
    nodes_drafted: int = 0
    nodes_verified: int = 0
    undrafted: Counter[str] = field(default_factory=Counter)
    """Steps of requests without drafts, by reason."""


@dataclass(frozen=True)
class Forecast:
    """What was expected of the last step."""

    seconds: float = 0.0
    plain_seconds: float = 0.0
    """Of the step without drafts."""
    tokens: float | None = 0.0
    """New ones; None: a method drafted that the budget does not govern."""
