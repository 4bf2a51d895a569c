"""How models write calls of tools; found by the text of their chat templates."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretell.serve.protocol.tools import FunctionDefinition

MAX_CALLS = 16
"""Most calls of one answer that a grammar allows."""
_NO_ARGUMENTS = {"type": "object", "additionalProperties": False}
_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Of the arguments: JSON as models learn it, with one blank after commas and colons."""


@dataclass(frozen=True)
class ToolSyntax:
    """How calls are written: `first`, then calls between `begin` and `end` with `between` between them, then `last`.

    A call is a JSON object with the name and the arguments, or, with `args_mark`, the name, the mark and the arguments.
    """

    mark: str = ""
    """Where it stands in a text, calls follow; empty: an answer is a call only if it begins with JSON."""
    end_mark: str = ""
    first: str = ""
    begin: str = ""
    between: str = ""
    end: str = ""
    last: str = ""
    key: str = "arguments"
    args_mark: str = ""
    id_prefix: str = "call_"
    id_length: int = 24

    def new_id(self) -> str:
        """A new id of a call."""
        return self.id_prefix + secrets.token_hex(self.id_length)[: self.id_length]

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

        more = f"({text(self.between)} one){{0,{MAX_CALLS - 1}}}" if parallel else ""
        rules = [
            "start: calls" + ("" if answer is None else " | answer"),
            f"calls: {text(self.first)} one {more} {text(self.last)}",
            f"one: {text(self.begin)} call {text(self.end)}",
            "call: " + " | ".join(f"call_{i}" for i in range(len(functions))),
        ]
        for i, function in enumerate(functions):
            head = (
                function.name + self.args_mark
                if self.args_mark
                else f'{{"name": {json.dumps(function.name)}, "{self.key}": '
            )
            rules.append(f"call_{i}: {text(head)} args_{i} {text('' if self.args_mark else '}')}")
            rules.append(f"args_{i}: %json {_schema(function.parameters)}")
        if answer is not None:
            rules.append(f"answer: %json {json.dumps({**answer, 'x-guidance': {'whitespace_flexible': False}})}")
        return "\n".join(rules) + "\n"


HERMES = ToolSyntax(
    "<tool_call>", "</tool_call>", begin="<tool_call>\n", end="\n</tool_call>", between="\n"
)  # fmt: skip
"""Hermes and Qwen; also the format of templates without tools."""
LLAMA = ToolSyntax("<|python_tag|>", between="; ", key="parameters")
MISTRAL = ToolSyntax(
    "[TOOL_CALLS]", first="[TOOL_CALLS][", between=", ", last="]", id_prefix="", id_length=9
)  # fmt: skip
"""Its templates take ids of nine letters and digits only."""
MISTRAL_ARGS = ToolSyntax(
    "[TOOL_CALLS]", begin="[TOOL_CALLS]", args_mark="[ARGS]", id_prefix="", id_length=9
)  # fmt: skip
"""From Mistral's tokenizer version 11 on."""
JSON = ToolSyntax(between="; ")


def reads_tools(template: str | None) -> bool:
    """Whether a chat template describes tools to the model."""
    return template is not None and re.search(r"\btools\b", template) is not None


def syntax_of(template: str | None) -> ToolSyntax:
    """The syntax of a model with this chat template."""
    if template is None or not reads_tools(template) or HERMES.mark in template:
        return HERMES
    if MISTRAL.mark in template:
        return MISTRAL_ARGS if MISTRAL_ARGS.args_mark in template else MISTRAL
    if LLAMA.mark in template or '"parameters": ' in template:
        return LLAMA
    return JSON


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
