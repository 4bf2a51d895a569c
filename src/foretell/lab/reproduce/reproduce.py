"""Checks claims one after the other, and writes what was found."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from foretell.bench.html_report import html_document
from foretell.catalogue import find
from foretell.lab.reproduce.claim import Claim, Finding, Interval, Verdict
from foretell.lab.reproduce.claims import CLAIMS
from foretell.lab.reproduce.counts import Samples, Totals, bootstrap
from foretell.lab.reproduce.lab import Lab, PromptTooLongError
from foretell.lab.reproduce.preparation.preparation import need_of
from foretell.utils.validation import read_json

RESULTS = "claims.json"
_TABLE = "| method | paper | here | ratio | verdict |\n|---|---|---|---|---|"


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

    @property
    def summary(self) -> str:
        """What was found, in a sentence."""
        finding = self.finding
        if finding is None:
            return self.obstacle
        changed = f"; {finding.changed} answers differ from plain decoding's" if finding.changed else ""
        return (
            f"{finding.value} here, {self.claim.published:g} in the paper, {finding.null:.2f} without the idea: "
            f"{finding.ratio} of the paper's effect over {finding.prompts} prompts{changed}"
        )

    @property
    def reason(self) -> str:
        """Why the number here is not the paper's, where it is smaller."""
        finding = self.finding
        return self.claim.scale if finding and self.verdict != "reproduced" and finding.ratio.value < 1 else ""

    def as_json(self) -> dict[str, Any]:
        """For `--json` and the report."""
        claim = self.claim
        return {
            "method": claim.method,
            "papers": [{"title": p.title, "arxiv": p.arxiv} for p in find(claim.method).papers],
            "paper": claim.paper,
            "published": claim.published,
            "here": claim.here,
            "band": claim.band,
            "verdict": self.verdict,
            "found": self.summary,
            "finding": asdict(self.finding) if self.finding else None,
            "reason": self.reason,
            "prepared": list(self.prepared),
            "seconds": round(self.seconds, 1),
        }


def reproduce(lab: Lab, claims: Sequence[Claim]) -> Iterator[ClaimResult]:
    """Check claims. One that needs something that is missing here is not checked, and says what it needs."""
    for claim in claims:
        yield _check(lab, claim)


def _check(lab: Lab, claim: Claim) -> ClaimResult:
    begin = time.monotonic()
    try:
        runs = [lab.run(run) for run in claim.runs]
        changed = sum(map(lab.changed, claim.runs))
    except ValueError as error:
        obstacle = str(error)
        if lab.preparation is None and need_of(claim.method) and not isinstance(error, PromptTooLongError):
            obstacle = f"{obstacle}; --train with --out DIR makes what it needs here"
        return ClaimResult(claim, "not checked", None, obstacle, time.monotonic() - begin)
    prompts = len(runs[0].prompts)
    weights = bootstrap(prompts)
    totals = [Totals.of(run.prompts, weights) for run in runs]
    value = claim.value(totals)
    null = claim.null(totals) if callable(claim.null) else np.full_like(value, claim.null)
    ratio = (value - null) / (claim.published - null)
    finding = Finding(_interval(value), float(null[0]), _interval(ratio), prompts, changed)
    prepared = tuple(dict.fromkeys(run.prepared for run in runs if run.prepared))
    return ClaimResult(claim, finding.verdict(claim.band), finding, "", time.monotonic() - begin, prepared)


def _interval(samples: Samples) -> Interval:
    low, high = np.quantile(samples[1:], (0.025, 0.975))
    return Interval(float(samples[0]), float(low), float(high))


def write_report(folder: Path, results: Sequence[ClaimResult], conditions: Mapping[str, str]) -> Path:
    """Write `index.html`, `claims.json` and `table.md` into a folder; returns the index. Claims that an earlier
    command checked under the same conditions stay in it.

    Raises:
        ValueError: the folder's `claims.json` is damaged.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    by_method = _earlier(folder, conditions) | {r.claim.method: r.as_json() for r in results}
    records = [by_method[c.method] for c in CLAIMS if c.method in by_method]
    content = {"conditions": dict(conditions), "claims": records}
    (folder / RESULTS).write_text(json.dumps(content, indent=1), encoding="utf-8")
    table = [f"| `{cells[0]}` | {' | '.join(cells[1:5])} |" for cells in map(_cells, records)]
    (folder / "table.md").write_text("\n".join((_TABLE, *table, "")), encoding="utf-8")
    index = folder / "index.html"
    index.write_text(_index(records, conditions), encoding="utf-8")
    return index


def _earlier(folder: Path, conditions: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """What the folder's report says of claims, by method; empty if there is none of these conditions."""
    if not (folder / RESULTS).exists():
        return {}
    report = read_json(folder / RESULTS, "delete it")
    return {r["method"]: r for r in report["claims"]} if report.get("conditions") == conditions else {}


def _index(records: Sequence[Mapping[str, Any]], conditions: Mapping[str, str]) -> str:
    head = ("method", "paper", "here", "ratio", "verdict", "statement and quantity")
    rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in _cells(record))}</tr>" for record in records)
    return html_document(
        "Claims of papers, checked here",
        "<style>td:last-child { text-align: left; white-space: normal; min-width: 24rem }</style>"
        f'<div class="wide"><table><thead><tr>{"".join(f"<th>{h}</th>" for h in head)}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div><p>Ratio: (here - null) / (paper - null), where null is what a method "
        "without the paper's idea gives; in brackets 95 % of the samples of prompts.</p>"
        f"<p><small>{escape(', '.join(f'{k} {v}' for k, v in conditions.items()))}</small></p>",
    )


def _cells(record: Mapping[str, Any]) -> tuple[str, ...]:
    finding = record["finding"]
    value, ratio = (str(Interval(**finding[name])) if finding else "-" for name in ("value", "ratio"))
    links = [f'<a href="https://arxiv.org/abs/{p["arxiv"]}">arXiv {p["arxiv"]}</a>' for p in record["papers"]]
    parts = (record["paper"], record["here"], record["found"], record["reason"], *record["prepared"])
    text = "<br>".join([*(escape(part) for part in parts if part), *links])
    return record["method"], f"{record['published']:g}", value, ratio, record["verdict"], text
