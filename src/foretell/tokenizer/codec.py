"""A tokenizer together with its model's chat template."""

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from foretell.tokenizer.chat_template import ChatTemplate
from foretell.tokenizer.directory import read_directory
from foretell.tokenizer.stream import Detokenizer
from foretell.tokenizer.template_forms import reads_parts, reads_strings
from foretell.utils.json_values import map_texts, texts

Message = Mapping[str, Any]
"""A turn of a conversation: `role` (system, user, assistant, tool) and `content`, and further JSON values that a chat
template reads, as `tool_calls`.
"""

_CONTENT_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"
_END_MARK = "\ufffcEND\ufffc "
"""What marks the end of a message that is to be continued."""
_NONCHARACTERS = range(0xFDD0, 0xFDF0)
"""Code points that Unicode reserves for the internal use of programs."""


@dataclass(frozen=True)
class TextCodec:
    """A tokenizer with its model's chat template."""

    tokenizer: Tokenizer
    chat_template: str | None = None
    bos: str | None = None
    eos: str | None = None
    named_templates: Mapping[str, str] = field(default_factory=dict)
    """Further templates: `tool_use` is for conversations with tools; others are chosen by name."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Further special tokens that templates may name, as `pad_token`."""
    template_date: datetime | None = None
    """The date that templates are told; None: that of the day."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The token that the tokenizer names as the end of a text, if it has it."""
        eos_id = None if self.eos is None else self.tokenizer.token_to_id(self.eos)
        return () if eos_id is None else (eos_id,)

    def template_for(self, with_tools: bool) -> str | None:
        """The template of conversations with tools, or without."""
        return self.named_templates.get("tool_use", self.chat_template) if with_tools else self.chat_template

    def has_same_tokens(self, other: "TextCodec") -> bool:
        """Whether every token has the same id and text."""
        return bool(self.tokenizer.get_vocab() == other.tokenizer.get_vocab())

    def unused_special_tokens(self, eos: Collection[int]) -> list[int]:
        """Special tokens, ascending, that the chat template does not use and that end no text."""
        used = (self.chat_template or "") + (self.bos or "") + (self.eos or "")
        added = self.tokenizer.get_added_tokens_decoder()
        return [i for i, t in sorted(added.items()) if t.special and t.content not in used and i not in eos]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of raw text; `add_special_tokens`: with the special tokens that the tokenizer adds to a prompt.

        Raises:
            ValueError: the text contains a lone surrogate.
        """
        return list(self.tokenizer.encode(_checked_text(text), add_special_tokens=add_special_tokens).ids)

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids, without special tokens unless asked for."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def chat(
        self,
        messages: Sequence[Message],
        allow_special_tokens: bool = False,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation with the generation prompt.

        Special tokens of the template are encoded as such. The text of a special token inside a message or a variable
        is encoded as ordinary text unless `allow_special_tokens`. `continue_final_message`: the ids end with the text
        of the last message, which the model continues, without a generation prompt. `variables`: further variables of
        the template.

        Raises:
            ValueError: a message without role or content, no chat template, or the template refuses the conversation,
                or the last message is to be continued and its text is not in the template's output.
        """
        for number, message in enumerate(messages, 1):
            _check_message(number, message)

        def render(messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
            if not continue_final_message:
                return self._render(messages, add_generation_prompt, variables)
            return _up_to_mark(self._render(_with_mark(messages), False, variables))

        given = variables or {}
        if allow_special_tokens or not any(map(self._contains_special_token, texts([messages, given]))):
            return self.encode(render(messages, given), add_special_tokens=False)
        return self._encode_with_special_text(messages, given, render)

    def user_turn_prefix(self) -> list[int]:
        """Token ids of a conversation up to the content of the first user message: a model that continues them writes
        a question.

        Raises:
            ValueError: the model has no chat template.
        """
        return self.encode(
            self._render([{"role": "user", "content": _CONTENT_MARK}]).split(_CONTENT_MARK)[0], add_special_tokens=False
        )

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        given = {**self.special_tokens, **(variables or {})}
        source = self.template_for(given.get("tools") is not None)
        if source is None:
            named = (
                f"; it has templates named {', '.join(sorted(self.named_templates))}" if self.named_templates else ""
            )
            raise ValueError(f"this model has no chat template: give raw text (`foretell generate --raw`){named}")
        if not reads_strings(source) and reads_parts(source):
            messages = [_in_parts(message) for message in messages]
        return _compiled(source).render(messages, self.bos, self.eos, add_generation_prompt, given, self.template_date)

    @cached_property
    def _special_token_pattern(self) -> re.Pattern[str] | None:
        """A pattern that matches the text of every special token."""
        texts = [t.content for t in self.tokenizer.get_added_tokens_decoder().values() if t.special and t.content]
        return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True)))) if texts else None

    @cached_property
    def _matches_normalized_text(self) -> bool:
        """Whether the tokenizer searches normalized text for a special token."""
        added = self.tokenizer.get_added_tokens_decoder().values()
        return self.tokenizer.normalizer is not None and any(t.special and t.normalized for t in added)

    def _contains_special_token(self, text: str) -> bool:
        if self._special_token_pattern is None:
            return False
        normalized = (
            self.tokenizer.normalizer.normalize_str(_checked_text(text)) if self._matches_normalized_text else ""
        )
        return bool(self._special_token_pattern.search(text) or self._special_token_pattern.search(normalized))

    def _encode_with_special_text(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        render: Callable[[Sequence[Message], Mapping[str, Any]], str],
    ) -> list[int]:
        """Token ids of a conversation whose messages or variables contain the text of special tokens.

        The template is rendered with a placeholder for each such text. The special tokens in its output are then those
        of the template: they are renamed, the placeholders are replaced by the messages' text, and a tokenizer that
        knows the special tokens by their new names only encodes the result.
        """
        assert self._special_token_pattern is not None
        tokenizer, names, ids = self._with_renamed_special_tokens
        written = "".join(texts([messages, variables, self.named_templates])) + (self.chat_template or "")
        mark = next(c for c in map(chr, _NONCHARACTERS) if c not in written)
        hidden = list[str]()

        def hide(match: re.Match[str]) -> str:
            hidden.append(match[0])
            return f"{mark}{len(hidden) - 1}{mark}"

        masked, values = (map_texts(x, partial(self._special_token_pattern.sub, hide)) for x in (messages, variables))
        text = self._special_token_pattern.sub(lambda match: names[match[0]], render(masked, values))
        text = re.sub(f"{mark}([0-9]+){mark}", lambda match: hidden[int(match[1])], text)
        token_ids = tokenizer.encode(_checked_text(text), add_special_tokens=False).ids
        return [ids.get(i, i) for i in token_ids]

    @cached_property
    def _with_renamed_special_tokens(self) -> tuple[Tokenizer, dict[str, str], dict[int, int]]:
        """The tokenizer with its special tokens renamed to random texts, the new names by old name, and the original
        ids by new id.
        """
        state, key = json.loads(self.tokenizer.to_str()), secrets.token_hex(16)
        special = {t["content"]: t["id"] for t in state["added_tokens"] if t["special"]}
        names = {text: f"<{key}-{i}>" for text, i in special.items()}
        for token in state["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model, vocab = state["model"], state["model"]["vocab"]
        if isinstance(vocab, dict):
            model["vocab"] = {names.get(text, text): i for text, i in vocab.items()}
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        else:
            model["vocab"] = [(names.get(text, text), score) for text, score in vocab]
        if "merges" in model:
            model["merges"] = [pair for pair in model["merges"] if "".join(pair) not in names]
        state["post_processor"] = None
        renamed = Tokenizer.from_str(json.dumps(state))
        new_ids = {text: renamed.token_to_id(name) for text, name in names.items()}
        return renamed, names, {new: special[text] for text, new in new_ids.items() if new is not None}

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A new incremental detokenizer, of text without special tokens unless asked for."""
        if skip_special_tokens:
            return Detokenizer(self.decode, self._run_tokens)
        return Detokenizer(partial(self.decode, skip_special_tokens=False), self._run_tokens)

    @cached_property
    def _run_tokens(self) -> frozenset[int]:
        """Tokens whose text depends on their neighbours: of a ByteFallback decoder the tokens of single bytes
        (`<0x0A>`), and the special tokens, which decoding leaves out. Empty for other decoders.
        """
        decoder = self.tokenizer.decoder
        if decoder is None or b'"ByteFallback"' not in decoder.__getstate__():
            return frozenset()
        names = (f"<0x{byte:{form}}>" for byte in range(256) for form in ("02X", "02x"))
        special = {i for i, token in self.tokenizer.get_added_tokens_decoder().items() if token.special}
        return frozenset(i for name in names if (i := self.tokenizer.token_to_id(name)) is not None) | special


def _checked_text(text: str) -> str:
    """The text unchanged."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = f"U+{ord(text[error.start]):04X}"
        raise ValueError(
            f"the text contains {code}, which is no character (half of a surrogate pair, or a byte that is not UTF-8); "
            f"remove it"
        ) from None
    return text


@lru_cache(maxsize=16)
def _compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source)


def _check_message(number: int, message: Message) -> None:
    example = "give it as {'role': 'user', 'content': '...'}"
    if not isinstance(message, Mapping):
        raise ValueError(f"message {number} is no mapping: {example}")
    if not isinstance(message.get("role", ""), str):
        raise ValueError(f"message {number} has a role that is no text: {example}")
    for key in ("role", "content"):
        if key not in message and not (key == "content" and message.get("tool_calls")):
            raise ValueError(f"message {number} has no {key!r}: {example}")
    content = message.get("content")
    if isinstance(content, list | tuple):
        if not all(isinstance(part, Mapping) for part in content):
            raise ValueError(
                f"message {number} has a part that is no mapping: give it as {{'type': 'text', 'text': '...'}}"
            )
    elif not isinstance(content, str | None):
        raise ValueError(f"message {number} has a content that is neither text nor a list of parts: {example}")


def _in_parts(message: Message) -> Message:
    """The message with its text as a list of parts."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _with_mark(messages: Sequence[Message]) -> list[Message]:
    """The messages with a mark at the end of the last one's text."""
    last = dict(messages[-1]) if messages else {}
    content = last.get("content")
    if isinstance(content, list | tuple):
        parts = [dict(part) for part in content]
        part = next((part for part in reversed(parts) if isinstance(part.get("text"), str)), None)
        if part is not None:
            part["text"] += _END_MARK
            return [*messages[:-1], last | {"content": parts}]
    if not isinstance(content, str) or not content.strip():
        raise ValueError("the last message cannot be continued: it has no text")
    return [*messages[:-1], last | {"content": content + _END_MARK}]


def _up_to_mark(text: str) -> str:
    """The text of a conversation up to the mark in its last message."""
    end = text.rfind(_END_MARK.strip())
    if end < 0:
        raise ValueError("the last message cannot be continued: the chat template changes its text")
    # A template that strips the blank of the mark strips those of the message.
    return text[:end] if text.startswith(_END_MARK, end) else text[:end].rstrip()


def from_directory(path: Path) -> TextCodec:
    """The tokenizer of a Hugging Face model directory.

    Raises:
        ValueError: see `read_directory`.
    """
    tokenizer, special, templates = read_directory(path)
    bos, eos = special.pop("bos_token", None), special.pop("eos_token", None)
    return TextCodec(tokenizer, templates.pop("default", None), bos, eos, templates, special)
