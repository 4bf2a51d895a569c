"""Reads texts by vLLM's own parsers: JSON lines of `[parser, text, functions]` in, JSON of the calls or reasoning out.

Run by a Python that has vLLM (the package without a GPU is enough); see `test_vllm_parsers.py`.
"""

import json
import logging
import re
import sys
from collections.abc import Sequence
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

    def encode(self, text: str, **_: Any) -> list[int]:
        """Ids of a text."""
        pattern = "|".join(map(re.escape, sorted(self.ids, key=len, reverse=True)))
        return [self.ids.get(piece, 1000 + ord(piece[0])) for piece in re.findall(f"{pattern}|.", text, re.DOTALL)]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """The text of ids."""
        names = {i: mark for mark, i in self.ids.items()}
        return "".join(names[i] if i in names else chr(i - 1000) for i in ids)


ALWAYS = """
<think> </think> [THINK] [/THINK] <|python_tag|> [TOOL_CALLS] <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜>
<|tool_call_start|> <|tool_call_end|> <|channel> <channel|> <|tool_call> <tool_call|> <tool_call> </tool_call>
<|tool_call|> <minimax:tool_call> </minimax:tool_call>
""".split()  # noqa: SIM905


def main() -> None:
    """Read the standard input."""
    logging.disable(logging.CRITICAL)
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # type: ignore[import-not-found]
    from vllm.reasoning import ReasoningParserManager  # type: ignore[import-not-found]
    from vllm.tool_parsers import ToolParserManager  # type: ignore[import-not-found]

    for line in sys.stdin:
        name, text, functions = json.loads(line)
        tokenizer = Tokenizer(sorted({*ALWAYS, *MARKS.findall(text)}))
        named = [{"name": n} | ({} if p is None else {"parameters": p}) for n, p in (functions or {}).items()]
        request = ChatCompletionRequest(
            model="m",
            messages=[{"role": "user", "content": "x"}],
            tools=[{"type": "function", "function": f} for f in named] or None,
        )
        answer: Any
        if functions is None:
            answer = ReasoningParserManager.get_reasoning_parser(name)(tokenizer).extract_reasoning(text, request)
        else:
            read = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools).extract_tool_calls(text, request)
            answer = [(call.function.name, call.function.arguments) for call in read.tool_calls]
        print("found " + json.dumps(answer))


if __name__ == "__main__":
    main()
