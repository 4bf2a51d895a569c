"""Chat templates: Jinja programs of a model, rendered in a sandbox with limits on memory and time.

A template is untrusted input. Jinja's sandbox prevents access to Python; the limits below bound memory and time: the
size of every value that a template computes is checked, loop iterations and calls are counted, and a deadline stops
everything else.
"""

import functools
import json
import re
import sys
import time
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, Sequence, ValuesView
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
import jinja2.sandbox
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_TEMPLATE_CHARS = 1 << 18
"""Longest template that is compiled; published templates have fewer than 40,000 characters."""
MAX_VALUE_BYTES = 1 << 20
"""Memory of the largest value that a template may compute, and of its output, for a short conversation."""
MAX_TOTAL_BYTES = 1 << 28
"""Memory of all values together that one rendering may compute, for a short conversation."""
MAX_STEPS = 1 << 20
"""Loop iterations and calls of one rendering of a short conversation."""
MAX_SECONDS = 5.0
"""Longest time of one rendering of a short conversation; published templates take milliseconds."""
SHORT_CONVERSATION_BYTES = 1 << 16
"""Above this size of the conversation the limits grow in proportion to it: some published templates read the whole
conversation for every message.
"""
MAX_INTEGER_BITS = 1 << 12
MAX_FILTER_NUMBER = 1 << 12
"""Largest number (a width, a precision, a count) that a filter takes."""
MAX_FIELD_CHARS = 1000
"""Largest width or precision in a format string."""
MAX_CHAR_BYTES = 4
REPR_FACTOR = 10
"""Most characters that `repr` writes for one character."""
MAX_REASON_CHARS = 300
"""Characters of an error message of a template that are shown."""

_METHODS = frozenset((
    "bit_length", "capitalize", "casefold", "copy", "count", "endswith", "find", "get", "index", "is_integer",
    "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable",
    "isspace", "istitle", "isupper", "items", "keys", "lower", "lstrip", "partition", "removeprefix", "removesuffix",
    "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase",
    "title", "upper", "values",
))  # fmt: skip
"""Methods of built-in types whose result is not larger than their input."""
_PADDING = frozenset(("center", "ljust", "rjust", "zfill"))
_REMOVED_FILTERS = ("pprint", "urlize", "wordwrap", "xmlattr")
"""Filters without a bound on their cost; chat templates do not need them."""
_SIZED_FILTERS = ("batch", "center", "indent", "round", "slice", "tojson", "truncate")
"""Filters that take a width, a count or a precision."""
_WIDE_FIELD = re.compile(r"\d{4}|\*|:[^{}]*\{")
_COMPILER_ARGUMENTS = ("_loop_vars", "_block_vars")
"""Arguments that compiled templates add to those of the template."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; the first that a message has counts."""
_STEP, _MEASURED = " step", " measured"
"""Names of internal filters; a template cannot use a name with a space."""


class TemplateLimitError(jinja2.TemplateError):
    """A template exceeds a limit on memory or time."""


class _Budget:
    """The limits of one rendering, which grow with the conversation, and what it has used of them."""

    def __init__(self, input_bytes: int) -> None:
        scale = 1 + input_bytes / SHORT_CONVERSATION_BYTES
        self.max_value, self.total = int(MAX_VALUE_BYTES * scale), int(MAX_TOTAL_BYTES * scale)
        self.steps, self.seconds = int(MAX_STEPS * scale), MAX_SECONDS * scale
        self.deadline = time.monotonic() + self.seconds

    def step(self, size: int = 0) -> None:
        """Count a loop iteration or a call, and the bytes that it outputs."""
        self.steps -= 1
        self.spend(size)
        if self.steps < 0:
            raise TemplateLimitError("it makes more loop iterations and calls than are allowed")
        if time.monotonic() > self.deadline:
            raise TemplateLimitError(f"it takes more than {self.seconds:.0f} seconds")

    def spend(self, size: int) -> None:
        """Count the bytes of a value."""
        self.total -= size
        if self.total < 0:
            raise TemplateLimitError("it makes more values than are allowed")

    def check_size(self, size: int) -> None:
        """Raise `TemplateLimitError` for a value of more bytes than allowed."""
        if size > self.max_value:
            raise TemplateLimitError(f"it makes a value of more than {self.max_value:,} bytes")

    def measure(self, value: Any) -> Any:
        """Count and check a value, and return it."""
        self.spend(self.full_size(value, 0))
        return value

    def full_size(self, value: Any, before: int) -> int:
        """Bytes of a value with all its elements (those that it contains twice count twice), added to `before`."""
        size = before + sys.getsizeof(value)
        if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
            raise TemplateLimitError("it makes a number that is too large")
        self.check_size(size)
        for part in _parts(value):
            size = self.full_size(part, size)
        return size


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return [x for pair in value.items() for x in pair]
    return value if isinstance(value, list | tuple | KeysView | ValuesView | ItemsView) else ()


_BUDGET: ContextVar[_Budget] = ContextVar("budget")


_NOW: ContextVar[datetime | None] = ContextVar("now", default=None)
"""The date that templates are told; None: the local one."""


class _Namespace(Namespace):
    """Jinja's namespace with a `repr` that does not grow with its attributes, none of which begins with `_`."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # Positional alone, as in Jinja: an attribute may be called `self`.
        Namespace.__init__(*args, **kwargs)
        for name in dict(*args[1:], **kwargs):
            _check_attribute(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"the name {name!r} of a namespace begins with an underscore")


class _Generation(Extension):
    """`{% generation %}`, which marks what the assistant wrote, and writes it."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own type.

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as a call that returns its text."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits on every computation."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            optimized=False,  # Constant folding would compute values before they can be checked.
            finalize=_output,
        )
        self.filters["tojson"] = _tojson
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        self.filters = {name: _bounded_filter(name, f) for name, f in self.filters.items()}
        self.filters |= {_STEP: _step, _MEASURED: _measure}
        self.tests = {name: _counted(f) for name, f in self.tests.items()}
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "namespace": _Namespace, "strftime_now": _strftime_now}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = _BUDGET.get()
        budget.step()
        for operand in (left, right):
            if isinstance(operand, int) and operand.bit_length() > MAX_INTEGER_BITS:
                raise TemplateLimitError("it makes a number that is too large")
        if operator == "*":
            many, times = (right, left) if isinstance(left, int) else (left, right)
            if not isinstance(many, int | float) and isinstance(times, int) and times > 1:
                budget.check_size((_bytes(many * 2) - _bytes(many)) * times)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > MAX_INTEGER_BITS:
                raise TemplateLimitError("it makes a number that is too large")
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right, "%")
        return budget.measure(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = _BUDGET.get()
        budget.step()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str | int | float | list | tuple | Mapping | range | KeysView | ValuesView | ItemsView):
            args = _checked_arguments(owner, obj.__name__, args)
        else:
            budget.measure((args, {k: v for k, v in kwargs.items() if k not in _COMPILER_ARGUMENTS}))
        return budget.measure(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def wrapper(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__, (args, kwargs), "{")
            return formatted(*args, **kwargs)

        return wrapper


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    if len(form) > MAX_FIELD_CHARS or _WIDE_FIELD.search(form):
        raise TemplateLimitError("it formats a field with a width that is too large")
    return (_NOW.get() or datetime.now()).strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes of HTML, as transformers writes it."""
    width = 0 if indent is None else max(indent, 0) if isinstance(indent, int) else len(indent)
    between = sum(map(len, separators or ()))
    if width or between:
        _BUDGET.get().check_size(_written_chars(value, width, between, 1) * MAX_CHAR_BYTES)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _written_chars(value: Any, width: int, between: int, depth: int) -> int:
    """About how many characters indentation and separators take."""
    inner = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return sum(width * depth + between + _written_chars(part, width, between, depth + 1) for part in inner)


@jinja2.pass_context
def _output(context: Any, value: Any) -> Any:
    """Count a value that is output (`pass_context` prevents the evaluation of constants at compile time)."""
    return _BUDGET.get().measure(value)


def _step(size: int) -> None:
    _BUDGET.get().step(size)


def _measure(value: Any) -> Any:
    return _BUDGET.get().measure(value)


def _bytes(value: Any) -> int:
    """Bytes of a value with all its elements.

    Raises:
        TemplateLimitError: more than the limit.
    """
    return _BUDGET.get().full_size(value, 0)


def _checked_arguments(owner: Any, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a call of a method of a built-in type."""
    budget = _BUDGET.get()
    if name == "replace" and len(args) >= 2:
        _check_replace(owner, args[0], args[1])
    elif name == "join" and len(args) == 1:
        args = (list(args[0]),)
        budget.measure(args)
        budget.check_size(len(args[0]) * len(owner) * MAX_CHAR_BYTES)
    elif name in _PADDING and args and isinstance(args[0], int):
        budget.check_size(args[0] * MAX_CHAR_BYTES)
    elif name not in _METHODS:
        raise TemplateLimitError(f"it calls {type(owner).__name__}.{name}, which is not allowed in a chat template")
    return args


def _check_replace(text: Any, old: Any, new: Any) -> None:
    _BUDGET.get().check_size(str(text).count(str(old)) * len(str(new)) * MAX_CHAR_BYTES)


def _check_format(text: str, values: Any, mark: str) -> None:
    if _WIDE_FIELD.search(text):
        raise TemplateLimitError("it formats a field with a width that is too large")
    _BUDGET.get().check_size(text.count(mark) * (MAX_FIELD_CHARS + REPR_FACTOR * _bytes(values)))


def _counted(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _BUDGET.get().step()
        return function(*args, **kwargs)

    return wrapper


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    leading = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        budget = _BUDGET.get()
        budget.step()
        value, rest = args[leading], [*args[leading + 1 :], *kwargs.values()]
        if name in _SIZED_FILTERS and any(isinstance(x, int) and abs(x) > MAX_FILTER_NUMBER for x in rest):
            raise TemplateLimitError(f"the filter {name!r} takes no number above {MAX_FILTER_NUMBER}")
        if name == "replace" and len(rest) >= 2:
            _check_replace(value, rest[0], rest[1])
        elif name == "join":
            value = list(value)
            budget.check_size(len(value) * len(str(rest[0])) * MAX_CHAR_BYTES if rest else 0)
        elif name == "indent":
            width = max((x if isinstance(x, int) else len(str(x)) for x in rest), default=0)
            budget.check_size(len(str(value).splitlines()) * width * MAX_CHAR_BYTES)
        elif name == "format":
            _check_format(str(value), rest, "%")
        elif name == "sum" and any(isinstance(x, list | tuple) for x in rest):
            raise TemplateLimitError("the filter 'sum' takes numbers alone")
        return budget.measure(function(*args[:leading], value, *args[leading + 1 :], **kwargs))

    return wrapper


class _Instrument(NodeTransformer):
    """Inserts filters that count loop iterations, and values that no call or operator computes."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        """The node, or its replacement."""
        node = super().generic_visit(node)
        if isinstance(node, nodes.For):
            written = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
            node.body.insert(0, nodes.ExprStmt(_apply_filter(nodes.Const(written), _STEP, node), lineno=node.lineno))
        makes = isinstance(node, nodes.Concat | nodes.Dict | nodes.List | nodes.Tuple)
        slices = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        is_target = getattr(node, "ctx", "load") == "store"
        return _apply_filter(node, _MEASURED, node) if (makes or slices) and not is_target else node


def _apply_filter(value: nodes.Node, name: str, at: nodes.Node) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=at.lineno)


class ChatTemplate:
    """A compiled chat template.

    Raises:
        ValueError: it is too long, or no Jinja template.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ValueError(
                f"the chat template has {len(source)} characters, and at most {MAX_TEMPLATE_CHARS} are accepted"
            )
        environment = _Environment()
        try:
            tree = _Instrument().visit(environment.parse(source))
            self._template = environment.from_string(tree.set_environment(environment))
        except Exception as error:
            raise ValueError(f"the chat template is no Jinja template: {_reason(error)}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        bos: str | None = "",
        eos: str | None = "",
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> str:
        """The text of the conversation, with the generation prompt unless `add_generation_prompt` is False.

        A `bos` or `eos` of None is no variable of the template. `variables`: further variables. `now`: what
        `strftime_now` tells; None: the local date.

        Raises:
            ValueError: the template refuses the conversation, fails on it, or exceeds a limit, or a variable has the
                name of one that is always there.
        """
        own: dict[str, Any] = {
            "messages": [_given_fields(m) for m in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        own |= {name: text for name, text in (("bos_token", bos), ("eos_token", eos)) if text is not None}
        given = {"tools": None, "documents": None} | dict(variables or {})
        if taken := sorted(own.keys() & given):
            raise ValueError(f"{taken[0]} is no variable that can be set for a chat template")
        budget = _Budget(_input_bytes(own["messages"]) + _input_bytes(given))
        token, date, written, size = _BUDGET.set(budget), _NOW.set(now), list[str](), 0
        try:
            for piece in self._template.generate(given | own):
                size += sys.getsizeof(piece)
                budget.check_size(size)
                written.append(piece)
        except TemplateLimitError as error:
            raise ValueError(f"the chat template was stopped: {_reason(error)}") from error
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses this conversation: {_reason(error)}") from error
        except Exception as error:  # The expressions of a template can raise anything.
            raise ValueError(
                f"the chat template fails on this conversation: {type(error).__name__}: {_reason(error)}"
            ) from error
        finally:
            _BUDGET.reset(token)
            _NOW.reset(date)
        return "".join(written)


def _given_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as transformers gives it to templates: without null values, and with reasoning under both names."""
    fields = {name: value for name, value in message.items() if value is not None}
    reasoning = next((fields[name] for name in _REASONING if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _input_bytes(value: Any) -> int:
    return sys.getsizeof(value) + sum(map(_input_bytes, _parts(value)))


def _reason(error: Exception) -> str:
    return " ".join(str(error)[:MAX_REASON_CHARS].split())
