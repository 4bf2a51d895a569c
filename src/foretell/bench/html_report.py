"""The report as one self-contained HTML page."""

from base64 import b64encode
from collections.abc import Mapping
from html import escape

from foretell.bench.report import conditions, report_title, sections
from foretell.bench.schema import BenchResults

_STYLE = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } dt { font-weight: 600; margin-top: .5rem; }
dd { margin-left: 1rem; }
img { max-width: 100%; background: #fff; border-radius: 6px; }
"""
_CAPTIONS = {
    "speedup": "Speed-up over our own plain decoding, by category",
    "budget": "Tokens per pass against the tree budget",
    "time": "Time per token",
    "pareto": "Cost of drafting against tokens per pass",
}


def render_html(results: BenchResults, charts: Mapping[str, bytes]) -> str:
    """The report with its charts embedded; it refers to no other file."""
    pictures = "".join(
        f'<figure><img alt="{escape(_CAPTIONS[n])}" src="data:image/png;base64,{b64encode(png).decode()}">'
        f"<figcaption>{escape(_CAPTIONS[n])}</figcaption></figure>"
        for n, png in charts.items()
    )
    tables = "".join(f"<h2>{escape(name)}</h2>{table.html()}" for name, table in sections(results).items())
    definitions = "".join(f"<dt>{escape(n)}</dt><dd>{escape(t)}</dd>" for n, t in results.definitions.items())
    title = escape(report_title(results))
    machine = ", ".join(f"{k} {v}" for k, v in results.machine.items())
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{_STYLE}</style><h1>{title}</h1><p>{escape(conditions(results))}</p>"
        f"{pictures}{tables}<h2>Definitions</h2><dl>{definitions}</dl><p><small>{escape(machine)}</small></p></html>\n"
    )
