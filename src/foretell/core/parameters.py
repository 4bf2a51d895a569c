"""The parameters of a generated text: one table of their names, types, bounds and help.

The command line's options, the keys of a file of prompts, the fields of a request body and the checks of
`SamplingParams` and `Request` are made from it, so that a value out of range gets the same sentence everywhere. This
module imports neither torch nor pydantic: `foretell generate --help` reads it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from math import inf, isfinite
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

_SHOWN = 60
"""Characters of a wrong value that an error message shows."""


@dataclass(frozen=True)
class Parameter:
    """A parameter: how it is called, what it may hold, and what it does."""

    name: str
    """In Python and in a file of prompts; in a request body, too, unless `field` says otherwise."""
    kind: type
    """`float`, `int`, `bool` or `str`; with `many`, of each element."""
    default: Any
    metavar: str | None = None
    """Of its option; None for a switch."""
    help: str = ""
    """Of its option; empty: the command line has none."""
    _: KW_ONLY
    low: float = -inf
    """Least value; of a list, least number of elements."""
    high: float = inf
    above: bool = False
    """Whether values are above `low`, and `low` itself is none."""
    many: bool = False
    """Whether it is a list: of texts, of which a single one may stand for itself, or of token ids."""
    is_sampling: bool = False
    """Whether it is an attribute of `SamplingParams`; otherwise it is an argument of `Model.request`."""
    in_chat: bool = False
    """Whether `foretell chat` has its option, too."""
    in_checkpoint: bool = False
    """Whether a checkpoint's `generation_config.json` may set it for a server."""
    option: str = ""
    """Option of the command line, if it is called otherwise. That of a switch that is on by default turns it off."""
    field: str = ""
    """Field of a request body, if it is called otherwise; with a dot: a field of an object there."""

    @property
    def option_name(self) -> str:
        """Its option on the command line."""
        return self.option or "--" + self.name.replace("_", "-")

    @property
    def field_name(self) -> str:
        """Its field in a request body."""
        return self.field or self.name

    def problem(self, value: Any) -> str:
        """What is wrong with a value, as a predicate: "must be at least 0, found -1"; empty: nothing."""
        wanted = self._wanted_elements(value) if self.many else self._wanted(value)
        return f"must be {wanted}, found {_shown(value)}" if wanted else ""

    def read(self, value: Any, name: str = "") -> Any:
        """The value as the engine reads it: lists as tuples, token ids once each.

        Raises:
            ValueError: it is wrong; the message begins with `name`, by default that of the parameter.
        """
        if problem := self.problem(value):
            raise ValueError(f"{name or self.name} {problem}")
        if not self.many:
            return value
        if self.kind is str:
            return (value,) if isinstance(value, str) else tuple(value)
        return tuple(dict.fromkeys(value))

    def _wanted(self, value: Any) -> str:
        """What the value should be; empty: it is."""
        if self.kind is bool:
            return "" if isinstance(value, bool) else "true or false"
        if self.kind is int and not is_integer(value):
            return "a whole number"
        if isinstance(value, bool) or not isinstance(value, Real):
            return "a number"
        return "" if self._is_within(value) else self._range

    def _is_within(self, value: Any) -> bool:
        is_finite = is_integer(value) or isfinite(value)
        return is_finite and self.low <= value <= self.high and not (self.above and value == self.low)

    @property
    def _range(self) -> str:
        lower = f"{'above' if self.above else 'at least'} {_number(self.low)}" if self.low > -inf else ""
        return " and ".join(filter(None, (lower, f"at most {_number(self.high)}" if self.high < inf else "")))

    def _wanted_elements(self, value: Any) -> str:
        if self.kind is str:
            texts = (value,) if isinstance(value, str) else value
            if _is_list(texts) and all(isinstance(text, str) and text for text in texts):
                return ""
            return "a sequence of strings that are not empty"
        if _is_list(value) and all(is_integer(token) and token >= 0 for token in value) and len(value) >= self.low:
            return ""
        return "a sequence of token ids" + " that is not empty" * (self.low > 0)


def is_integer(value: object) -> bool:
    """Whether this is an integer; a bool is not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python refuses the digits of an integer of thousands of them.
        text = type(value).__name__
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


_drawn = partial(Parameter, is_sampling=True, in_chat=True, in_checkpoint=True)
_TABLE = (
    Parameter(
        "max_new_tokens", int, 256, "N", "Most tokens of an answer.",
        low=1, in_chat=True, in_checkpoint=True, field="max_tokens",
    ),
    _drawn("temperature", float, 0.0, "T", "Sampling temperature; 0: greedy.", low=0),
    _drawn("top_k", int, 0, "K", "Sample among the K most probable tokens; 0: all.", low=-1),
    _drawn(
        "top_p", float, 1.0, "P", "Sample among the fewest tokens with this total probability.",
        low=0, high=1, above=True,
    ),
    _drawn(
        "min_p", float, 0.0, "P", "Leave out tokens below this share of the highest probability.", low=0, high=1,
    ),
    _drawn("repetition_penalty", float, 1.0, "X", "Above 1: less repetition of prompt and answer.", low=0, above=True),
    _drawn(
        "presence_penalty", float, 0.0, "X", "Subtracted once from the logit of every token in the answer.",
        low=-2, high=2,
    ),
    _drawn("frequency_penalty", float, 0.0, "X", "Subtracted for every occurrence in the answer.", low=-2, high=2),
    Parameter(
        "seed", int, 0, "N", "Equal seeds give equal answers in every batch.",
        low=-(2**63), high=2**64 - 1, is_sampling=True, in_chat=True,
    ),
    Parameter("stop", str, (), "S", "End before this text; repeatable.", many=True, in_chat=True),
    Parameter("stop_token_ids", int, (), "ID", "End at this token; repeatable.", many=True, option="--stop-token-id"),
    Parameter(
        "include_stop_str_in_output", bool, False, None,
        "Show the stop string or stop token that ends the answer.", option="--include-stop",
    ),
    Parameter("ignore_eos", bool, False, None, "Go on after the model's end-of-sequence token."),
    Parameter("min_tokens", int, 0, "N", "Fewest tokens of an answer.", low=0, is_sampling=True),
    Parameter("bad_words", str, (), "S", "A word that must not occur; repeatable.", many=True, option="--bad-word"),
    Parameter(
        "allowed_token_ids", int, None, "ID", "The only tokens that an answer may hold; repeatable.",
        many=True, low=1, is_sampling=True, option="--allowed-token-id",
    ),
    Parameter(
        "skip_special_tokens", bool, True, None, "Show special tokens in the text.", option="--show-special-tokens",
    ),
    Parameter("max_drafts", int, None, low=0, field="speculative.max_drafts"),
)  # fmt: skip
PARAMETERS: Mapping[str, Parameter] = MappingProxyType({parameter.name: parameter for parameter in _TABLE})
"""Every parameter by its name, in the order of the command line's help.

Another one is an entry here and, where it changes how tokens are drawn, an attribute of `SamplingParams`.
"""


def check(values: Mapping[str, Any], names: Iterable[str]) -> None:
    """Check these parameters among the values; None stands for no value.

    Raises:
        ValueError: one is wrong; the message begins with its name.
    """
    for name in names:
        if values[name] is not None or PARAMETERS[name].default is not None:
            PARAMETERS[name].read(values[name])
