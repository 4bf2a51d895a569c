"""The page as one self-contained file: to be served, or saved with the figures of one setting;
and what its form offers: models, devices, runtimes, formats, methods, and the settings it begins with.
"""

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any
from urllib.parse import parse_qsl

from foretell.roofline.hardware import Hardware, memory_tier
from foretell.roofline.method_profiles import method_profiles
from foretell.roofline.model_configs import builtin_models
from foretell.roofline.viewer.answers import Answers
from foretell.roofline.viewer.settings import Known, page_runtimes, read_setting
from foretell.roofline.workload import STAGES

TIERS = ("ddr", "ddr-server", "nvme")
FORMATS = ("16", "fp8", "8", "6", "4", "4g128", "fp4", "3", "2", "2g32z", "1")


def hardware_data(h: Hardware) -> dict[str, Any]:
    """A device; `figures`: what its fields hold unless they are changed, in GB/s, 1e12 OPs/s and GB."""
    peak = h.peaks.get("fp16") or max(h.peaks.values())
    return {
        "title": h.title,
        "source": h.source,
        "usesRuntimes": h.takes_runtimes,
        "figures": {
            "bandwidth": f"{h.bandwidth / 1e9:g}",
            "peak": f"{peak / 1e12:g}",
            "capacity": "not stated" if h.capacity is None else f"{h.capacity / 1e9:g}",
        },
    }


def families(known: Known) -> Mapping[str, list[str]]:
    """The models by family."""
    groups: dict[str, list[str]] = {"yours": list(known.extra)} if known.extra else {}
    for name, raw in builtin_models().items():
        if name not in known.extra:
            groups.setdefault(str(raw["source"]).split("/")[0], []).append(name)
    return groups


def form_data(known: Known) -> dict[str, Any]:
    """The choices of the form."""
    return {
        "defaults": known.defaults(),
        "models": families(known),
        "hardware": {name: hardware_data(h) for name, h in known.devices.items()},
        "runtimes": {name: runtime.title for name, runtime in page_runtimes().items()},
        "tiers": {name: memory_tier(name).title for name in TIERS},
        "formats": {name: name.upper() if name.startswith("fp") else name.replace("g", " / ") for name in FORMATS},
        "methods": list(method_profiles()),
        "stages": list(STAGES),
    }


SCRIPTS = ("dom.js", "charts.js", "graph.js", "navigation.js", "tips.js", "form.js", "panels.js", "app.js")


def _text(name: str) -> str:
    return resources.files("foretell.roofline.viewer").joinpath(name).read_text("utf-8")


def page(answers: Answers, saved: Mapping[str, Any] | None = None) -> str:
    """The HTML document with style, scripts and data; it loads nothing. `saved`: of `saved_answers`."""
    script = "\n".join(_text(name).replace('"use strict";\n', "", index > 0) for index, name in enumerate(SCRIPTS))
    parts = {
        "STYLE": _text("style.css"),
        "DRAWING": _text("drawing.css"),
        "DATA": script_json({**form_data(answers.known), "saved": saved}),
        "SCRIPT": script,
    }
    html = _text("page.html")
    for name, text in parts.items():
        html = html.replace(f"/*{name}*/", text, 1)
    return html


def saved_answers(answers: Answers, question: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a setting, for a page without a server: those of the pass, the curves, the methods, the gain of
    each method, and the load of the one that is drawn (by default the fastest). question: as of `Answers.answer`.

    Raises:
        ValueError: a setting is invalid.
    """
    asked = {name: question.get(name) for name in ("now", "compared")}
    figures = {topic: {"": answers.answer(topic, asked)} for topic in ("pass", "sweeps", "methods")}
    methods = figures["methods"][""]["methods"]
    usable = [m["name"] for m in methods if m["usable"]]
    figures["gain"] = {name: answers.answer("gain", {**asked, "method": name}) for name in usable}
    method = str(question.get("method") or "")
    shown = method or (methods[0]["name"] if methods else "")
    figures["load"] = {}
    if shown in usable:
        figures["load"][shown] = answers.answer("load", {**asked, "method": shown, "count": _ALL_RATES})
    return {**asked, "method": method, "figures": figures}


_ALL_RATES = 1 << 10


def question_of_link(link: str, answers: Answers) -> dict[str, Any]:
    """The question of a link that a page copied, or of what follows its `#`: the setting, the compared one, the method.

    Raises:
        ValueError: it names what is no setting.
    """
    pairs = dict(parse_qsl(link.rpartition("#")[2], keep_blank_values=True))
    first = answers.known.defaults()
    method, _ = pairs.pop("method", ""), pairs.pop("op", "")
    compares = pairs.pop("compare", None)
    other = {k.removeprefix("compare."): pairs.pop(k) for k in list(pairs) if k.startswith("compare.")}
    compared = read_setting(first | other) if compares else None
    return {"now": read_setting(first | pairs), "compared": compared, "method": method}


def script_json(data: Mapping[str, Any]) -> str:
    """JSON for a script element, which it cannot close."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
