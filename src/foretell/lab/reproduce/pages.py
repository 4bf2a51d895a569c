"""The report: an index, and a page for every claim."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from foretell.bench.charts import canvas, png
from foretell.bench.html_report import html_document, render_page
from foretell.bench.text_table import TextTable
from foretell.catalogue import find
from foretell.lab.reproduce.claim import Finding
from foretell.lab.reproduce.claims import CLAIMS
from foretell.lab.reproduce.reproduce import ClaimResult
from foretell.utils.validation import read_json

RESULTS = "claims.json"


def write_report(folder: Path, results: Sequence[ClaimResult], conditions: Mapping[str, str]) -> Path:
    """Write pages and `claims.json` into a folder; returns the index. Claims that an earlier command checked under the
    same conditions stay in it.

    Raises:
        ValueError: matplotlib is not installed, or the folder's `claims.json` is damaged.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for result in results:
        (folder / f"{result.claim.method}.html").write_text(_page(result, conditions), encoding="utf-8")
    by_method = _earlier(folder, conditions) | {r.claim.method: r.as_json() for r in results}
    records = [by_method[c.method] for c in CLAIMS if c.method in by_method]
    content = {"conditions": dict(conditions), "claims": records}
    (folder / RESULTS).write_text(json.dumps(content, indent=1), encoding="utf-8")
    index = folder / "index.html"
    index.write_text(_index(records, conditions), encoding="utf-8")
    return index


def _earlier(folder: Path, conditions: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """What the folder's report says of claims, by method; empty if there is none of these conditions."""
    if not (folder / RESULTS).exists():
        return {}
    report = read_json(folder / RESULTS, "delete it")
    return {r["method"]: r for r in report["claims"]} if report.get("conditions") == conditions else {}


def _page(result: ClaimResult, conditions: Mapping[str, str]) -> str:
    claim, finding, entry = result.claim, result.finding, find(result.claim.method)
    papers = "; ".join(p.title for p in entry.papers)
    terms = {"Method": entry.description, "Counts as holding": claim.criterion, "Paper": papers or "-"}
    links = {"All claims": "index.html"}
    links |= {f"arXiv {p.arxiv}": f"https://arxiv.org/abs/{p.arxiv}" for p in entry.papers if p.arxiv}
    title = f"{claim.method}: {result.verdict}"
    if finding is None:
        terms = {"Not checked": result.obstacle} | terms
        return render_page(title, claim.statement, {}, {}, terms, conditions, links)
    if not finding.holds and finding.reason:
        terms["Why not"] = finding.reason
    if result.prepared:
        terms["Named or made for this check"] = "; ".join(result.prepared)
    return render_page(
        title,
        f"{claim.statement} Measured here: {finding.summary}.",
        {f"{finding.y} against {finding.x}": draw(finding)},
        {"Measured": _table(finding)},
        terms,
        conditions,
        links,
    )


def _table(finding: Finding) -> TextTable:
    whole = all(float(x).is_integer() for s in finding.series for x in s.x)
    rows = [(s.label, int(x) if whole else x, y) for s in finding.series for x, y in zip(s.x, s.y, strict=True)]
    return TextTable(("", finding.x, finding.y), rows, digits=3)


def draw(finding: Finding) -> bytes:
    """The picture of a finding as a PNG file."""
    figure, axes = canvas()
    for series in finding.series:
        axes.plot(series.x, series.y, marker="o", label=series.label)
    axes.set_xlabel(finding.x)
    axes.set_ylabel(finding.y)
    highest = max((y for series in finding.series for y in series.y), default=0.0)
    axes.set_ylim(0, 1.05 * highest or 1.0)
    if len(finding.series) > 1:
        axes.legend(frameon=False)
    return png(figure)


def _index(records: Sequence[Mapping[str, Any]], conditions: Mapping[str, str]) -> str:
    counts = {v: sum(r["verdict"] == v for r in records) for v in ("holds", "does not hold", "not checked")}
    rows = "".join(
        f'<tr><td><a href="{r["method"]}.html">{escape(r["method"])}</a></td><td>{r["verdict"]}</td>'
        f'<td class="text">{escape(r["claim"])}</td><td class="text">{escape(r["found"])}</td></tr>'
        for r in records
    )
    return html_document(
        "Claims of papers, checked here",
        "<style>.text { text-align: left; white-space: normal; min-width: 16rem }</style>"
        f"<p>{escape(', '.join(f'{v}: {n}' for v, n in counts.items()))}. What depends on the papers' hardware and "
        f"models is left out of the claims.</p>"
        '<div class="wide"><table><thead><tr><th>method</th><th>verdict</th><th class="text">claim</th>'
        '<th class="text">found</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div><p><small>{escape(', '.join(f'{k} {v}' for k, v in conditions.items()))}"
        "</small></p>",
    )
