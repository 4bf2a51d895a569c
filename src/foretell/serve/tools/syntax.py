"""How models write calls of tools: one table of marks, by vLLM's names; found by the text of their chat templates."""

import json
import re
import secrets
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from foretell.serve.protocol.tools import FunctionDefinition

MAX_CALLS = 16
"""Most calls of one answer that a grammar allows."""
NAME = r"([A-Za-z0-9_.:/-]{1,128}?)"
"""In a pattern: the name of a function, as short as what follows it allows."""
_NO_ARGUMENTS = {"type": "object", "additionalProperties": False}
_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Of the arguments: JSON as models learn it, with one blank after commas and colons."""


class Written(NamedTuple):
    """What a grammar makes a model write: `first`, then calls with `between` between them, then `last`."""

    before_name: str = '{"name": "'
    after_name: str = '", "arguments": '
    after_arguments: str = "}"
    first: str = ""
    between: str = ""
    last: str = ""


_WRITTEN = Written()


@dataclass(frozen=True)
class Pairs:
    """Arguments that are no JSON: keys with values, each up to one of `ends`, or a literal of Python if there is none.

    `key` matches up to a value: group 1 is the name; group 2, if there is one, is true for a text and false for JSON.
    `close` matches the end of the arguments. `quote`: where it stands for Python's quotation marks.
    """

    key: str
    close: str
    ends: tuple[str, ...] = ()
    """The first one is read with the value; the others begin something else, for models that forget the first one."""
    quote: str = ""
    lines: bool = False
    """Whether a value stands on lines of its own, whose first and last line ends are no part of it."""
    write_key: tuple[str, str] = ("", "=")
    write_close: str = ""


@dataclass(frozen=True)
class ToolSyntax:
    """How calls are written: where one of `marks` stands in a text, calls follow.

    A call begins with `lead`, and `head` matches what follows up to the arguments, with the name in group 1; without
    `head` it is a JSON object with the name and the arguments, alone or in an array.
    """

    marks: tuple[str, ...] = ()
    """Empty: an answer is a call only if it begins with one."""
    written: Written = _WRITTEN
    lead: str = ""
    head: str = ""
    pairs: Pairs | None = None
    """None: arguments are JSON."""
    after: tuple[str, ...] = ()
    """Texts that end a call or all calls."""
    bare: bool = False
    """Whether an answer may begin with a call without a mark even where it is no JSON."""
    until: tuple[str, ...] = ()
    """Where there are any: arguments are all text up to one of them, JSON or not."""
    id_prefix: str = "call_"
    id_length: int = 24
    """0: the prefix is followed by the name and the number of the call."""

    def new_id(self, name: str = "", index: int = 0) -> str:
        """A new id of a call."""
        return self.id_prefix + (secrets.token_hex(self.id_length)[: self.id_length] or f"{name}:{index}")

    def cut_name(self, text: str, known: Container[str]) -> str | None:
        """The name in a text that ends within the head of a call; empty: it is not complete; None: this is no head.

        A name that ends with the text is complete if it is `known`.
        """
        form, lead = self.written, self.lead
        if lead.startswith(text) or form.before_name.startswith(text):
            return ""
        ends = (form.after_name + ("{" if self.pairs is None else self.pairs.write_key[0]), form.after_arguments)
        rests = [more + end[at:] for end in ends for at in range(len(end)) for more in ("", "x")]
        heads = [head for rest in rests if (head := re.match(re.escape(lead) + self.head, text + rest))]
        names = [
            head[1] for head in heads if head.end(1) < len(text) or (head.end(1) == len(text) and head[1] in known)
        ]
        return names[0] if names else "" if heads else None

    @property
    def texts(self) -> tuple[str, ...]:
        """All that marks a call."""
        quote = () if self.pairs is None else (self.pairs.quote, *self.pairs.ends)
        return (*self.marks, *self.until, *self.after, *self.written, self.lead, *quote)

    def grammar(
        self,
        functions: Sequence[FunctionDefinition],
        parallel: bool,
        special: Mapping[str, int],
        answer: Mapping[str, Any] | None = None,
    ) -> str:
        """A Lark grammar (with llguidance's extensions) of one or, if `parallel`, more calls.

        `special`: ids of the special tokens by text. `answer`: the JSON schema of an answer without calls; None: there
        must be a call.
        """

        def text(value: str) -> str:
            return literal(value, special)

        form = self.written
        more = f"({text(form.between)} call){{0,{MAX_CALLS - 1}}}" if parallel else ""
        rules = [
            "start: calls" + ("" if answer is None else " | answer"),
            f"calls: {text(form.first)} call {more} {text(form.last)}",
            "call: " + " | ".join(f"call_{i}" for i in range(len(functions))),
        ]
        for i, function in enumerate(functions):
            before, after = text(form.before_name + function.name + form.after_name), text(form.after_arguments)
            rules.append(f"call_{i}: {before} args_{i} {after}")
            if self.pairs is None:
                rules.append(f"args_{i}: %json {_schema(function.parameters)}")
            else:
                rules += _pair_rules(self.pairs, f"args_{i}", function.parameters or _NO_ARGUMENTS, special)
        if answer is not None:
            rules.append(f"answer: %json {json.dumps({**answer, 'x-guidance': {'whitespace_flexible': False}})}")
        return "\n".join(rules) + "\n"


def _pair_rules(pairs: Pairs, name: str, schema: Mapping[str, Any], special: Mapping[str, int]) -> list[str]:
    """Rules of arguments, those first that must be there; where pairs are separated, the first one must."""
    rules, members = list[str](), list[str]()
    needed, given = set(schema.get("required", ())), schema.get("properties", {})
    separator = "" if pairs.ends else literal("," if pairs.quote else ", ", special)
    for number, key in enumerate(sorted(given, key=lambda k: k not in needed)):
        rule = f"{name}_{number}"
        rules += _pair_rule(pairs, rule, key, schema, special)
        one = f"{separator} {rule}" if members and separator else rule
        members.append(one if key in needed or (separator and not members and len(given) > 1) else f"({one})?")
    return [f"{name}: {' '.join(members)}" if members else f'{name}: ""', *rules]


def _pair_rule(
    pairs: Pairs, rule: str, key: str, schema: Mapping[str, Any], special: Mapping[str, int]
) -> Iterator[str]:
    """Rules of one key and its value: a raw text, one of some texts, or JSON."""
    own = resolved(schema["properties"][key], schema)
    choices = [x for x in own.get("enum", [own["const"]] if "const" in own else ()) if isinstance(x, str)]
    is_text = "string" in types_of(own) and bool(pairs.ends or pairs.quote)
    head = pairs.write_key[0] + key + pairs.write_key[1].replace("{string}", "true" if is_text else "false")
    end = pairs.write_close or (pairs.quote if is_text else "")
    opening = pairs.quote if is_text else ""
    first, *rest = split_special(end, special) or [""]
    if is_text and not choices and first not in special:
        yield f"value_{rule}[lazy]: /(.|\\n)*/ {json.dumps(first)}"
        end = "".join(rest)
    elif is_text:
        texts = " | ".join(literal(choice, special) or '""' for choice in choices)
        yield f"value_{rule}: {texts or '/(.|' + chr(92) + 'n)*/'}"
    else:
        defs = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        yield f"value_{rule}: %json {json.dumps({**own, **defs, 'x-guidance': _SEPARATORS})}"
    yield f"{rule}: {literal(head + opening, special)} value_{rule} {literal(end, special)}"


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema, or the one in `root` that it refers to."""
    for _ in range(8):
        if not isinstance(schema, Mapping) or not str(schema.get("$ref", "")).startswith("#/"):
            break
        place: Any = root
        for word in schema["$ref"][2:].split("/"):
            place = place.get(word.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
        schema = place
    return schema if isinstance(schema, Mapping) else {}


_XML = Pairs(
    r"<\s*parameter\s*=\s*([^>]*)>", r"</function>|(?=</tool_call>)",
    ("</parameter>", "<parameter=", "</function>", "</tool_call>"),
    lines=True, write_key=("<parameter=", ">\n"), write_close="\n</parameter>\n",
)  # fmt: skip
_DSML = "｜DSML｜"
_DSML_PAIRS = Pairs(
    rf'<{_DSML}parameter name="([^"]*)"(?: string="(true|false)")?\s*>', rf"</{_DSML}invoke>",
    (f"</{_DSML}parameter>", f"<{_DSML}parameter name=", f"</{_DSML}invoke>"),
    write_key=(f'<{_DSML}parameter name="', '" string="{string}">'), write_close=f"</{_DSML}parameter>\n",
)  # fmt: skip
_PYTHON = Pairs(r"[\s,]*([A-Za-z_]\w*)\s*=\s*", r"[\s,]*\)")
_CALLS = "<｜tool▁calls▁begin｜>"
_CALL = "<｜tool▁call▁begin｜>"
_DEEPSEEK_ENDS = ("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")


def _dsml(section: str) -> ToolSyntax:
    opening, closing = f"<{_DSML}{section}>", f"</{_DSML}{section}>"
    lead = f'<{_DSML}invoke name="'
    form = Written(lead, '">\n', f"</{_DSML}invoke>\n", f"{opening}\n", "", closing)
    return ToolSyntax((opening, lead), form, lead, rf'{NAME}">', _DSML_PAIRS, (closing,))


def _gemma(mark: str, end: str, quote: str) -> ToolSyntax:
    key = rf"[\s,]*(?:{re.escape(quote)})?([^\s,:{{}}<>]+?)(?:{re.escape(quote)})?\s*:\s*"
    pairs = Pairs(key, r"[\s,]*\}", quote=quote, write_key=("", ":"))
    return ToolSyntax((mark,), Written(f"{mark}call:", "{", f"}}{end}"), "call:", rf"{NAME}\s*\{{", pairs, (end,))


HERMES = ToolSyntax(
    ("<tool_call>",),
    Written('<tool_call>\n{"name": "', after_arguments="}\n</tool_call>", between="\n"),
    after=("</tool_call>",),
)
"""Hermes and Qwen; also the format of templates without tools."""
LLAMA = ToolSyntax(("<|python_tag|>",), Written(after_name='", "parameters": ', between="; "))
_MISTRAL_HEAD = rf"\s*{NAME}\s*(?:\[CALL_ID\]\w{{1,40}})?(?:\[ARGS\])?\s*(?=\{{)"
MISTRAL = ToolSyntax(
    ("[TOOL_CALLS]",), Written(first="[TOOL_CALLS][", between=", ", last="]"), head=_MISTRAL_HEAD,
    id_prefix="", id_length=9,
)  # fmt: skip
"""Its templates take ids of nine letters and digits only."""
MISTRAL_ARGS = ToolSyntax(
    ("[TOOL_CALLS]",), Written("[TOOL_CALLS]", "[ARGS]", ""), head=_MISTRAL_HEAD, id_prefix="", id_length=9
)
"""From Mistral's tokenizer version 11 on."""
JSON = ToolSyntax(written=Written(between="; "))
_QWEN_XML = ToolSyntax(
    ("<tool_call>", "<function="),
    Written("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", between="\n"),
    "<function=", rf"{NAME}\s*>", _XML, ("</tool_call>",),
)  # fmt: skip
_GLM = ToolSyntax(
    ("<tool_call>",), Written("<tool_call>", "\n", "</tool_call>", between="\n"),
    head=rf"\s*{NAME}\s*(?=<arg_key>|</tool_call>)",
    pairs=Pairs(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>", r"(?=</tool_call>)", ("</arg_value>", "</tool_call>"),
                write_key=("<arg_key>", "</arg_key>\n<arg_value>"), write_close="</arg_value>\n"),
    after=("</tool_call>",),
)  # fmt: skip
_PYTHONIC = ToolSyntax(
    ("<|python_start|>",), Written("", "(", ")", "[", ", ", "]"),
    head=rf"\s*\[?\s*{NAME}\(", pairs=_PYTHON, after=("]", "<|python_end|>"), bare=True,
)  # fmt: skip
_COHERE = ToolSyntax(
    ("<|START_ACTION|>",),
    Written('{"tool_call_id": "0", "tool_name": "', '", "parameters": ', "}",
            "<|START_ACTION|>[\n    ", ",\n    ", "\n]<|END_ACTION|>"),
    after=("<|END_ACTION|>",),
)  # fmt: skip

TOOL_SYNTAXES: dict[str, ToolSyntax] = {
    "hermes": HERMES,
    "qwen3_json": HERMES,
    "granite4": HERMES,
    "qwen3_coder": _QWEN_XML,
    "qwen3_xml": _QWEN_XML,
    "llama3_json": LLAMA,
    "llama4_json": LLAMA,
    "llama4_pythonic": _PYTHONIC,
    "pythonic": _PYTHONIC,
    "mistral": MISTRAL,
    "mistral_args": MISTRAL_ARGS,
    "deepseek_v3": ToolSyntax(
        (_CALLS, _CALL), Written(f"{_CALL}function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>",
                                 _CALLS, "\n", "<｜tool▁calls▁end｜>"),
        _CALL, rf"\w*<｜tool▁sep｜>\s*{NAME}\s*(?:```json)?\s*(?=\{{)", after=_DEEPSEEK_ENDS,
    ),
    "deepseek_v31": ToolSyntax(
        (_CALLS, _CALL), Written(_CALL, "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", _CALLS, "", "<｜tool▁calls▁end｜>"),
        _CALL, rf"\s*{NAME}\s*<｜tool▁sep｜>\s*(?=\{{)", after=_DEEPSEEK_ENDS,
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "glm45": _GLM,
    "glm47": _GLM,
    "openai": ToolSyntax(
        ("<|channel|>commentary to=functions.", "to=functions."),
        Written("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>"),
        head=rf"{NAME}(?:\s*<\|channel\|>\w+)?(?:\s*<\|constrain\|>\s*\w*|\s+\w+)?\s*<\|message\|>",
        until=("<|call|>", "<|end|>", "<|return|>", "<|start|>"),
    ),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "lfm2": ToolSyntax(
        ("<|tool_call_start|>",), Written("", "(", ")", "<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
        head=rf"\s*\[?\s*{NAME}\(", pairs=_PYTHON, after=("]", "<|tool_call_end|>"),
    ),
    "olmo3": ToolSyntax(
        ("<function_calls>",), Written("", "(", ")", "<function_calls>\n", "\n", "\n</function_calls>"),
        head=rf"\s*\[?\s*{NAME}\(", pairs=_PYTHON, after=("]", "</function_calls>"), bare=True,
    ),
    "granite": ToolSyntax(
        ("<|tool_call|>", "<tool_call>"), Written(first="<|tool_call|>[", between=", ", last="]"),
        after=("</tool_call>",),
    ),
    "phi4_mini_json": ToolSyntax(
        ("functools", "<|tool_call|>"), Written(first="functools[", between=", ", last="]"), after=("<|/tool_call|>",)
    ),
    "kimi_k2": ToolSyntax(
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        Written("<|tool_call_begin|>functions.", ":0<|tool_call_argument_begin|>", "<|tool_call_end|>",
                "<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
        "<|tool_call_begin|>", rf"\s*(?:functions\.)?{NAME}:\d+\s*<\|tool_call_argument_begin\|>\s*(?=\{{)",
        after=("<|tool_call_end|>", "<|tool_calls_section_end|>"), id_prefix="functions.", id_length=0,
    ),
    "minimax_m2": ToolSyntax(
        ("<minimax:tool_call>", "<invoke name="),
        Written('<invoke name="', '">\n', "</invoke>\n", "<minimax:tool_call>\n", "", "</minimax:tool_call>"),
        "<invoke name=", rf"[\"']?{NAME}[\"']?>",
        Pairs(r"<parameter name=[\"']?([^\"'>]*)[\"']?>", r"</invoke>",
              ("</parameter>", "<parameter name=", "</invoke>"),
              lines=True, write_key=('<parameter name="', '">'), write_close="</parameter>\n"),
        ("</minimax:tool_call>",),
    ),
    "cohere_command3": _COHERE,
    "cohere_command4": _COHERE,
    "cohere_action": ToolSyntax(
        ("Action:\n```json", "Action: ```json", "Action:```json"),
        Written('{\n        "tool_name": "', '",\n        "parameters": ', "\n    }",
                "Action:\n```json\n[\n    ", ",\n    ", "\n]```"),
        after=("```",),
    ),
    "xlam": ToolSyntax(
        ("[TOOL_CALLS]", "<tool_call>", "```json", "```"), Written(first="[", between=", ", last="]"),
        after=("</tool_call>", "```"),
    ),
    "nemotron_json": ToolSyntax(
        ("<TOOLCALL>",), Written(first="<TOOLCALL>[", between=", ", last="]</TOOLCALL>"), after=("</TOOLCALL>",)
    ),
    "functionary": ToolSyntax(
        ("<function=",), Written("<function=", ">", "</function>"), "<function=", rf"{NAME}>\s*(?=\{{)",
        after=("</function>",),
    ),
    "json": JSON,
}  # fmt: skip
"""By vLLM's names; `mistral_args`, `cohere_action`, `nemotron_json`, `functionary` and `json` are ours."""
_IN_TEMPLATES = (
    (("<|channel|>", "<|message|>"), "openai"),
    (("<|tool_call>",), "gemma4"),
    (("<start_function_call>",), "functiongemma"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|tool_list_start|>",), "lfm2"),
    (("List of tools: [",), "lfm2"),
    ((_DSML, "function_calls"), "deepseek_v32"),
    ((_DSML,), "deepseek_v4"),
    ((_CALL, "```json"), "deepseek_v3"),
    ((_CALL,), "deepseek_v31"),
    (("<|tool_call_begin|>",), "kimi_k2"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<arg_key>",), "glm45"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<function=",), "functionary"),
    (("<|START_ACTION|>",), "cohere_command3"),
    (("Action:", "```json", '"tool_name"'), "cohere_action"),
    (("<TOOLCALL>",), "nemotron_json"),
    (("<tool_call>",), "hermes"),
    (("[TOOL_CALLS]", "[ARGS]"), "mistral_args"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|tool|>",), "phi4_mini_json"),
    (("functools[",), "phi4_mini_json"),
    (("<|tool_call|>",), "granite"),
    (("<|python_start|>",), "llama4_pythonic"),
    (("[func_name1(",), "llama4_pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (('"parameters": ',), "llama3_json"),
    (("<function_calls>",), "olmo3"),
)
"""Texts that together stand in the templates of a syntax; the first one that fits."""


def reads_tools(template: str | None) -> bool:
    """Whether a chat template describes tools to the model."""
    return template is not None and re.search(r"\btools\b", template) is not None


def syntax_of(template: str | None, name: str | None = None) -> ToolSyntax:
    """The syntax of a model with this chat template; `name`: of one that was chosen, which goes before."""
    if name == "mistral" and "[ARGS]" in (template or ""):
        return MISTRAL_ARGS
    if name is not None:
        return TOOL_SYNTAXES[name]
    if template is None or not reads_tools(template):
        return HERMES
    fitting = (kind for texts, kind in _IN_TEMPLATES if all(text in template for text in texts))
    return TOOL_SYNTAXES[next(fitting, "json")]


def types_of(schema: object) -> set[str]:
    """Names of the types that a JSON schema allows; a text if it names none, as vLLM has it."""
    if not isinstance(schema, Mapping):
        return {"string"}
    given = schema.get("type", ())
    types = {given} if isinstance(given, str) else {t for t in given if isinstance(t, str)}
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    values = [*(schema.get("enum") or ()), *([schema["const"]] if "const" in schema else [])]
    types |= {kinds.get(type(value), "null") for value in values}
    for word in ("anyOf", "oneOf", "allOf"):
        types |= {name for choice in schema.get(word) or () for name in types_of(choice)}
    return types or {"string"}


def _schema(parameters: Mapping[str, Any] | None) -> str:
    return json.dumps({**(parameters or _NO_ARGUMENTS), "x-guidance": _SEPARATORS})


def literal(text: str, special: Mapping[str, int]) -> str:
    """A text in a Lark grammar; special tokens in it by id."""
    pieces = split_special(text, special)
    return " ".join(f"<[{special[p]}]>" if p in special else json.dumps(p) for p in pieces)


def split_special(text: str, special: Mapping[str, int]) -> list[str]:
    """The special tokens in a text, and what is between them; nothing is empty."""
    if not special:
        return [text] if text else []
    pieces = re.split(f"({'|'.join(map(re.escape, sorted(special, key=len, reverse=True)))})", text)
    return [piece for piece in pieces if piece]


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of the text that a mark may begin with."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
