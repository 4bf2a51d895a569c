"""Ollama's API."""

import hashlib
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from foretell.serve.convert.base import renamed
from foretell.serve.convert.ollama import NAMES, PARAMS, can_think, chat_of_ollama, completion_of_ollama
from foretell.serve.errors import OLLAMA_PATH, ApiError
from foretell.serve.formats.ollama import OllamaFormat, unfinished
from foretell.serve.handlers.generate import Generation, respond
from foretell.serve.handlers.text import prepare_chat, prepare_completion
from foretell.serve.protocol.ollama import OllamaChatBody, OllamaGenerateBody, OllamaShowBody
from foretell.serve.service import Service

VERSION = "0.12.11"
"""Of the Ollama whose API this is; clients compare it with the one that they need."""
_LATEST = ":latest"
_NEVER = "2318-01-01T00:00:00Z"
"""When a model leaves the memory that stays there."""
_NOT_OFFERED = {
    **dict.fromkeys(("pull", "push", "create", "copy", "delete", "blobs"), "has the model that it was started with"),
    **dict.fromkeys(("embed", "embeddings"), "makes no embeddings: it writes text"),
}
"""Why Ollama's other endpoints are refused, by the first part of the path after `/api/`."""


async def answer(service: Service, http: HttpRequest, body: OllamaChatBody | OllamaGenerateBody) -> ASGIApp:
    """Answer a conversation, or answer or continue a prompt."""
    name, is_chat = _served(service, body.model), isinstance(body, OllamaChatBody)
    if not (body.messages if isinstance(body, OllamaChatBody) else body.prompt):
        return JSONResponse(unfinished(name, is_chat, "") | {"done": True, "done_reason": "load"})
    with renamed(PARAMS if is_chat else PARAMS | {"messages": "prompt"}):
        if isinstance(body, OllamaGenerateBody) and body.raw:
            prepared = await prepare_completion(service, completion_of_ollama(body, name))
        else:
            prepared = await prepare_chat(service, chat_of_ollama(body, name, _template(service)))
    format = OllamaFormat(prepared.head, prepared.parts, is_chat)
    return await respond(
        service,
        http,
        Generation(prepared.requests, 1, format, body.stream is not False, phases=prepared.phases(service)),
    )


async def models(service: Service, http: HttpRequest, body: None) -> ASGIApp:
    """All served names, each of which is in memory."""
    loaded = service.loaded
    shared = {
        "digest": hashlib.sha256(loaded.fingerprint.encode()).hexdigest(),
        "size": loaded.file_bytes,
        "context_length": loaded.model.config.context,
        "expires_at": _NEVER,
        **_details(service),
    }
    return JSONResponse({"models": [{"name": name, "model": name, **shared} for name in service.settings.served_names]})


async def show(service: Service, http: HttpRequest, body: OllamaShowBody) -> ASGIApp:
    """What is known of a model."""
    name, loaded, template = _served(service, body.model or body.name), service.loaded, _template(service)
    config = loaded.model.config
    sizes = {
        "context_length": config.context,
        "embedding_length": config.hidden,
        "block_count": config.layers,
        "feed_forward_length": config.ffn,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
    }
    named = {f"{config.architecture}.{key}": value for key, value in sizes.items()}
    return JSONResponse(
        {
            "modelfile": f"FROM {name}\n",
            "parameters": "\n".join(f"{NAMES.get(key, key)} {value}" for key, value in loaded.defaults.items()),
            "template": template,
            "model_info": {"general.architecture": config.architecture, **named},
            "capabilities": ["completion", "tools", *(["thinking"] if can_think(template) else [])],
            **_details(service),
        }
    )


async def show_version(service: Service, http: HttpRequest, body: None) -> ASGIApp:
    """The version of the API."""
    return JSONResponse({"version": VERSION})


def refusal(path: str) -> ApiError | None:
    """The error of an endpoint of Ollama that this server has not; None: it is none of them."""
    name = path.removeprefix(OLLAMA_PATH).split("/")[0]
    if not path.startswith(OLLAMA_PATH) or name not in _NOT_OFFERED:
        return None
    return ApiError(HTTPStatus.NOT_IMPLEMENTED, f"{OLLAMA_PATH}{name} is not offered: this server {_NOT_OFFERED[name]}")


def _served(service: Service, name: str | None) -> str:
    """The served name that a client means, which may add the tag of a name that has none."""
    names, short = service.settings.served_names, (name or "").removesuffix(_LATEST)
    return short if name not in names and short in names else service.check_model(name)


def _template(service: Service) -> str:
    return service.loaded.model.codec.chat_template or ""


def _details(service: Service) -> dict[str, Any]:
    model = service.loaded.model
    kind, unknown = model.config.architecture, dict.fromkeys(("parent_model", "format", "parameter_size"), "")
    return {
        "modified_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
        "details": {**unknown, "family": kind, "families": [kind], "quantization_level": model.precision},
    }
