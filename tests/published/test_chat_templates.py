"""Chat templates write what transformers' `apply_chat_template` writes, or refuse what it refuses.

FORETELL_TEMPLATES names folders with published templates (`*.jinja`), which are others' work and no part of the
project: separated as in PATH, for example llama.cpp's `models/templates` and vLLM's `examples`.
"""

import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from conversations import CONVERSATIONS, Conversation
from jinja2 import nodes
from own_templates import TEMPLATES

from foretell.tokenizer.chat_template import ChatTemplate, _Environment

utils = pytest.importorskip("transformers.utils.chat_template_utils")
PUBLISHED = sorted(
    file
    for folder in os.environ.get("FORETELL_TEMPLATES", "").split(os.pathsep)
    if folder
    for file in Path(folder).rglob("*.jinja")
)
ENVIRONMENT = _Environment()
NOW = datetime(2026, 3, 4, 5, 6, 7)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


class _Clock(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
        """A fixed date."""
        return NOW


@pytest.fixture(autouse=True)
def fixed_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "datetime", _Clock)


def expected(source: str, case: Conversation) -> str | Exception:
    """What transformers writes, or raises."""
    tools = None if case.tools is None else list(case.tools)
    variables = SPECIAL | dict(case.variables)
    messages = utils._normalize_chat_messages([dict(message) for message in case.messages])
    try:
        return str(
            utils.render_jinja_template(
                [messages], tools, chat_template=source, add_generation_prompt=case.add_generation_prompt, **variables
            )[0][0]
        )
    except Exception as error:
        return error


def written(source: str, case: Conversation) -> str | Exception:
    """What Foretell writes, or the error that it names."""
    given = {k: v for k, v in SPECIAL.items() if k not in ("bos_token", "eos_token")} | dict(case.variables)
    if case.tools is not None:
        given["tools"] = list(case.tools)
    try:
        template = ChatTemplate(source)
        return template.render(case.messages, "<s>", "</s>", case.add_generation_prompt, given, NOW)
    except ValueError as error:
        return error


def compare(source: str) -> list[str]:
    """The conversations on which the two differ."""
    faults = []
    for name, case in CONVERSATIONS.items():
        want, got = expected(source, case), written(source, case)
        if isinstance(want, str) or isinstance(got, str):
            if want != got:
                faults.append(f"{name}: {want!r:.400} and not {got!r:.400}")
        elif "stopped" in str(got):
            faults.append(f"{name}: {got}")
    return faults


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_construct_of_published_templates_is_rendered(name: str) -> None:
    assert compare(TEMPLATES[name]) == []


@pytest.mark.exhaustive
@pytest.mark.skipif(not PUBLISHED, reason="FORETELL_TEMPLATES names no folder with templates")
@pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_published_templates_are_rendered(file: Path) -> None:
    assert compare(file.read_text("utf-8")) == []


def constructs(source: str) -> set[str]:
    """What a template uses of Jinja: kinds of nodes, filters with their arguments, tests, methods, attributes of loops."""
    names = set()
    for node in ENVIRONMENT.parse(source).find_all(nodes.Node):
        inner = getattr(node, "node", None)
        if isinstance(node, nodes.Filter):
            keys = sorted(pair.key for pair in node.kwargs if isinstance(pair, nodes.Keyword))
            names.add(f"filter {node.name}({len(node.args)}, {keys})")
        elif isinstance(node, nodes.Test):
            names.add(f"test {node.name}")
        elif isinstance(node, nodes.Call) and isinstance(inner, nodes.Getattr):
            names.add(f"method {inner.attr}")
        elif isinstance(node, nodes.Call) and isinstance(inner, nodes.Name) and inner.name in ENVIRONMENT.globals:
            names.add(f"call {inner.name}")
        elif isinstance(node, nodes.Getattr) and isinstance(inner, nodes.Name) and inner.name == "loop":
            names.add(f"loop.{node.attr}")
        elif isinstance(node, nodes.Operand):
            names.add(f"operator {node.op}")
        else:
            names.add(type(node).__name__)
    return names


@pytest.mark.exhaustive
@pytest.mark.skipif(not PUBLISHED, reason="FORETELL_TEMPLATES names no folder with templates")
def test_own_templates_use_every_construct_of_the_published_ones() -> None:
    own = set().union(*map(constructs, TEMPLATES.values()))
    assert {c: file.name for file in PUBLISHED for c in constructs(file.read_text("utf-8")) - own} == {}
