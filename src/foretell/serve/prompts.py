"""Turns messages and prompts into token ids, with limits that are checked before the work is done."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from foretell.serve.errors import ApiError, bad_request
from foretell.serve.protocol.chat import ChatBody, ChatMessage
from foretell.serve.settings import Limits
from foretell.tokenizer.codec import TextCodec


class PromptEncoder:
    """Encodes prompts for a model of `context` tokens; its methods run in the pool of tokenizer threads."""

    def __init__(self, codec: TextCodec, context: int, limits: Limits, trust_request_chat_template: bool) -> None:
        self._codec, self._context, self._limits = codec, context, limits
        self._trusted = trust_request_chat_template

    def chat(self, body: ChatBody) -> list[int]:
        """Token ids of a conversation.

        Raises:
            ApiError: too long, or the model's template refuses it.
        """
        add_generation_prompt = body.add_generation_prompt is not False and not body.continue_final_message
        if body.add_generation_prompt and body.continue_final_message:
            raise bad_request(
                "add_generation_prompt and continue_final_message exclude each other", "continue_final_message"
            )
        return self.messages(
            body.messages,
            self._template_of(body),
            add_generation_prompt,
            bool(body.continue_final_message),
            body.chat_template_kwargs or {},
        )

    def messages(
        self,
        messages: Sequence[ChatMessage],
        codec: TextCodec | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: dict[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of messages.

        Raises:
            ApiError: too many messages, too long, or the template refuses them.
        """
        self._check_count(len(messages), self._limits.messages, "messages")
        self._check_chars(sum(len(m.content or "") for m in messages), "messages")
        given = [_plain(m) for m in messages]
        try:
            return (codec or self._codec).chat(
                given,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=variables or {},
            )
        except ValueError as error:
            raise bad_request(str(error), "messages") from error

    def prompts(self, prompts: Sequence[str] | Sequence[Sequence[int]], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of the prompts of a completion.

        Raises:
            ApiError: too many, too long, or a text that cannot be encoded.
        """
        self._check_count(len(prompts), self._limits.prompts, "prompt")
        self._check_chars(sum(len(p) for p in prompts if isinstance(p, str)), "prompt", len(prompts))
        try:
            return [self._codec.encode(p, add_special_tokens) if isinstance(p, str) else list(p) for p in prompts]
        except ValueError as error:
            raise bad_request(str(error), "prompt") from error

    def _template_of(self, body: ChatBody) -> TextCodec:
        if body.chat_template is None:
            return self._codec
        if not self._trusted:
            raise bad_request(
                "this server uses no templates of requests; it can be started with --trust-request-chat-template",
                "chat_template",
            )
        return replace(self._codec, chat_template=body.chat_template)

    def _check_count(self, count: int, most: int, param: str) -> None:
        if count > most:
            raise bad_request(f"{param} has {count} entries, and this server takes at most {most}", param)

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


def _plain(message: ChatMessage) -> dict[str, Any]:
    """A message as chat templates read it; a developer's is a system message."""
    role = "system" if message.role == "developer" else message.role
    given = {"role": role, "content": message.content or ""}
    return given | ({} if message.name is None else {"name": message.name})
