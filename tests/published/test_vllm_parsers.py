"""The same calls and the same reasoning as vLLM's own parsers find.

`FORETELL_VLLM`: a Python that can import vLLM 0.33; without a GPU its package is enough, with oss-harmony and
cohere-melody, which it requires.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foretell.serve.reasoning import REASONING_SYNTAXES, Reasoning
from foretell.serve.tools.parts import CallPart, ReasoningPart

PYTHON = os.environ.get("FORETELL_VLLM", "")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="vLLM's parsers are compared where FORETELL_VLLM names a Python that has vLLM"
)
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "serve"))
import test_hostile_calls  # noqa: E402
from test_hostile_calls import HARMONY, HARMONY_OURS  # noqa: E402
from test_reasoning import CASES  # noqa: E402
from tool_texts import CALLS, FUNCTIONS, WRITERS  # noqa: E402

NOT_IN_VLLM = {"mistral_args": "mistral", "nemotron_json": None, "cohere_action": None, "functionary": None}
"""Ours."""
DIFFERENT = {("gemma4", 2), ("phi4_mini_json", 2), ("phi4_mini_json", 4)}
"""Where vLLM errs: numbers inside Gemma's objects become texts; arrays in arguments end the calls of Phi."""


def vllm(lines: list[Any]) -> list[Any]:
    """Reasoning, text and calls that vLLM finds: of lines of the parsers of calls and reasoning, text and functions."""
    given = "".join(json.dumps(line) + "\n" for line in lines)
    done = subprocess.run(
        [PYTHON, str(HERE / "vllm_calls.py")], input=given, capture_output=True, text=True, timeout=600, check=False
    )
    read = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("found ")]
    assert len(read) == len(lines), done.stderr[-2000:]
    return read


def ours(name: str, text: str) -> list[tuple[str, str]]:
    """The calls that the parsers find."""
    return test_hostile_calls.read(name, [text], reasons=name in REASONS)[2]


REASONS = {"openai": "openai_gptoss", "cohere_command3": "cohere_command3"}
"""Parsers of calls that read an answer only together with its reasoning."""
FAMILIES = {name: NOT_IN_VLLM.get(name, name) for name in WRITERS if NOT_IN_VLLM.get(name, name)}


def calls_of(given: list[tuple[str, str]]) -> list[Any]:
    """The calls that vLLM finds in texts of families."""
    return [calls for _, _, calls in vllm([[FAMILIES[n], REASONS.get(n), text, FUNCTIONS] for n, text in given])]


def values(calls: list[Any]) -> list[tuple[str, Any]]:
    """The calls with their arguments as values; Cohere's parser gives no text where there are no arguments."""
    return [(name, json.loads(arguments or "{}")) for name, arguments in calls]


def test_the_calls_are_vllms() -> None:
    cases = [
        (name, WRITERS[name](calls))
        for name in FAMILIES
        for number, calls in enumerate(CALLS)
        if (name, number) not in DIFFERENT
    ]
    different = [
        (name, text, ours(name, text), calls)
        for (name, text), calls in zip(cases, calls_of(cases), strict=True)
        if values(ours(name, text)) != values(calls)
    ]
    assert different == []


def test_calls_that_are_cut_are_vllms() -> None:
    """Where vLLM makes calls of what is there: the same names, and the same arguments where both are whole. Some of its
    parsers give the last call, which is cut, to streams only.
    """
    texts = {name: WRITERS[name]([("weather", {"city": "Paris", "now": True}), ("stop", {})]) for name in FAMILIES}
    cases = [(name, text[:end]) for name, text in texts.items() for end in range(1, len(text))]
    compared, different = set[str](), list[Any]()
    for (name, text), theirs in zip(cases, calls_of(cases), strict=True):
        if not theirs or any(called not in FUNCTIONS for called, _ in theirs) or text.endswith(PART_OF_A_MARK):
            continue  # vLLM shows what is not complete as text, or makes a call of half a name.
        compared.add(name)
        mine = ours(name, text)
        pairs = [(a[1], b[1]) for a, b in zip(mine, theirs, strict=False) if is_json(a[1]) and is_json(b[1])]
        names, known = [called for called, _ in mine], [called for called, _ in theirs]
        if known not in (names, names[:-1]) or any(json.loads(a) != json.loads(b) for a, b in pairs):
            different.append((name, text, mine, theirs))
    assert different == [] and len(compared) > 12


PART_OF_A_MARK = ("<", "<|", '<|"', '<|"|')
"""Tokens of their own: Gemma's quotation marks are never cut."""


def is_json(text: str) -> bool:
    """Whether a text is JSON."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_answers_of_gpt_oss_are_vllms() -> None:
    cases = [case for case in HARMONY if case not in HARMONY_OURS]
    given = vllm([["openai", "openai_gptoss", text, FUNCTIONS] for text, _ in cases])
    for (text, (thought, said, calls)), theirs in zip(cases, given, strict=True):
        assert [thought, said, [list(call) for call in calls]] == theirs, text


def test_the_reasoning_is_vllms() -> None:
    ours_only = ("openai_gptoss", "granite_response")
    cases = [c for c in CASES if c[0] not in ours_only and c[3] and "<tool_call>" not in c[1]]
    given = vllm([[None, name, text, {}] for name, text, *_ in cases])
    for (name, text, opened, *_), (thought, said, _) in zip(cases, given, strict=True):
        parts = Reasoning(REASONING_SYNTAXES[name], opened).parser().feed(text, True)
        mine = "".join(p.text for p in parts if isinstance(p, ReasoningPart))
        rest = "".join(p.text for p in parts if not isinstance(p, ReasoningPart | CallPart))
        assert (mine.strip(), rest) == (thought.strip(), said), (name, text)
