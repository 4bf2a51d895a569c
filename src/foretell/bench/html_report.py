"""The report as one self-contained HTML page."""

from base64 import b64encode
from collections.abc import Mapping
from html import escape

from foretell.bench.report import introduction, report_title, sections
from foretell.bench.schema import BenchResults
from foretell.bench.text_table import TextTable

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
    return render_page(
        report_title(results),
        introduction(results),
        {_CAPTIONS[name]: png for name, png in charts.items()},
        sections(results),
        results.definitions,
        results.machine,
    )


def render_page(
    title: str,
    conditions: str,
    pictures: Mapping[str, bytes],
    tables: Mapping[str, TextTable],
    definitions: Mapping[str, str],
    machine: Mapping[str, str],
) -> str:
    """One self-contained page; `pictures`: PNG files by caption."""
    figures = "".join(
        f'<figure><img alt="{escape(caption)}" src="data:image/png;base64,{b64encode(png).decode()}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
        for caption, png in pictures.items()
    )
    parts = "".join(f"<h2>{escape(name)}</h2>{table.html()}" for name, table in tables.items())
    terms = "".join(f"<dt>{escape(n)}</dt><dd>{escape(t)}</dd>" for n, t in definitions.items())
    machine_text = ", ".join(f"{k} {v}" for k, v in machine.items())
    return html_document(
        title,
        f"<p>{escape(conditions)}</p>{figures}{parts}<h2>Definitions</h2><dl>{terms}</dl>"
        f"<p><small>{escape(machine_text)}</small></p>",
    )


def html_document(title: str, body: str) -> str:
    """A page with a heading, in the style of the reports; `body` is HTML."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style><h1>{escape(title)}</h1>{body}</html>\n"
    )
