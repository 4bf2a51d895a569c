"""The same calls and the same reasoning as vLLM's own parsers find.

`FORETELL_VLLM`: a Python that can import vLLM 0.33; without a GPU its package is enough.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foretell.serve.reasoning import REASONING_SYNTAXES, Reasoning
from foretell.serve.tools.parser import ToolParser
from foretell.serve.tools.parts import CallPart, ReasoningPart
from foretell.serve.tools.syntax import TOOL_SYNTAXES

PYTHON = os.environ.get("FORETELL_VLLM", "")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="vLLM's parsers are compared where FORETELL_VLLM names a Python that has vLLM"
)
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "serve"))
from test_reasoning import CASES  # noqa: E402
from tool_texts import CALLS, FUNCTIONS, WRITERS  # noqa: E402

NOT_IN_VLLM = {"mistral_args": "mistral", "nemotron_json": None, "cohere_command3": None,
               "cohere_action": None, "openai": None}  # fmt: skip
"""Ours, or their parsers read tokens only."""
DIFFERENT = {("gemma4", 2), ("phi4_mini_json", 2), ("phi4_mini_json", 4)}
"""Where vLLM errs: numbers inside Gemma's objects become texts; arrays in arguments end the calls of Phi."""


def vllm(lines: list[Any]) -> list[Any]:
    """What vLLM finds in the texts."""
    given = "".join(json.dumps(line) + "\n" for line in lines)
    done = subprocess.run(
        [PYTHON, str(HERE / "vllm_calls.py")], input=given, capture_output=True, text=True, timeout=300, check=False
    )
    read = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("found ")]
    assert len(read) == len(lines), done.stderr[-2000:]
    return read


def ours(name: str, text: str) -> list[tuple[str, str]]:
    """What the parser finds."""
    parts = ToolParser(TOOL_SYNTAXES[name], FUNCTIONS).feed(text, True)
    calls = dict[int, tuple[str, str]]()
    for part in parts:
        if isinstance(part, CallPart):
            known = calls.get(part.index, (part.name, ""))
            calls[part.index] = known[0], known[1] + part.arguments
    return list(calls.values())


def read(calls: list[Any]) -> list[tuple[str, Any]]:
    """The calls with their arguments as values."""
    return [(name, json.loads(arguments)) for name, arguments in calls]


def test_the_calls_are_vllms() -> None:
    cases = [
        (name, NOT_IN_VLLM.get(name, name), write(calls))
        for name, write in WRITERS.items()
        for number, calls in enumerate(CALLS)
        if NOT_IN_VLLM.get(name, name) and (name, number) not in DIFFERENT
    ]
    given = vllm([[theirs, text, FUNCTIONS] for _, theirs, text in cases])
    different = [
        (name, text, ours(name, text), calls)
        for (name, _, text), calls in zip(cases, given, strict=True)
        if read(ours(name, text)) != read(calls)
    ]
    assert different == []


def test_the_reasoning_is_vllms() -> None:
    ours_only = ("openai_gptoss", "granite_response", "cohere_command3")
    cases = [c for c in CASES if c[0] not in ours_only and c[3] and "<tool_call>" not in c[1]]
    given = vllm([[name, text, None] for name, text, *_ in cases])
    for (name, text, opened, *_), (thought, said) in zip(cases, given, strict=True):
        parts = Reasoning(REASONING_SYNTAXES[name], opened).parser().feed(text, True)
        mine = "".join(p.text for p in parts if isinstance(p, ReasoningPart))
        rest = "".join(p.text for p in parts if not isinstance(p, ReasoningPart | CallPart))
        assert (mine.strip(), rest) == ((thought or "").strip(), said or ""), (name, text)
