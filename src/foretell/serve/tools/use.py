"""The tools of a request, and how the model may use them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretell.serve.errors import bad_request
from foretell.serve.protocol.chat import ChatBody
from foretell.serve.protocol.tools import FunctionDefinition, ToolChoice
from foretell.serve.tools.parser import ToolParser
from foretell.serve.tools.syntax import ToolSyntax, syntax_of
from foretell.tokenizer.codec import TextCodec


@dataclass(frozen=True)
class ToolUse:
    """Functions that the model may call, in a syntax. `special`: ids of the tokenizer's special tokens by text."""

    functions: Sequence[FunctionDefinition]
    choice: ToolChoice
    parallel: bool
    syntax: ToolSyntax
    special: Mapping[str, int]

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """The functions as chat templates read them."""
        return [
            {"type": "function", "function": f.model_dump(exclude={"strict"}, exclude_none=True)}
            for f in self.functions
        ]

    @property
    def needs_special_tokens(self) -> bool:
        """Whether calls are marked by special tokens, which the text must then show."""
        return any(token in text for token in self.special for text in self.syntax.texts)

    @property
    def allowed(self) -> list[FunctionDefinition]:
        """The functions, or the only one that is chosen by name."""
        return [f for f in self.functions if self.choice.name in (None, f.name)]

    def parser(self) -> ToolParser:
        """A parser of one answer."""
        return ToolParser(self.syntax, {f.name: f.parameters for f in self.functions}, None if self.parallel else 1)

    def grammar(self, answer: Mapping[str, Any] | None) -> str:
        """A grammar of calls; `answer`: the schema of an answer without calls, None: there must be a call."""
        parallel = self.parallel and self.choice.name is None
        return self.syntax.grammar(self.allowed, parallel, self.special, answer)


def tools_of(body: ChatBody, codec: TextCodec, syntax: str | None = None) -> ToolUse | None:
    """The tools of a request; None: no tool is offered, or none may be called. `syntax`: the name of one that goes
    before the one that the template shows.

    Raises:
        ApiError: two tools have one name, or the chosen one is not there.
    """
    functions = [tool.function for tool in body.tools or ()] or list(body.functions or ())
    param = "tool_choice" if body.tools or body.function_call is None else "function_call"
    choice = (body.tool_choice if param == "tool_choice" else body.function_call) or ToolChoice("auto")
    names = [f.name for f in functions]
    if len(set(names)) < len(names):
        raise bad_request("two tools have the same name", "tools")
    chosen = choice.allowed if choice.name is None else (choice.name,)
    if missing := [name for name in chosen if name not in names]:
        raise bad_request(f"there is no tool {missing[0]!r:.80} among the tools of the request", param)
    if choice.allowed:
        functions = [f for f in functions if f.name in choice.allowed]
    if choice.mode == "required" and not functions:
        raise bad_request("a tool must be called, and the request has no tools", param)
    if not functions or choice.mode == "none":
        return None
    parallel = body.parallel_tool_calls is not False and not uses_functions(body)
    written = syntax_of(codec.template_for(with_tools=True), syntax)
    return ToolUse(functions, choice, parallel, written, special_tokens(codec))


def special_tokens(codec: TextCodec) -> dict[str, int]:
    """Ids of the tokenizer's special tokens by text."""
    added = codec.tokenizer.get_added_tokens_decoder().items()
    return {token.content: i for i, token in added if token.special and token.content}


def uses_functions(body: ChatBody) -> bool:
    """Whether a request uses `functions`, which came before `tools`: its answer has at most one `function_call`."""
    return not body.tools and bool(body.functions)
