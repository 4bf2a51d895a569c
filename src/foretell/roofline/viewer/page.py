"""The page as one self-contained file."""

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from foretell.roofline.analysis import AnalyzedModel
from foretell.roofline.hardware import Hardware
from foretell.roofline.viewer.data import payload

SCRIPTS = (
    "offload.js", "passes.js", "engine.js", "methods.js", "variants.js", "arrivals.js", "charts.js", "graph.js",
    "navigation.js", "glossary.js", "state.js", "form.js", "panels.js", "ranking.js", "sweeps.js", "actions.js",
    "app.js",
)  # fmt: skip


def _text(name: str) -> str:
    return resources.files("foretell.roofline.viewer").joinpath(name).read_text("utf-8")


def page(devices: Mapping[str, Hardware], extra: Sequence[AnalyzedModel] = ()) -> str:
    """The HTML document with style, scripts and data; it loads nothing and opens from disk."""
    script = "\n".join(_text(name).replace('"use strict";\n', "", index > 0) for index, name in enumerate(SCRIPTS))
    parts = {
        "STYLE": _text("style.css"),
        "DRAWING": _text("drawing.css"),
        "DATA": script_json(payload(devices, extra)),
        "SCRIPT": script,
    }
    html = _text("page.html")
    for name, text in parts.items():
        html = html.replace(f"/*{name}*/", text, 1)
    return html


def script_json(data: Mapping[str, Any]) -> str:
    """JSON for a script element, which it cannot close."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
