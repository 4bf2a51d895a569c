"""Calls in the syntax of every family: read as they were written, wherever the text is cut."""

import json
import random

import pytest
from tool_texts import CALLS, FUNCTIONS, ONLY_AT_START, WRITERS, Call

from command import save_tiny_model
from foretell.api import Model
from foretell.load import load
from foretell.serve.protocol.tools import FunctionDefinition
from foretell.serve.tools.parser import ToolParser
from foretell.serve.tools.parts import CallPart, TextPart
from foretell.serve.tools.syntax import TOOL_SYNTAXES
from foretell.structured.outputs import StructuredOutputs

NAMES = sorted(WRITERS)


def read(name: str, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser, text, calls = ToolParser(TOOL_SYNTAXES[name], FUNCTIONS), "", list[list[str]]()
    for number, piece in enumerate([*pieces, ""]):
        for part in parser.feed(piece, last=number == len(pieces)):
            if not isinstance(part, CallPart):
                assert isinstance(part, TextPart)
                text += part.text
                continue
            if part.name:
                assert part.index == len(calls) and part.id
                calls.append([part.name, ""])
            calls[-1][1] += part.arguments
    return text, [(name, arguments) for name, arguments in calls]


def cuts(text: str, seed: int) -> list[list[str]]:
    """The whole text, its characters, and random pieces."""
    found = [[text], list(text)]
    for k in range(4):
        draw = random.Random(seed + k)
        at = sorted(draw.sample(range(len(text) + 1), min(len(text), draw.randint(1, 12))))
        found.append([text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)])
    return found


def check(name: str, text: str, content: str, calls: list[Call]) -> None:
    for pieces in cuts(text, len(text)):
        said, called = read(name, pieces)
        assert [(n, json.loads(arguments)) for n, arguments in called] == calls, (name, text)
        assert said.strip() == content, (name, text)
    assert len({str(read(name, pieces)) for pieces in cuts(text, 7)}) == 1


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("name", NAMES)
def test_calls_are_read_as_they_were_written(name: str, calls: list[Call]) -> None:
    text = WRITERS[name](calls)
    if name == "openai":
        text = text.replace("<|start|>assistant", "")
    check(name, text, "", calls)
    if name not in ONLY_AT_START:
        check(name, f"I look, [1] {{2}}.\n{text}", "I look, [1] {2}.", calls)


@pytest.mark.parametrize("name", sorted({*NAMES} - ONLY_AT_START - {"openai"}))
def test_text_after_calls(name: str) -> None:
    calls = CALLS[0]
    check(name, f"{WRITERS[name](calls)}\nThat is it.", "That is it.", calls)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", NAMES)
def test_a_cut_call_is_what_a_stream_has_shown(name: str, every: int) -> None:
    text = WRITERS[name](CALLS[2])
    whole = read(name, [text])[1][0][1]
    shown = ""
    for end in range(0, len(text), every):
        found = {
            str(read(name, pieces))
            for pieces in ([text[:end]], [text[: end // 2], text[end // 2 : end]], *[list(text[:end])] * (end % 7 == 0))
        }
        assert len(found) == 1, (name, text[:end], found)
        said, calls = read(name, [text[:end]])
        if calls:
            sure = shown[: max(len(shown) - 14, 0)]
            assert calls[0][0] == "weather" and calls[0][1].startswith(sure), (name, text[:end])
            shown = calls[0][1]
        else:
            assert said.strip() in text[:end]
    assert whole.startswith(shown[:-20]) and len(shown) > len(whole) // 2


NO_CALLS = [
    "plain text",
    "a < b, <tool and <tool_call",
    "the list [1, 2] and {x: 1} (see print(3))",
    "<tool_call> is how one calls",
    "<|tool_call> [TOOL_CALLS] <function_calls> functools <invoke name= are marks",
    "f(x) = [w(1)",
]


@pytest.mark.parametrize("name", sorted(TOOL_SYNTAXES))
@pytest.mark.parametrize("text", NO_CALLS)
def test_what_only_looks_like_a_call_stays_text(name: str, text: str) -> None:
    for pieces in cuts(text, 3):
        assert read(name, pieces) == (text, []), name


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nPar", '{"city": "Par'),
        ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=days>\n1", '{"days": '),
        ("qwen3_coder", "<function=weather>\n<parameter=days>\n1\n</parameter>\n</function>", '{"days": 1}'),
        ("qwen3_coder", "<tool_call><function=weather><parameter=city>a<parameter=days>2</function>",
         '{"city": "a", "days": 2}'),
        ("glm45", "<tool_call>weather<arg_key>days</arg_key><arg_value>3", '{"days": '),
        ("gemma4", '<|tool_call>call:weather{city:<|"|>Pa', '{"city": "Pa"}'),
        ("gemma4", '<|tool_call>call:weather{now:true,city:x y}<tool_call|>', '{"now": true, "city": "x y"}'),
        ("lfm2", '<|tool_call_start|>[weather(days=1, city="Pa', '{"days": 1, "city": "Pa'),
        ("lfm2", "<|tool_call_start|>[weather(now=true, tags=[null, (1, 2)])]<|tool_call_end|>",
         '{"now": true, "tags": [null, [1, 2]]}'),
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Pa', '{"city": "Pa'),
        ("deepseek_v32", '<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city">7</',
         '{"city": "7'),
    ],
)  # fmt: skip
def test_calls_that_are_cut_or_carelessly_written(name: str, text: str, arguments: str) -> None:
    for pieces in cuts(text, 5):
        assert read(name, pieces)[1] == [("weather", arguments)]


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", '<tool_call>\n{"name": "weather"', "{}"),
        ("hermes", '<tool_call>\n{"name": "weather", "argum', "{}"),
        ("granite", '<|tool_call|>[{"name": "weather"', "{}"),
        ("llama3_json", '{"name": "weather", "para', "{}"),
        ("qwen3_coder", "<tool_call>\n<function=weather", "{}"),
        ("qwen3_coder", "<tool_call>\n<function=weather>\n<para", "{}"),
        ("qwen3_coder", "<function=weather>\n<parameter=city>\nPa\n</parameter>\n</func", '{"city": "Pa"}'),
        ("glm45", "<tool_call>weather", "{}"),
        ("glm45", "<tool_call>weather\n<arg_key>ci", "{}"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="weather', "{}"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n``", "{}"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>", "{}"),
        ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather', "{}"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0", "{}"),
        ("kimi_k2", "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>", "{}"),
        ("mistral", "[TOOL_CALLS]weather[ARGS]", "{}"),
        ("gemma4", "<|tool_call>call:weather", "{}"),
        ("gemma4", "<|tool_call>call:weather{ci", "{}"),
        ("gemma4", "<|tool_call>call:weather{city:", '{"city": ""}'),
        ("gemma4", '<|tool_call>call:weather{tags:[<|"|>a', '{"tags": ["a"]}'),
        ("gemma4", "<|tool_call>call:weather{days:-12", '{"days": -12}'),
        ("cohere_command3", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "weather"', "{}"),
    ],
)  # fmt: skip
def test_a_call_that_is_cut_after_its_name(name: str, text: str, arguments: str) -> None:
    """The calls of vLLM's parsers, streamed or whole."""
    for pieces in cuts(text, 5):
        assert read(name, pieces) == ("", [("weather", arguments)])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "<tool_call>\n<function=weat"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>func"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weat"),
        ("mistral", "[TOOL_CALLS]["),
        ("glm45", "<tool_call>weath"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="weat'),
        ("granite", '<|tool_call|>[{"name": "wea'),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.weat"),
        ("hermes", '<tool_call>\n{"name": "wea'),
    ],
)
def test_a_call_that_is_cut_within_its_name_is_left_out(name: str, text: str) -> None:
    """As vLLM leaves it out of `content`."""
    for pieces in cuts("I look. " + text, 5):
        said, called = read(name, pieces)
        assert (said.strip(), called) == ("I look.", [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Pa"}}\n</tool_'),
        (
            "minimax_m2",
            '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Pa</parameter>\n</invoke>\n</mini',
        ),
    ],
)
def test_a_mark_that_is_cut_after_a_call_is_no_text(name: str, text: str) -> None:
    for pieces in cuts(text, 5):
        said, called = read(name, pieces)
        assert said.strip() == "" and [(n, json.loads(arguments)) for n, arguments in called] == [
            ("weather", {"city": "Pa"})
        ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(str(save_tiny_model(tmp_path_factory.mktemp("model"))))


@pytest.mark.parametrize("name", NAMES)
def test_the_grammar_takes_the_calls_of_the_syntax_and_no_others(name: str, model: Model) -> None:
    schema = {
        "type": "object",
        "properties": {"unit": {"$ref": "#/$defs/U"}, "days": {"type": "integer"}, "city": {"type": "string"}},
        "required": ["unit", "days"],
        "additionalProperties": False,
        "$defs": {"U": {"enum": ["C", "F"]}},
    }
    functions = [FunctionDefinition(name="weather", parameters=schema), FunctionDefinition(name="stop")]
    grammar = TOOL_SYNTAXES[name].grammar(functions, True, {})
    constraint = model.constraint(StructuredOutputs(grammar=grammar))

    def takes(calls: list[Call]) -> bool:
        text = WRITERS[name](calls).replace("'", '"').replace("<|start|>assistant", "")
        state = constraint.start()
        for token in model.codec.encode(text, add_special_tokens=False):
            state = constraint.advance(state, token)
            if state is None:
                return False
        return bool(constraint.is_final(state) or constraint.advance(state, model.eos[0]) is not None)

    first = ("weather", {"unit": "C", "days": 3})
    assert takes([first]) and takes([("stop", {})])
    assert takes([("weather", {"unit": "F", "days": -1, "city": "São"})])
    assert name == "kimi_k2" or takes([first, first])
    for wrong in (
        {"unit": "X", "days": 3},
        {"unit": "C", "days": 0.5},
        {"unit": "C"},
        {"unit": "C", "days": 3, "x": 1},
    ):
        assert not takes([("weather", wrong)]), wrong
    assert not takes([("other", {})])


def test_ids() -> None:
    syntax = TOOL_SYNTAXES["kimi_k2"]
    assert syntax.new_id("weather", 2) == "functions.weather:2"
    assert len(TOOL_SYNTAXES["mistral"].new_id()) == 9
