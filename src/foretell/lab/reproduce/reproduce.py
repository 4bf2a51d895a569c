"""Checks claims one after the other."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from foretell.catalogue import find
from foretell.lab.reproduce.claim import Claim, Finding, Verdict
from foretell.lab.reproduce.lab import Lab, PromptTooLongError
from foretell.lab.reproduce.preparation.preparation import need_of


@dataclass(frozen=True)
class ClaimResult:
    """A claim with what was found."""

    claim: Claim
    verdict: Verdict
    finding: Finding | None
    obstacle: str = ""
    """Why it was not checked."""
    seconds: float = 0.0
    prepared: tuple[str, ...] = ()
    """What it was checked with that does not ship: what was named, and what was made here and how."""

    def as_json(self) -> dict[str, object]:
        """For `--json`."""
        entry = find(self.claim.method)
        finding = self.finding
        return {
            "method": self.claim.method,
            "papers": [{"title": p.title, "arxiv": p.arxiv} for p in entry.papers],
            "claim": self.claim.statement,
            "criterion": self.claim.criterion,
            "verdict": self.verdict,
            "found": finding.summary if finding else self.obstacle,
            "prepared": list(self.prepared),
            "reason": finding.reason if finding and not finding.holds else "",
            "series": [{"label": s.label, "x": s.x, "y": s.y} for s in finding.series] if finding else [],
            "seconds": round(self.seconds, 1),
        }


def reproduce(lab: Lab, claims: Sequence[Claim]) -> Iterator[ClaimResult]:
    """Check claims. One that needs something that is missing here is not checked, and says what it needs."""
    for claim in claims:
        yield _check(lab, claim)


def _check(lab: Lab, claim: Claim) -> ClaimResult:
    begin = time.monotonic()
    lab.take_notes()
    try:
        finding = claim.check(lab)
    except ValueError as error:
        obstacle = str(error)
        if lab.preparation is None and need_of(claim.method) and not isinstance(error, PromptTooLongError):
            obstacle = f"{obstacle}; --train with --out DIR makes what it needs here"
        return ClaimResult(claim, "not checked", None, obstacle, time.monotonic() - begin)
    verdict: Verdict = "holds" if finding.holds else "does not hold"
    return ClaimResult(claim, verdict, finding, "", time.monotonic() - begin, lab.take_notes())
