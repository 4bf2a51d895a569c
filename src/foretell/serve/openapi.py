"""The OpenAPI document, generated from the endpoints and the pydantic models of their bodies."""

import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from foretell.serve.handlers.endpoint import Endpoint
from foretell.serve.protocol.answers import ErrorAnswer

_REFERENCE = "#/components/schemas/{model}"
_ERRORS = {
    "400": "The body is not valid",
    "401": "No valid API key",
    "404": "No such model",
    "408": "The body took too long",
    "413": "The body is too large",
    "429": "Too many requests wait",
    "500": "An error of the server",
    "503": "The server is loading, draining or restarting its engine",
}


def openapi(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    kinds: dict[type[BaseModel], Literal["validation", "serialization"]] = {ErrorAnswer: "serialization"}
    for endpoint in endpoints:
        kinds[endpoint.answer] = "serialization"
        if endpoint.body is not None:
            kinds[endpoint.body] = "validation"
    _, schemas = models_json_schema(list(kinds.items()), ref_template=_REFERENCE)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Foretell", "version": version("foretell")},
        "paths": paths,
        "components": {
            "schemas": schemas.get("$defs", {}),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    content = {"application/json": {"schema": _schema(endpoint.answer)}}
    streamed = {endpoint.streams: {"schema": {"type": "string"}}} if endpoint.streams else {}
    answers: dict[str, Any] = {"200": {"description": "The answer", "content": content | streamed}}
    for status, description in _ERRORS.items():
        schema = {"application/json": {"schema": _schema(ErrorAnswer)}}
        answers[status] = {"description": description, "content": schema}
    names = re.findall(r"{(\w+)", endpoint.path)
    body = {}
    if endpoint.body is not None:
        body = {"requestBody": {"required": True, "content": {"application/json": {"schema": _schema(endpoint.body)}}}}
    return {
        "summary": endpoint.summary,
        "parameters": [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names],
        "responses": answers,
        **body,
    }


def _schema(kind: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=kind.__name__)}
