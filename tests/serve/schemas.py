"""A set of JSON schemas over all keywords, and what a server may do with each: a valid answer, or a refusal that names
the keyword.
"""

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import jsonschema

_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_FORMATS = {
    "date-time": r"\d{4}-\d{2}-\d{2}[Tt]\d{2}:\d{2}:\d{2}(\.\d+)?([Zz]|[+-]\d{2}:\d{2})",
    "time": r"\d{2}:\d{2}:\d{2}(\.\d+)?([Zz]|[+-]\d{2}:\d{2})",
    "duration": r"P(?=.)(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?)",
    "hostname": rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[!-~]*",
}
"""Formats that jsonschema does not check without further packages."""


@dataclass(frozen=True)
class SchemaCase:
    """A schema, and the keyword that it is about."""

    keyword: str
    schema: dict[str, Any]


@cache
def schema_cases() -> tuple[SchemaCase, ...]:
    lines = Path(__file__).with_suffix(".jsonl").read_text("utf-8").splitlines()
    return tuple(SchemaCase(*json.loads(line)) for line in lines)


@dataclass(frozen=True)
class SchemaReport:
    """How many schemas were answered and refused, and what is wrong with the others."""

    answered: int
    refused: int
    wrong: list[str]


def check_schemas(http: httpx2.Client, prompt: Callable[[SchemaCase], str], **fields: Any) -> SchemaReport:
    """Ask for an answer by every schema, eight at a time."""

    def ask(case: SchemaCase) -> httpx2.Response:
        form = {"type": "json_schema", "json_schema": {"name": "value", "schema": case.schema}}
        body = {"messages": [{"role": "user", "content": prompt(case)}], "response_format": form, "max_tokens": 200}
        return http.post("/v1/chat/completions", json=body | fields)

    with ThreadPoolExecutor(8) as pool:
        responses = list(pool.map(ask, schema_cases()))
    wrong = [
        f"{case.keyword}: {json.dumps(case.schema)}: {sentence}"
        for case, response in zip(schema_cases(), responses, strict=True)
        for sentence in _faults(case, response)
    ]
    answered = sum(response.status_code == 200 for response in responses)
    return SchemaReport(answered, len(responses) - answered, wrong)


def _faults(case: SchemaCase, response: httpx2.Response) -> Iterator[str]:
    if response.status_code != 200:
        message = response.json()["error"]["message"]
        if response.status_code != 400 or not re.search(rf"(?<![\w$-]){re.escape(case.keyword)}(?![\w-])", message):
            yield f"{response.status_code}: {message}"
        return
    choice = response.json()["choices"][0]
    text = choice["message"]["content"]
    if choice["finish_reason"] != "stop":
        yield f"finish_reason {choice['finish_reason']}: {text[:80]}"
        return
    kind = jsonschema.validators.validator_for(case.schema, default=jsonschema.Draft202012Validator)
    for error in kind(case.schema, format_checker=_format_checker()).iter_errors(json.loads(text)):
        yield f"{text[:80]}: {error.message[:200]}"


@cache
def _format_checker() -> jsonschema.FormatChecker:
    checker = jsonschema.FormatChecker(("date", "email", "ipv4", "ipv6", "uuid"))
    checker.checkers = dict(checker.checkers)
    for name, pattern in _FORMATS.items():
        checker.checkers[name] = (re.compile(pattern).fullmatch, ())
    return checker
