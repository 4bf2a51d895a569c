"""Turns messages and prompts into token ids, with limits that are checked before the work is done."""

from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

from foretell.model.load.images import UNREAD, ReadImage, VisionLanguage
from foretell.model.run.runner import PromptImages
from foretell.serve.errors import ApiError, bad_request
from foretell.serve.protocol.chat import CalledFunction, ChatBody, ChatMessage
from foretell.serve.reasoning import Reasoning, reasoning_of
from foretell.serve.settings import Limits, SyntaxNames
from foretell.serve.tools.cut import completed
from foretell.serve.tools.default_format import with_tools
from foretell.serve.tools.syntax import reads_tools
from foretell.serve.tools.use import ToolUse, tools_of
from foretell.tokenizer.codec import TextCodec
from foretell.tokenizer.template_forms import reads_argument_objects, reads_parts
from foretell.utils.json_values import nesting, texts
from foretell.utils.validation import parse_object, show

_SHOWN = 64
"""Last tokens of a prompt, which show whether it opens the reasoning."""
_ROLES = {"developer": "system", "function": "tool"}
"""Roles under the names that chat templates know."""


class Encoded(NamedTuple):
    """A conversation as token ids, and what the model reads of images in it."""

    tokens: list[int]
    images: PromptImages | None = None


class PromptEncoder:
    """Encodes prompts for a model of `context` tokens; its methods run in the pool of tokenizer threads. `vision` reads
    images for it; None: it reads text only.
    """

    def __init__(
        self,
        codec: TextCodec,
        context: int,
        limits: Limits,
        trust_request_chat_template: bool,
        names: SyntaxNames | None = None,
        vision: VisionLanguage | None = None,
    ) -> None:
        self._codec, self._context, self._limits = codec, context, limits
        self._vision = vision
        self._trusted, self._names = trust_request_chat_template, names or SyntaxNames()

    def tools(self, body: ChatBody) -> ToolUse | None:
        """The tools that the model may call.

        Raises:
            ApiError: too many, two with the same name, or the chosen one is not there.
        """
        self._check_count(len(body.tools or body.functions or ()), self._limits.tools, "tools")
        return tools_of(body, self._template_of(body), self._names.tools)

    def reasoning(self, body: ChatBody, prompt: Sequence[int], use: ToolUse | None) -> Reasoning | None:
        """The reasoning of the answers to an encoded prompt; None: the model shows none."""
        codec, continued = self._template_of(body), bool(body.continue_final_message)
        syntax = reasoning_of(codec.chat_template, self._names.reasoning)
        if syntax is None:
            return None
        end = codec.decode(prompt if continued else prompt[-_SHOWN:], skip_special_tokens=False)
        calls = () if use is None or syntax.hidden else use.syntax.marks
        return Reasoning(syntax, syntax.opened_by(end, continued), tuple(mark for mark in calls if mark[0] in "<["))

    def chat(self, body: ChatBody, use: ToolUse | None = None) -> Encoded:
        """An encoded conversation; `use`: the tools that the model may call.

        Raises:
            ApiError: too long, or the model's template refuses it, or it has an image that cannot be read.
        """
        add_generation_prompt = body.add_generation_prompt is not False and not body.continue_final_message
        if body.add_generation_prompt and body.continue_final_message:
            raise bad_request(
                "add_generation_prompt and continue_final_message exclude each other", "continue_final_message"
            )
        codec, variables = self._template_of(body), dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None and "reasoning_effort" in (codec.chat_template or ""):
            variables.setdefault("reasoning_effort", body.reasoning_effort)
        if body.documents:
            if "documents" not in (codec.chat_template or ""):
                raise bad_request("this model's chat template takes no documents; put them in a message", "documents")
            variables["documents"] = body.documents
        return self.messages(
            body.messages,
            codec,
            add_generation_prompt,
            bool(body.continue_final_message),
            variables,
            [] if use is None else use.definitions,
        )

    def messages(
        self,
        messages: Sequence[ChatMessage],
        codec: TextCodec | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Encoded:
        """Encoded messages; `tools`: definitions of the functions that the model may call.

        Raises:
            ApiError: too many messages, too long, the template refuses them, or one has an image that cannot be read.
        """
        self._check_count(len(messages), self._limits.messages, "messages")
        images = self._read_images(messages)
        codec, values = codec or self._codec, dict(variables or {})
        template = codec.template_for(bool(tools)) or ""
        as_text = not reads_tools(template) and (bool(tools) or any(map(_is_of_tools, messages)))
        given = [_plain(i, m, template, as_text) for i, m in enumerate(messages)]
        if as_text:
            given = with_tools([{"content": ""} | message for message in given], tools)
        elif tools:
            values["tools"] = list(tools)
        self._check_size(given, "messages")
        self._check_size(values, "tools" if tools else "chat_template_kwargs")
        encode = partial(
            codec.chat,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=values,
        )
        try:
            tokens = encode(given)
        except ValueError as error:
            if all("content" in message for message in given):
                raise bad_request(str(error), "messages") from error
            try:  # Some templates refuse a call without a text.
                tokens = encode([{"content": ""} | message for message in given])
            except ValueError as again:
                raise bad_request(str(again), "messages") from again
        if self._vision is None or not (images or self._vision.image_token in tokens):
            return Encoded(tokens)
        try:
            return Encoded(*self._vision.place(tokens, images))
        except ValueError as error:
            raise bad_request(f"{error}: this model's chat template writes images otherwise", "messages") from error

    def _read_images(self, messages: Sequence[ChatMessage]) -> list[ReadImage]:
        """The images of messages in their order."""
        urls = {
            f"messages.{i}.content.{part}": (message.role, url)
            for i, message in enumerate(messages)
            for part, url in message.images.items()
        }
        if len(urls) > self._limits.images:
            raise bad_request(
                f"messages have {len(urls)} images, and this server takes at most {self._limits.images}", "messages"
            )
        read = list[ReadImage]()
        for place, (role, url) in urls.items():
            if self._vision is None:
                raise bad_request(f"this model reads text only; leave the image out ({UNREAD})", place)
            if role != "user":
                raise bad_request(f"images are read in messages of the user, and this one is of the role {role}", place)
            data = _data_of(url, place)
            try:
                read.append(self._vision.read(data))
            except ValueError as error:
                raise bad_request(str(error), place) from error
        return read

    def prompts(self, prompts: Sequence[str] | Sequence[Sequence[int]], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of the prompts of a completion.

        Raises:
            ApiError: too many, too long, or a text that cannot be encoded.
        """
        self._check_count(len(prompts), self._limits.prompts, "prompt")
        self._check_chars(sum(len(p) for p in prompts if isinstance(p, str)), "prompt", len(prompts))
        try:
            encoded = [self._codec.encode(p, add_special_tokens) if isinstance(p, str) else list(p) for p in prompts]
        except ValueError as error:
            raise bad_request(str(error), "prompt") from error
        if self._vision is not None and any(self._vision.image_token in tokens for tokens in encoded):
            raise bad_request(
                "the prompt names the place of an image, and completions are of text alone; send images to "
                "/v1/chat/completions",
                "prompt",
            )
        return encoded

    def _template_of(self, body: ChatBody) -> TextCodec:
        if body.chat_template is None:
            return self._codec
        if body.chat_template in self._codec.named_templates:
            named = self._codec.named_templates[body.chat_template]
            return replace(self._codec, chat_template=named, named_templates={})
        if not self._trusted:
            raise bad_request(
                "this server uses no templates of requests; it can be started with --trust-request-chat-template",
                "chat_template",
            )
        return replace(self._codec, chat_template=body.chat_template, named_templates={})

    def _check_count(self, count: int, most: int, param: str) -> None:
        if count > most:
            raise bad_request(f"{param} has {count} entries, and this server takes at most {most}", param)

    def _check_size(self, value: object, param: str) -> None:
        most = self._limits.nesting
        if nesting(value, most) > most:
            raise bad_request(f"{param} has more than {most} levels of objects and arrays", param)
        self._check_chars(sum(map(len, texts(value))), param)

    def _check_chars(self, count: int, param: str, prompts: int = 1) -> None:
        most = self._limits.chars_per_token * self._context * prompts
        if count > most:
            raise context_exceeded(f"the prompt has {count} characters", self._context, param)


def context_exceeded(what: str, context: int, param: str) -> ApiError:
    """The error for a prompt that does not fit the context."""
    return bad_request(
        f"this model's maximum context length is {context} tokens, and {what}; shorten it",
        param,
        "context_length_exceeded",
    )


def _data_of(url: str, place: str) -> bytes:
    """The content of a data URL."""
    head, _, data = url.partition(",")
    head = head.lower().rstrip()
    if not head.startswith("data:"):
        raise bad_request(
            f"an image is given as a data URL (data:image/png;base64,...), and this server fetches nothing; found "
            f"{show(url)}",
            place,
        )
    try:
        if not head.endswith(";base64"):
            raise ValueError
        return b64decode(b"".join(unquote_to_bytes(data).split()), validate=True)
    except ValueError as error:
        raise bad_request("the data URL of an image is no base64 (data:image/png;base64,...)", place) from error


def _is_of_tools(message: ChatMessage) -> bool:
    return bool(message.tool_calls or message.function_call) or message.role in ("tool", "function")


def _plain(number: int, message: ChatMessage, template: str, as_text: bool) -> dict[str, Any]:
    """A message as its chat template reads it: a developer's is a system message; contents are texts (where
    `as_text`: all without images) or parts, and arguments of calls objects or texts.
    """
    content: Any = message.text
    if isinstance(message.content, list) and (message.images or (not as_text and reads_parts(template))):
        content = [part if "text" in part else {"type": "image"} for part in message.content]
    calls = [
        {"type": "function", "function": _called(number, call.function, template), **(call.model_extra or {})}
        | ({"id": call.id} if call.id else {})
        for call in message.tool_calls or ()
    ]
    if message.function_call is not None:
        calls.append({"type": "function", "function": _called(number, message.function_call, template)})
    thought = message.reasoning_content or message.reasoning
    optional = {
        "name": message.name,
        "tool_calls": calls or None,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": thought,
        "reasoning": thought,
        "thinking": message.thinking,
        "content": None if calls and message.content is None else content,
    }
    given = {"role": _ROLES.get(message.role, message.role), **(message.model_extra or {}), **optional}
    return {name: value for name, value in given.items() if value is not None}


def _called(number: int, function: CalledFunction, template: str) -> dict[str, Any]:
    try:
        text = completed(function.arguments or "{}")
        arguments = parse_object(text, "the arguments of a call")
    except ValueError as error:
        raise bad_request(str(error), f"messages.{number}.tool_calls") from error
    as_text = not reads_argument_objects(template)
    return {"name": function.name, "arguments": text if as_text else arguments}
