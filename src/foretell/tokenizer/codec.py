"""A tokenizer together with its model's chat template."""

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from foretell.tokenizer.byte_level import is_qwen2, read_qwen2
from foretell.tokenizer.chat_template import ChatTemplate
from foretell.tokenizer.stream import Detokenizer
from foretell.utils.json_values import map_texts, texts
from foretell.utils.validation import read_json

Message = Mapping[str, Any]
"""A turn of a conversation: `role` (system, user, assistant, tool) and `content`, and further JSON values that a chat
template reads, as `tool_calls`.
"""

_CONTENT_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"
_TOKENIZER = "tokenizer.json"
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
            text = self._render(messages, add_generation_prompt and not continue_final_message, variables)
            return _up_to_final_message(text, messages) if continue_final_message else text

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
        if self.chat_template is None:
            raise ValueError("this model has no chat template: give raw text (`foretell generate --raw`)")
        return self._template.render(messages, self.bos or "", self.eos or "", add_generation_prompt, variables)

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.chat_template or "")

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
        written = "".join(texts([messages, variables])) + (self.chat_template or "")
        mark = next(c for c in map(chr, _NONCHARACTERS) if c not in written)
        hidden = list[str]()

        def hide(match: re.Match[str]) -> str:
            hidden.append(match[0])
            return f"{mark}{len(hidden) - 1}{mark}"

        masked, values = (map_texts(x, partial(self._special_token_pattern.sub, hide)) for x in (messages, variables))
        text = self._special_token_pattern.sub(lambda match: names[match[0]], render(masked, values))
        text = re.sub(f"{mark}([0-9]+){mark}", lambda match: hidden[int(match[1])], text)
        found = tokenizer.encode(_checked_text(text), add_special_tokens=False).ids
        return [ids.get(i, i) for i in found]

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
        found = {text: renamed.token_to_id(name) for text, name in names.items()}
        return renamed, names, {new: special[text] for text, new in found.items() if new is not None}

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
    """The text unchanged.

    Raises:
        ValueError: it contains a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = f"U+{ord(text[error.start]):04X}"
        raise ValueError(
            f"the text contains {code}, which is no character (half of a surrogate pair, or a byte that is not UTF-8); "
            f"remove it"
        ) from None
    return text


def _check_message(number: int, message: Message) -> None:
    example = "give it as {'role': 'user', 'content': '...'}"
    if not isinstance(message, Mapping):
        raise ValueError(f"message {number} is no mapping of strings: {example}")
    for key in ("role", "content"):
        if key not in message:
            raise ValueError(f"message {number} has no {key!r}: {example}")
        if not isinstance(message[key], str):
            raise ValueError(f"message {number} is no mapping of strings: {example}")


def _up_to_final_message(text: str, messages: Sequence[Message]) -> str:
    """The text of a conversation up to the end of its last message.

    Raises:
        ValueError: the last message is empty, or the template changes its text.
    """
    content = messages[-1]["content"].strip() if messages else ""
    start = text.rfind(content) if content else -1
    if start < 0:
        raise ValueError("the last message cannot be continued: its text is empty, or the chat template changes it")
    return text[: start + len(content)]


def require_tokenizer(path: Path) -> None:
    """Check that a model directory has a tokenizer that `from_directory` reads.

    Raises:
        ValueError: it has none.
    """
    if not (path / _TOKENIZER).is_file() and not is_qwen2(path, _read_tokenizer_config(path)):
        raise ValueError(
            f"{path}: no {_TOKENIZER} here; convert the tokenizer with transformers' `save_pretrained` first"
        )


def from_directory(path: Path) -> TextCodec:
    """Read the tokenizer of a Hugging Face model directory (`tokenizer.json`, or the files of Qwen2's byte-level BPE),
    `tokenizer_config.json` and the chat template.

    Raises:
        ValueError: there is no tokenizer, or a file is damaged.
    """
    require_tokenizer(path)
    raw = _read_tokenizer_config(path)
    template = raw.get("chat_template")
    if isinstance(template, list):
        template = next(
            (t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"), None
        )
    if (path / "chat_template.jinja").is_file():
        template = (path / "chat_template.jinja").read_text("utf-8")
    if not isinstance(template, str | None):
        raise ValueError(f"{path / 'tokenizer_config.json'}: chat_template must be a string, found {template!r:.80}")

    def token(name: str) -> str | None:
        value = raw.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if not isinstance(value, str | None):
            raise ValueError(f"{path / 'tokenizer_config.json'}: {name} must be a string, found {value!r:.80}")
        return value

    file = path / _TOKENIZER
    tokenizer = _read_tokenizer(file) if file.is_file() else read_qwen2(path, raw)
    return TextCodec(tokenizer, template, token("bos_token"), token("eos_token"))


def _read_tokenizer_config(path: Path) -> dict[str, Any]:
    file = path / "tokenizer_config.json"
    return read_json(file, "download it again") if file.is_file() else {}


def _read_tokenizer(file: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(f"{file}: damaged tokenizer ({error}); download it again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
