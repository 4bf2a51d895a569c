"""The page as one self-contained file: to be served, or saved with the figures of one setting."""

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any
from urllib.parse import parse_qsl

from foretell.roofline.viewer.answers import Answers
from foretell.roofline.viewer.data import form_data
from foretell.roofline.viewer.settings import read_setting

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
