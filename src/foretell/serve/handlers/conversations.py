"""`/v1/responses` and Anthropic's `/v1/messages`, which are converted to chat completions."""

from pydantic_core import to_json
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from foretell.serve.convert.base import renamed
from foretell.serve.convert.messages import PARAMS as MESSAGES_PARAMS
from foretell.serve.convert.messages import chat_of_messages
from foretell.serve.convert.responses import PARAMS as RESPONSES_PARAMS
from foretell.serve.convert.responses import chat_of_response, settings_of
from foretell.serve.formats.base import AnswerFormat
from foretell.serve.formats.messages import MessagesFormat
from foretell.serve.formats.responses import ResponsesFormat
from foretell.serve.handlers.generate import Generation, respond
from foretell.serve.handlers.text import Prepared, prepare_chat
from foretell.serve.protocol.chat import ChatBody
from foretell.serve.protocol.generation import GenerationBody
from foretell.serve.protocol.messages import CountTokensBody, MessagesBody
from foretell.serve.protocol.responses import ResponsesBody
from foretell.serve.service import Service


async def responses(service: Service, http: HttpRequest, body: ResponsesBody) -> ASGIApp:
    """Answer a conversation of items."""
    with renamed(RESPONSES_PARAMS):
        prepared = await prepare_chat(service, chat_of_response(body))
    format = ResponsesFormat(prepared.head, prepared.parts, settings_of(body))
    return await _respond(service, http, body, prepared, format)


async def response_tokens(service: Service, http: HttpRequest, body: ResponsesBody) -> ASGIApp:
    """Count the tokens of a conversation of items."""
    with renamed(RESPONSES_PARAMS):
        count = await _count(service, chat_of_response(body))
    return _json({"object": "response.input_tokens", "input_tokens": count})


async def messages(service: Service, http: HttpRequest, body: MessagesBody) -> ASGIApp:
    """Answer a conversation of content blocks."""
    with renamed(MESSAGES_PARAMS):
        prepared = await prepare_chat(service, chat_of_messages(body))
    format = MessagesFormat(prepared.head, prepared.parts)
    return await _respond(service, http, body, prepared, format)


async def message_tokens(service: Service, http: HttpRequest, body: CountTokensBody) -> ASGIApp:
    """Count the tokens of a conversation of content blocks."""
    with renamed(MESSAGES_PARAMS):
        return _json({"input_tokens": await _count(service, chat_of_messages(body))})


async def _respond(
    service: Service, http: HttpRequest, body: GenerationBody, prepared: Prepared, format: AnswerFormat
) -> ASGIApp:
    phases = prepared.phases(service)
    return await respond(service, http, Generation(prepared.requests, 1, format, bool(body.stream), phases=phases))


async def _count(service: Service, body: ChatBody) -> int:
    service.check_model(body.model)
    return await service.in_pool(lambda: len(service.encoder.chat(body, service.encoder.tools(body)).tokens))


def _json(content: object) -> Response:
    return Response(to_json(content), media_type="application/json")
