"""What an answer must match: a structured output, or calls of tools."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from foretell.api import Model
from foretell.core.token_rules import TokenConstraint
from foretell.serve.errors import ApiError, bad_request
from foretell.serve.protocol.chat import ChatBody, ResponseFormat
from foretell.serve.protocol.generation import GenerationBody
from foretell.serve.structural_tag import TagGrammar, read_structural_tag
from foretell.serve.tenants import tenant_salt
from foretell.serve.tools.use import ToolUse, special_tokens
from foretell.structured.outputs import StructuredOutputs
from foretell.utils.validation import show

_FIELDS = ("json", "json_object", "regex", "choice", "grammar", "whitespace_pattern")
_TAG = "structural_tag"
_WHITESPACE = "disable_any_whitespace"
_Compiler = Callable[[StructuredOutputs], TokenConstraint]


def make_constraint(body: GenerationBody, model: Model, use: ToolUse | None = None) -> TokenConstraint | None:
    """The constraint of a request, compiled; `use`: its tools. Called in a thread.

    Raises:
        ApiError: a schema or a grammar is invalid, or several exclude each other.
    """
    wanted, compiler = _requested(body, model), partial(model.constraint, cache_salt=tenant_salt(body.cache_salt))
    if use is None or (use.choice.mode == "auto" and wanted is None):
        return None if wanted is None else _compile_wanted(compiler, wanted)
    if use.choice.mode == "auto" and wanted is not None:
        param, outputs = wanted.param, wanted.outputs
        if outputs.kind not in ("json", "json_object"):
            raise bad_request(f"tools go together with JSON only, and {outputs.kind} was asked for", param)
        _compile(compiler, param, outputs)
        return _compile_calls(compiler, use, outputs.schema)
    return _compile_calls(compiler, use, None)


class _Wanted(NamedTuple):
    """A structured output, the field that asks for it, and the schemas in it."""

    param: str
    outputs: StructuredOutputs
    schemas: Sequence[Mapping[str, Any]] = ()


def _requested(body: GenerationBody, model: Model) -> _Wanted | None:
    """The structured output that a body asks for."""
    _refuse_guided(body)
    requested = dict[str, Mapping[str, Any]]()
    if body.structured_outputs is not None:
        requested["structured_outputs"] = _structured_outputs(body.structured_outputs)
    if body.grammar:
        requested["grammar"] = {"grammar": body.grammar}
    if body.json_schema is not None:
        requested["json_schema"] = {"json": body.json_schema}
    if isinstance(body, ChatBody) and body.response_format is not None and body.response_format.type != "text":
        requested["response_format"] = _response_format(body.response_format)
    if not requested:
        return None
    *others, (param, fields) = requested.items()
    if others:
        raise bad_request(f"{others[0][0]} and {param} exclude each other; give one of them", param)
    try:
        if _TAG in fields:
            grammar = TagGrammar(
                read_structural_tag(fields[_TAG]), special_tokens(model.codec), fields.get("any_whitespace", False)
            )
            return _Wanted(param, StructuredOutputs(grammar=grammar.text), grammar.schemas)
        return _Wanted(param, StructuredOutputs(**fields))
    except ValueError as error:
        raise bad_request(str(error), param) from error


def _refuse_guided(body: GenerationBody) -> None:
    """Refuse the fields by which vLLM before 0.12 took a constraint: a constraint must not be ignored."""
    for name, value in (body.model_extra or {}).items():
        kind = name.removeprefix("guided_")
        if kind != name and kind in _FIELDS and value is not None:
            raise bad_request(f'{name} is no field here; write "structured_outputs": {{"{kind}": …}}', name)


def _structured_outputs(given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get(_TAG) is not None and any(given.get(name) not in (None, False) for name in _FIELDS):
        raise bad_request(f"structured_outputs needs exactly one of its kinds, and {_TAG} is one", "structured_outputs")
    unknown = [name for name, value in given.items() if name not in (*_FIELDS, _TAG, _WHITESPACE) and value is not None]
    if unknown:
        expected = ", ".join((*_FIELDS, _TAG, _WHITESPACE))
        raise bad_request(f"structured_outputs has {expected}, and no {show(unknown[0])}", "structured_outputs")
    fields = {name: given[name] for name in (*_FIELDS, _TAG) if given.get(name) is not None}
    for name in ("json_object", _WHITESPACE):
        if not isinstance(given.get(name), bool | None):
            raise bad_request(f"{name} must be true or false, found {show(given[name])}", f"structured_outputs.{name}")
    return fields | {"any_whitespace": given.get(_WHITESPACE) is False}


def _response_format(wanted: ResponseFormat) -> dict[str, Any]:
    if wanted.type == "json_object":
        return {"json_object": True} if wanted.schema_ is None else {"json": wanted.schema_}
    if wanted.type == _TAG:
        return {_TAG: wanted.model_extra}
    schema = (wanted.json_schema or {}).get("schema")
    if not isinstance(schema, Mapping):
        raise bad_request(f"a JSON schema was expected, found {show(schema)}", "response_format.json_schema.schema")
    return {"json": schema}


def _compile(compiler: _Compiler, param: str, outputs: StructuredOutputs) -> TokenConstraint:
    try:
        return compiler(outputs)
    except ValueError as error:
        raise bad_request(str(error), param) from error


def _compile_wanted(compiler: _Compiler, wanted: _Wanted) -> TokenConstraint:
    try:
        return _compile(compiler, wanted.param, wanted.outputs)
    except ApiError:
        for schema in wanted.schemas:  # Which one it is, with the keyword and its place.
            _compile(compiler, wanted.param, StructuredOutputs(json=schema))
        raise


def _compile_calls(compiler: _Compiler, use: ToolUse, answer: Mapping[str, Any] | None) -> TokenConstraint:
    try:
        return compiler(StructuredOutputs(grammar=use.grammar(answer)))
    except ValueError as error:
        for number, function in enumerate(use.functions):  # Which one it is, with the keyword and its place.
            if function.parameters is not None:
                _compile(compiler, f"tools.{number}.function.parameters", StructuredOutputs(json=function.parameters))
        raise bad_request(str(error), "tools") from error
