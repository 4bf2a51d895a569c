"""Models, tokens, health and version."""

from importlib.metadata import version

from pydantic_core import to_json
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from foretell.serve.errors import bad_request
from foretell.serve.protocol.info import DetokenizeBody, TokenizeBody
from foretell.serve.service import Service


def _json(content: object) -> Response:
    return Response(to_json(content), media_type="application/json")


async def models(service: Service, http: HttpRequest, body: None) -> ASGIApp:
    """All served names."""
    return _json({"object": "list", "data": [_card(service, name) for name in service.settings.served_names]})


async def model(service: Service, http: HttpRequest, body: None) -> ASGIApp:
    """One served name."""
    return _json(_card(service, service.check_model(http.path_params["model"])))


def _card(service: Service, name: str) -> dict[str, object]:
    loaded = service.loaded
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "foretell",
        "root": loaded.model.name,
        "parent": service.settings.served_names[0] if name in loaded.model.adapters else None,
        "max_model_len": loaded.model.config.context,
        "methods": sorted(loaded.methods.allowed),
        "default_method": loaded.methods.default,
    }


async def health(service: Service, http: HttpRequest, body: None) -> ASGIApp:
    """Whether requests can be served now."""
    service.check_ready()
    return _json({"status": "ok"})


async def live(service: Service, http: HttpRequest, body: None) -> ASGIApp:
    """Whether the process answers."""
    return _json({"status": "ok"})


async def show_version(service: Service, http: HttpRequest, body: None) -> ASGIApp:
    """The version of the package."""
    return _json({"version": version("foretell")})


async def tokenize(service: Service, http: HttpRequest, body: TokenizeBody) -> ASGIApp:
    """Token ids of a text or a conversation."""
    service.check_model(body.model)
    encoder, text = service.encoder, body.prompt if body.prompt is not None else body.content
    if body.messages is not None:
        generation = body.add_generation_prompt is not False
        tokens, _ = await service.in_pool(encoder.messages, body.messages, None, generation)
    else:
        (tokens,) = await service.in_pool(encoder.prompts, [text or ""], body.add_special_tokens is not False)
    names = {"token_strs": [service.texts.of(t)[0] for t in tokens]} if body.return_token_strs else {}
    limit = service.loaded.model.config.context
    return _json({"count": len(tokens), "max_model_len": limit, "tokens": tokens, **names})


async def detokenize(service: Service, http: HttpRequest, body: DetokenizeBody) -> ASGIApp:
    """The text of token ids."""
    service.check_model(body.model)
    loaded = service.loaded.model
    most = service.settings.limits.chars_per_token * loaded.config.context
    if len(body.tokens) > most:
        raise bad_request(f"tokens has {len(body.tokens)} entries, and this server takes at most {most}", "tokens")
    if any(t >= loaded.config.vocab for t in body.tokens):
        raise bad_request(f"a token is outside the vocabulary of {loaded.config.vocab}", "tokens")
    text = await service.in_pool(loaded.codec.decode, body.tokens)
    return _json({"prompt": text, "content": text})
