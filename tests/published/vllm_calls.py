"""Reads texts by vLLM's own parsers: JSON lines of `[tools, reasoning, text, functions]` in, with the names of the
parsers or null, and JSON of reasoning, text and calls out.

Run by a Python that has vLLM (the package without a GPU is enough); see `test_vllm_parsers.py`.
"""

import json
import logging
import re
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

MARKS = re.compile(r"<\|[^<>\s]{1,40}\|?>|<｜[^<>]{1,40}｜>|\[ARGS\]")
"""Tokens of the tokenizer, with those below; all others are single characters."""


class Tokenizer:
    """As much of a tokenizer as the parsers ask for."""

    chat_template = None

    def __init__(self, marks: Sequence[str]) -> None:
        self.ids = {mark: 1 + i for i, mark in enumerate(marks)}
        self.all_special_tokens, self.all_special_ids = list(marks), list(self.ids.values())

    def get_vocab(self) -> dict[str, int]:
        """Ids of the marks."""
        return dict(self.ids)

    get_added_vocab = get_vocab
    vocab = property(get_vocab)

    def convert_tokens_to_ids(self, token: str) -> int:
        """The id of a mark; 0: it is none."""
        return self.ids.get(token, 0)

    def encode(self, text: str, **_: Any) -> list[int]:
        """Ids of a text."""
        pattern = "|".join(map(re.escape, sorted(self.ids, key=len, reverse=True)))
        return [self.ids.get(piece, 1000 + ord(piece[0])) for piece in re.findall(f"{pattern}|.", text, re.DOTALL)]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """The text of ids."""
        names = {i: mark for mark, i in self.ids.items()}
        return "".join(names[i] if i in names else chr(i - 1000) for i in ids)


class Harmony(Tokenizer):
    """The tokenizer of gpt-oss, whose parser reads tokens of it only; vLLM requires the package that has it."""

    def __init__(self) -> None:
        super().__init__([])
        from openai_harmony import HarmonyEncodingName, load_harmony_encoding  # type: ignore[import-not-found]

        self._encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)

    def encode(self, text: str, **_: Any) -> list[int]:
        """Ids of a text."""
        return list(self._encoding.encode(text, allowed_special="all"))

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """The text of ids."""
        return str(self._encoding.decode(list(ids)))


ALWAYS = """
<think> </think> [THINK] [/THINK] <|python_tag|> [TOOL_CALLS] <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜>
<|tool_call_start|> <|tool_call_end|> <|channel> <channel|> <|tool_call> <tool_call|> <tool_call> </tool_call>
<|tool_call|> <minimax:tool_call> </minimax:tool_call>
""".split()  # noqa: SIM905


def main() -> None:
    """Read the standard input."""
    logging.disable(logging.CRITICAL)
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # type: ignore[import-not-found]
    from vllm.parser import ParserManager  # type: ignore[import-not-found]

    harmony = cache(Harmony)
    for line in sys.stdin:
        tools, reasoning, text, functions = json.loads(line)
        is_harmony = "openai" in (tools, str(reasoning).partition("_")[0])
        tokenizer = harmony() if is_harmony else Tokenizer(sorted({*ALWAYS, *MARKS.findall(text)}))
        named = [{"name": n} | ({} if p is None else {"parameters": p}) for n, p in functions.items()]
        request = ChatCompletionRequest(
            model="m",
            messages=[{"role": "user", "content": "x"}],
            tools=[{"type": "function", "function": f} for f in named] or None,
            tool_choice="auto" if named else None,
        )
        parser = ParserManager.get_parser(tools, reasoning, enable_auto_tools=bool(tools), is_harmony=is_harmony)
        thought, said, calls = parser(tokenizer, request.tools).parse(
            text, request, enable_auto_tools=bool(tools), model_output_token_ids=tokenizer.encode(text)
        )
        answer = [thought or "", said or "", [(call.name, call.arguments) for call in calls or ()]]
        print("found " + json.dumps(answer))


if __name__ == "__main__":
    main()
