"""Reasoning and calls of one answer together: what vLLM's parsers give, wherever the text is cut."""

import random

import pytest
from tool_texts import CALLS, FUNCTIONS, WRITERS

from foretell.serve.choices import Piece
from foretell.serve.formats.parts import PartReader, calls_of, reasoning_of, text_of
from foretell.serve.protocol.tools import FunctionDefinition, ToolChoice
from foretell.serve.reasoning import REASONING_SYNTAXES, Reasoning
from foretell.serve.tools.parser import ToolParser
from foretell.serve.tools.parts import CallPart, Part, ReasoningPart, TextPart
from foretell.serve.tools.syntax import TOOL_SYNTAXES
from foretell.serve.tools.use import ToolUse

REASONING = {
    "openai": "openai_gptoss", "mistral": "mistral", "mistral_args": "mistral", "gemma4": "gemma4",
    "granite": "granite", "cohere_command3": "cohere_command3",
}  # fmt: skip
"""Of the families that do not write `<think>`."""
Read = tuple[str, str, list[tuple[str, str]]]


def read(name: str, pieces: list[str], opened: bool = False, reasons: bool = True) -> Read:
    """Reasoning, text and calls."""
    syntax = REASONING_SYNTAXES[REASONING.get(name, "qwen3")]
    reasoner = Reasoning(syntax, opened, TOOL_SYNTAXES[name].marks).parser()
    parser, thought, said, calls = ToolParser(TOOL_SYNTAXES[name], FUNCTIONS), "", "", list[tuple[str, str]]()
    for number, piece in enumerate([*pieces, ""]):
        last = number == len(pieces)
        parts = reasoner.feed(piece, last) if reasons else [TextPart(piece)]
        thought += "".join(part.text for part in parts if isinstance(part, ReasoningPart))
        for part in parser.feed("".join(part.text for part in parts if isinstance(part, TextPart)), last):
            if isinstance(part, CallPart):
                if part.name:
                    assert part.index == len(calls)
                    calls.append((part.name, ""))
                calls[-1] = calls[-1][0], calls[-1][1] + part.arguments
            else:
                said += part.text
    return thought, said, calls


START, PARIS = "<|start|>assistant", '{"city": "Paris"}'
THOUGHT, FINAL = "<|channel|>analysis<|message|>a<|end|>", "<|channel|>final<|message|>b<|return|>"
PARIS_CALL = ("weather", PARIS)


def _sent(recipient: str, more: str = " <|constrain|>json", text: str = PARIS, end: str = "<|call|>") -> str:
    return f" to={recipient}<|channel|>commentary{more}<|message|>{text}{end}"


HARMONY_OURS = [
    ("<|channel|>commentary<|constrain|>json to=functions.weather<|message|>" + PARIS, ("", "", [PARIS_CALL])),
    ("<|channel|>analysis<|channel|>final<|message|>z", ("", "z", [])),
    (THOUGHT + START + "<|channel|>fin", ("a", "", [])),
    (THOUGHT + START + '<|channel|>final {"a": 1}<|return|>', ("a", START + '<|channel|>final {"a": 1}', [])),
]
"""Where vLLM drops a call or a text, or shows the half of a header."""
HARMONY = [
    *HARMONY_OURS,
    (THOUGHT + START + _sent("functions.weather"), ("a", "", [PARIS_CALL])),
    ("<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + PARIS, ("", "", [PARIS_CALL])),
    ("<|channel|>commentary to=functions.weather json<|message|>" + PARIS, ("", "", [PARIS_CALL])),
    (_sent("functions.weather", ""), ("", "", [PARIS_CALL])),
    (_sent("functions.weather", "<|constrain|>json"), ("", "", [PARIS_CALL])),
    (_sent("weather"), ("", "", [PARIS_CALL])),
    (_sent("functions.get_a.b"), ("", "", [("get_a.b", PARIS)])),
    (_sent("get_a.b", end="<|end|>") + START + FINAL, ("", "b", [("get_a.b", PARIS)])),
    (_sent("functions.stop", "", ""), ("", "", [("stop", "")])),
    (_sent("functions.stop", "", "no JSON"), ("", "", [("stop", "no JSON")])),
    (_sent("functions.stop") + START + _sent("functions.weather"), ("", "", [("stop", PARIS), PARIS_CALL])),
    (_sent("assistant", "", "x", "<|end|>") + START + FINAL, ("", "b", [])),
    (_sent("browser.open", " code", "x"), ("", "", [])),
    (" to=functions.weather<|channel|>analysis<|message|>" + PARIS, ("", "", [PARIS_CALL])),
    ("<|channel|>commentary<|message|>I look.<|end|>" + START + _sent("weather"), ("", "I look.", [PARIS_CALL])),
    ("<|channel|>commentary<|message|>I look.<|end|>" + START + FINAL, ("", "I look.\nb", [])),
    (THOUGHT + START + THOUGHT + START + FINAL, ("a\na", "b", [])),
    ('<|channel|>final <|constrain|>json<|message|>{"a": 1}<|end|>', ("", '{"a": 1}', [])),
    ("<|channel|>final<|message|>in the mid", ("", "in the mid", [])),
    ("<|channel|>analysis<|message|>in the mid", ("in the mid", "", [])),
    (_sent("functions.weather", text='{"ci', end=""), ("", "", [("weather", '{"ci')])),
    ("no channel at all", ("", "no channel at all", [])),
]


@pytest.mark.parametrize(("text", "parts"), HARMONY)
def test_messages_of_gpt_oss_are_told_apart_by_their_headers(text: str, parts: Read) -> None:
    assert read("openai", [text]) == read("openai", list(text)) == parts
    for i in range(len(text)):
        assert read("openai", [text[:i], text[i:]]) == parts, text[:i]


COHERE = """<|START_THINKING|>a<|END_THINKING|><|START_ACTION|>
[
    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Paris"}},
    {"tool_call_id": "1", "tool_name": "stop", "parameters": {}}
]
<|END_ACTION|>"""


def test_calls_of_cohere_follow_the_reasoning() -> None:
    assert read("cohere_command3", [COHERE]) == ("a", "", [PARIS_CALL, ("stop", "{}")])
    text = 'Action: ```json\n[{"tool_name": "weather", "parameters": {"city": "Paris"}}]```'
    assert read("cohere_action", [text]) == ("", "", [PARIS_CALL])
    assert read("cohere_action", ["Action: I look.\nAction:\n```json\n[1]\n```"])[1:] == (
        "Action: I look.\nAction:\n```json\n[1]\n```", [],
    )  # fmt: skip


CITED = [
    ("foo <co>bar</co: 0:[1,2],1:[3,4]> x", "foo bar x"),
    ("a<co>x</co: 0:[1]><co>y</co: 1:[0]>z", "axyz"),
    ("a <co>b</code> c</co: 0:[1]> d", "a b</code> c d"),
    ("a <co>b</co: 0:[", "a b"),
    ("<co>b</c", "b"),
    ("a <co>b <co>c</co: 0:[1]> d</co: 0:[2]>", "a b <co>c d</co: 0:[2]>"),
    ("a </co: 0:[1]> b, if x <co", "a </co: 0:[1]> b, if x <co"),
    ("see <co: 0>b</co: 0> z", "see <co: 0>b</co: 0> z"),
]
"""Texts, and what Cohere's own parser (melody 0.14, which vLLM runs) makes of them; it loses `</co` of the third."""


@pytest.mark.parametrize(("text", "said"), CITED)
def test_marks_of_citations_are_left_out(text: str, said: str) -> None:
    reasoning = Reasoning(REASONING_SYNTAXES["cohere_command3"], opened=False)
    for whole, thought in (
        (f"<|START_THINKING|>{text}<|END_THINKING|><|START_RESPONSE|>{text}<|END_RESPONSE|>", said),
        (text, ""),
    ):
        for pieces in ([whole], list(whole), *([whole[:i], whole[i:]] for i in range(len(whole)))):
            reader, parts = PartReader(None, reasoning), list[Part]()
            for number, piece in enumerate(pieces):
                reason = "stop" if number == len(pieces) - 1 else None
                parts += reader.read(Piece(0, (), piece, 0, finish_reason=reason))
            assert (reasoning_of(parts), text_of(parts)) == (thought, said), pieces


def test_marks_of_citations_in_calls_stay() -> None:
    functions = [FunctionDefinition(name="weather")]
    use = ToolUse(functions, ToolChoice("auto"), True, TOOL_SYNTAXES["cohere_command3"], {})
    call = WRITERS["cohere_command3"]([("weather", {"city": "<co>b</co: 0:[1]>"})])
    reader = PartReader(use, Reasoning(REASONING_SYNTAXES["cohere_command3"], opened=False))
    (part,) = calls_of(reader.read(Piece(0, (), call, 0, finish_reason="stop")))
    assert part.arguments == '{"city": "<co>b</co: 0:[1]>"}'


HOSTILE = [
    *'"\\{}[](),;:\n <>|=\'\u2028\0', '\\"', "```", "\\u00e9", "\\ud83d", "\\ud83d\\ude00", "😀", "\r\n",
    "weather", '{"name": "weather"', '"arguments": ', PARIS, 'weather(city="a")', "1e999", "NaN", "<think>", "</think>",
    "Action:", "to=weather", "functions.", "I look. ", "日本語 ", "a < b ",
]  # fmt: skip


def hostile(name: str, draw: random.Random) -> str:
    """A text of calls, halves of calls, marks, halves of marks, and what may stand in and between them."""
    marks = [
        mark for mark in (*TOOL_SYNTAXES[name].texts, *REASONING_SYNTAXES[REASONING.get(name, "qwen3")].texts) if mark
    ]
    pieces = list[str]()
    for _ in range(draw.randint(1, 8)):
        call, mark = WRITERS[name](draw.choice(CALLS)), draw.choice(marks)
        cut, half = draw.randrange(len(call)), draw.randrange(len(mark))
        pieces.append(draw.choice([call, call, call[:cut], call[cut:], mark, mark[:half], *draw.sample(HOSTILE, 4)]))
    return "".join(pieces)


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 60), marks=pytest.mark.exhaustive)], ids=str)
@pytest.mark.parametrize("name", sorted(WRITERS))
def test_a_stream_of_a_hostile_answer_is_the_whole_answer(name: str, seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(f"{name} {seed}")
        text, opened, reasons = hostile(name, draw), draw.random() < 0.2, draw.random() < 0.7
        whole = read(name, [text], opened, reasons)
        assert read(name, list(text), opened, reasons) == whole, text
        for _ in range(3):
            at = sorted(draw.sample(range(len(text) + 1), min(len(text), draw.randint(1, 8))))
            pieces = [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]
            assert read(name, pieces, opened, reasons) == whole, pieces
