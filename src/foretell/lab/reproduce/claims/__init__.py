"""The claims, one file per family of methods."""

from foretell.catalogue import catalogue
from foretell.lab.reproduce.claim import Claim
from foretell.lab.reproduce.claims import draft_model, hybrid, lossy, parallel, retrieval, self_drafting, speculators
from foretell.utils.names import unknown

CLAIMS: tuple[Claim, ...] = (
    *retrieval.CLAIMS,
    *draft_model.CLAIMS,
    *self_drafting.CLAIMS,
    *speculators.CLAIMS,
    *parallel.CLAIMS,
    *hybrid.CLAIMS,
    *lossy.CLAIMS,
)
"""A claim for every method of the catalogue."""


def claim_of(method: str) -> Claim:
    """The claim about a method, by its name or one of its other names.

    Raises:
        ValueError: there is none; for an unknown name the nearest one is suggested.
    """
    names = {alias: entry.name for entry in catalogue().values() for alias in (entry.name, *entry.aliases)}
    claims = {c.method: c for c in CLAIMS}
    name = names.get(method.replace("-", "_"), method)
    if name in catalogue() and name not in claims:
        raise ValueError(
            f"method {name!r} has no claim to check: only the methods of Foretell itself have one; check its output "
            f"with `foretell verify {name}`, and its speed with `foretell bench run --methods {name}`"
        )
    if name not in claims:
        raise unknown("method", method, claims)
    return claims[name]
