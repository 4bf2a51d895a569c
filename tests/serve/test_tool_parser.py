"""Tool calls in texts: the same parts wherever a text is cut, and grammars whose texts the parser reads."""

from typing import Any

import pytest

from foretell.serve.tools.parser import ToolParser
from foretell.serve.tools.parts import CallPart, TextPart
from foretell.serve.tools.syntax import HERMES, JSON, LLAMA, MISTRAL, MISTRAL_ARGS, TOOL_SYNTAXES, ToolSyntax, syntax_of

F = '{"name": "f", "arguments": {"a": "}\\"]", "b": [1, {}]}}'
F_CALL = ("f", '{"a": "}\\"]", "b": [1, {}]}')
CASES: list[tuple[ToolSyntax, str, str, list[tuple[str, str]]]] = [
    (HERMES, " just text \n", " just text \n", []),
    (HERMES, "", "", []),
    (HERMES, "a < b <tool and <tool_call", "a < b <tool and <tool_call", []),
    (HERMES, f"<tool_call>\n{F}\n</tool_call>", "", [F_CALL]),
    (HERMES, f"I look.\n\n<tool_call>{F}</tool_call>\n<tool_call>\n{F}\n</tool_call>\n", "I look.", [F_CALL] * 2),
    (HERMES, f"<tool_call>[{F}, {F}]</tool_call> so, done. ", "so, done.", [F_CALL] * 2),
    (HERMES, '<tool_call>{"arguments": {"x": 1}, "name": "g"}</tool_call>', "", [("g", '{"x": 1}')]),
    (HERMES, '<tool_call>{"name": "g", "arguments": "{\\"x\\": 1}", "id": 3}', "", [("g", '{"x": 1}')]),
    (HERMES, '<tool_call>{"name": "g"}</tool_call>, and', ", and", [("g", "{}")]),
    (HERMES, '<tool_call>{"name": "g", "arguments": {"x": [1', "", [("g", '{"x": [1')]),
    (HERMES, "x <tool_call> y <tool_call>{} z", "x <tool_call> y <tool_call>{} z", []),
    (HERMES, '<tool_call>{"name": 3}', '<tool_call>{"name": 3}', []),
    (HERMES, '<tool_call>{"name": "g", "argu', "", [("g", "{}")]),
    (HERMES, f" {F}", "", [F_CALL]),
    (HERMES, '{"name": "Ann", "arguments": {}}', '{"name": "Ann", "arguments": {}}', []),
    (HERMES, '[{"a": 1}] ', '[{"a": 1}] ', []),
    (HERMES, '{"name": "\\ud800"}', '{"name": "\\ud800"}', []),
    (LLAMA, '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": 2}}', "",
     [("f", "{}"), ("g", '{"x": 2}')]),
    (LLAMA, '<|python_tag|>{"type": "function", "name": "f", "parameters": {}} \n', "", [("f", "{}")]),
    (LLAMA, '{"name": "f", "parameters": {}}; ', ";", [("f", "{}")]),
    (LLAMA, '{"name": "f", "parameters": null}\n{"name": "g"}x', "x", [("f", "{}"), ("g", "{}")]),
    (MISTRAL, f"Hm.[TOOL_CALLS] [{F}, {F}]", "Hm.", [F_CALL] * 2),
    (MISTRAL, f"[{F}]", "", [F_CALL]),
    (MISTRAL, "[TOOL_CALLS]", "", []),
    (MISTRAL_ARGS, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]x1[ARGS]{}', "", [("f", '{"a": 1}'), ("g", "{}")]),
    (MISTRAL_ARGS, "[TOOL_CALLS]f no {}", "[TOOL_CALLS]f no {}", []),
    (JSON, f"[{F},\n{F}]", "", [F_CALL] * 2),
    (JSON, "{", "{", []),
]  # fmt: skip


def read(syntax: ToolSyntax, pieces: list[str], most: int | None = None) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolParser(syntax, ("f", "g"), most)
    text, calls = "", list[list[str]]()
    for number, piece in enumerate([*pieces, ""]):
        for part in parser.feed(piece, last=number == len(pieces)):
            if not isinstance(part, CallPart):
                assert isinstance(part, TextPart)
                text += part.text
                continue
            assert bool(part.id) == bool(part.name) == (part.index == len(calls))
            if part.name:
                calls.append([part.name, ""])
            calls[-1][1] += part.arguments
    assert parser.calls == len(calls)
    return text, [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize(("syntax", "text", "content", "calls"), CASES)
def test_the_same_parts_wherever_the_text_is_cut(
    syntax: ToolSyntax, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert read(syntax, [text]) == (content, calls)
    assert read(syntax, list(text)) == (content, calls)
    for i in range(len(text)):
        assert read(syntax, [text[:i], text[i:]]) == (content, calls), text[:i]
        assert read(syntax, [text[:i], text[i : i + 3], text[i + 3 :]]) == (content, calls), text[:i]


def test_arguments_are_passed_on_as_they_arrive() -> None:
    parser = ToolParser(HERMES, ("f",))
    found = [
        parser.feed(x, False) for x in ('<tool_call>{"name": "f", "arg', 'uments": {"a": "x', "y", '"}}</tool_call>')
    ]
    assert [[getattr(p, "arguments", None) for p in parts] for parts in found] == [[], ["", '{"a": "x'], ["y"], ['"}']]


def test_further_calls_are_left_out() -> None:
    text = f"<tool_call>{F}</tool_call><tool_call>{F}</tool_call>"
    assert read(HERMES, [text], most=1) == ("", [F_CALL])


@pytest.mark.parametrize(
    ("template", "syntax"),
    [
        (None, HERMES),
        ("{{ messages }}", HERMES),
        ("{{ tools }}<tool_call>", HERMES),
        ("{{ tools }}[TOOL_CALLS]", MISTRAL),
        ("{{ tools }}[TOOL_CALLS][ARGS]", MISTRAL_ARGS),
        ("{{ tools }}<|python_tag|>", LLAMA),
        ("{{ tools }}", JSON),
        ("{{ tools }}List of tools: [", TOOL_SYNTAXES["lfm2"]),
        ("{{ tools }}<function=f>\n<parameter=a>", TOOL_SYNTAXES["qwen3_coder"]),
        ('{{ tools }}<function=f>{"a": 1}</function>', TOOL_SYNTAXES["functionary"]),
    ],
)
def test_the_syntax_is_found_by_the_template(template: Any, syntax: ToolSyntax) -> None:
    assert syntax_of(template) is syntax
