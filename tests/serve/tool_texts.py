"""Calls of tools as the chat templates of many models write them, by vLLM's name of the syntax."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "share": {"type": "number"},
        "now": {"type": "boolean"},
        "tags": {"type": "array"},
        "where": {"type": "object"},
    },
}
FUNCTIONS = {"weather": SCHEMA, "stop": None, "get_a.b": SCHEMA}
HARD: dict[str, Any] = {
    "city": 'São "Paulo", {a: [1}]\n 北京 🙂 it\'s \\n <b> & ))',
    "days": -3,
    "share": 0.25,
    "now": True,
    "tags": ["a,b", 'c"d', 1, None, ["x", {"y": "]}"}]],
    "where": {"lat": 1.5, "name": "{x}", "in": {"ok": False}},
}
CALLS: list[list[Call]] = [
    [("weather", {"city": "Paris"})],
    [("stop", {})],
    [("weather", HARD)],
    [("weather", {"city": "", "days": 12}), ("stop", {}), ("weather", {"city": "a\nb\n\nc", "now": False})],
    [("weather", {"tags": [], "where": {}}), ("weather", {"city": "}</x>\t"})],
]
QUOTE = '<|"|>'


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _raw(value: object) -> str:
    return value if isinstance(value, str) else _json(value)


def _object(arguments: str = "arguments", name: str = "name", more: str = "") -> Callable[[Call], str]:
    return lambda call: f'{{{more}"{name}": "{call[0]}", "{arguments}": {_json(call[1])}}}'


def _pairs(pattern: str, call: Call) -> str:
    text = {"name": call[0]}
    return "".join(
        pattern.format(key=k, value=_raw(v), string=_json(isinstance(v, str)), **text) for k, v in call[1].items()
    )


def _python(call: Call) -> str:
    return f"{call[0]}({', '.join(f'{key}={value!r}' for key, value in call[1].items())})"


def _gemma(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_gemma(v)}" for key, v in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ",".join(map(_gemma, value)) + "]"
    return f"{QUOTE}{value}{QUOTE}" if isinstance(value, str) else _json(value)


def _dsml(section: str) -> Callable[[Sequence[Call]], str]:
    pair = '<｜DSML｜parameter name="{key}" string="{string}">{value}</｜DSML｜parameter>\n'
    return lambda calls: (
        f"<｜DSML｜{section}>\n"
        + "\n".join(f'<｜DSML｜invoke name="{c[0]}">\n{_pairs(pair, c)}</｜DSML｜invoke>' for c in calls)
        + f"\n</｜DSML｜{section}>"
    )


def _around(first: str, between: str, last: str, one: Callable[[Call], str]) -> Callable[[Sequence[Call]], str]:
    return lambda calls: first + between.join(map(one, calls)) + last


_XML = "<parameter={key}>\n{value}\n</parameter>\n"
_GLM = "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
_MINIMAX = '<parameter name="{key}">{value}</parameter>\n'
_HARMONY = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
WRITERS: dict[str, Callable[[Sequence[Call]], str]] = {
    "hermes": _around("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>", _object()),
    "granite4": _around("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>", _object()),
    "qwen3_coder": _around("", "\n", "", lambda c: (
        f"<tool_call>\n<function={c[0]}>\n{_pairs(_XML, c)}</function>\n</tool_call>")),
    "llama3_json": _around("", "; ", "", _object("parameters")),
    "llama4_pythonic": _around("[", ", ", "]", _python),
    "pythonic": _around("[", ", ", "]", _python),
    "mistral": _around("[TOOL_CALLS][", ", ", "]", _object()),
    "mistral_args": _around("", "", "", lambda c: f"[TOOL_CALLS]{c[0]}[ARGS]{_json(c[1])}"),
    "deepseek_v3": _around("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>", lambda c: (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{c[0]}\n```json\n{_json(c[1])}\n```<｜tool▁call▁end｜>")),
    "deepseek_v31": _around("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>", lambda c: (
        f"<｜tool▁call▁begin｜>{c[0]}<｜tool▁sep｜>{_json(c[1])}<｜tool▁call▁end｜>")),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "glm45": _around("", "\n", "", lambda c: f"<tool_call>{c[0]}\n{_pairs(_GLM, c)}</tool_call>"),
    "openai": _around("", "<|start|>assistant", "", lambda c: _HARMONY.format(c[0], _json(c[1]))),
    "gemma4": _around("", "", "", lambda c: f"<|tool_call>call:{c[0]}{_gemma(c[1])}<tool_call|>"),
    "lfm2": _around("<|tool_call_start|>[", ", ", "]<|tool_call_end|>", _python),
    "olmo3": _around("<function_calls>\n", "\n", "\n</function_calls>", _python),
    "granite": _around("<|tool_call|>[", ", ", "]", _object()),
    "phi4_mini_json": _around("functools[", ", ", "]", _object()),
    "kimi_k2": _around("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>", lambda c: (
        f"<|tool_call_begin|>functions.{c[0]}:0<|tool_call_argument_begin|>{_json(c[1])}<|tool_call_end|>")),
    "minimax_m2": _around("<minimax:tool_call>\n", "\n", "\n</minimax:tool_call>", lambda c: (
        f'<invoke name="{c[0]}">\n{_pairs(_MINIMAX, c)}</invoke>')),
    "cohere_command3": _around("<|START_ACTION|>[\n    ", ",\n    ", "\n]<|END_ACTION|>",
                               _object("parameters", "tool_name", '"tool_call_id": "0", ')),
    "cohere_action": _around("Action:\n```json\n[\n    ", ",\n    ", "\n]```", lambda c: (
        f'{{\n        "tool_name": "{c[0]}",\n        "parameters": {_json(c[1])}\n    }}')),
    "xlam": _around("[", ", ", "]", _object()),
    "functionary": _around("", "", "", lambda c: f"<function={c[0]}>{_json(c[1])}</function>"),
    "nemotron_json": _around("<TOOLCALL>[", ", ", "]</TOOLCALL>", _object()),
}  # fmt: skip
ONLY_AT_START = {"llama3_json", "llama4_pythonic", "pythonic", "xlam"}
"""Syntaxes without a mark: a call is one only where the answer begins."""
