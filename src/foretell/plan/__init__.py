"""Plans: answers that several requests write, over an engine that shares their common prefixes."""

from collections.abc import Mapping

from foretell.plan.apar import AparPlan
from foretell.plan.base import Plan, PlanFieldError, PlanReport, PlanRun, PlanTask, question_of
from foretell.plan.driver import PlanEngine
from foretell.plan.skeleton import SkeletonPlan
from foretell.utils.names import unknown
from foretell.utils.validation import parse_object, show, validate

PLANS: Mapping[str, type[Plan]] = {"apar": AparPlan, "skeleton": SkeletonPlan}
"""By their `type`."""


def parse_plan(value: object, source: str = "") -> Plan:
    """A plan by its type, or by an object with its type and options, which may be JSON text.

    Raises:
        ValueError: there is no such plan, or an option is unknown or out of range.
    """
    if isinstance(value, Plan):
        return value
    if isinstance(value, str):
        value = parse_object(value, source) if value.lstrip().startswith("{") else {"type": value}
    if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
        known = ", ".join(PLANS)
        raise ValueError(f"{source or 'plan'}: an object with a type ({known}) was expected, found {show(value)}")
    if value["type"] not in PLANS:
        raise unknown("plan", value["type"], PLANS)
    return validate(PLANS[value["type"]], value, source)


__all__ = [
    "PLANS",
    "AparPlan",
    "Plan",
    "PlanEngine",
    "PlanFieldError",
    "PlanReport",
    "PlanRun",
    "PlanTask",
    "SkeletonPlan",
    "parse_plan",
    "question_of",
]
