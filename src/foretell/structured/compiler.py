"""Compiles structured outputs to constraints on tokens with llguidance (github.com/guidance-ai/llguidance, extra
`structured`), which derives the mask of allowed tokens from an Earley parser over a lexer of regular expressions.
"""

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from dataclasses import replace
from threading import Lock
from typing import Any

import numpy as np
from jaxtyping import UInt8

from foretell.core.token_rules import TokenConstraint
from foretell.structured.outputs import StructuredOutputs
from foretell.structured.schema_faults import find_faults, keyword_places
from foretell.tokenizer.codec import TextCodec

_CACHED = 256
"""Compiled constraints that are kept, the most recently used ones."""
_SECONDS = 10.0
"""Most time for a compilation."""
_SEARCHED_SECONDS = 0.2
"""Most time of a refused compilation whose schema is searched for the keywords at fault."""
_MASK_SECONDS = 0.25
"""Most processor time for the tokens that may follow next: all requests of a step wait for it. A schema of usual size
takes a millisecond, a choice of 3,000 texts ten.
"""
_LIMITS = {"max_grammar_size": 100_000, "max_lexer_states": 50_000, "step_max_items": 50_000}
"""Bounds of llguidance on the symbols of a grammar, the states of its lexer, and the work per mask."""
_SHOWN = 4
"""Keywords of a schema that an error names, at most."""
_NO_TEXT = "NoExtensionBias"
"""Part of llguidance's message for a grammar without any text, such as a reference to itself."""


class LlguidanceConstraint:
    """A compiled grammar; a state is a matcher that is copied before it reads a token (a few microseconds)."""

    def __init__(self, matcher: Any, tokenizer: Any, vocab: int) -> None:
        self._matcher, self._tokenizer, self._vocab = matcher, tokenizer, vocab

    def start(self) -> Any:
        """The state before the first token."""
        return self._matcher.deep_copy()

    def advance(self, state: Any, token: int) -> Any | None:
        """The state after one more token; None: the grammar does not allow it.

        Raises:
            ValueError: the grammar needs more work than is allowed.
        """
        if not 0 <= token < self._vocab or state.is_stopped() or not state.validate_tokens([token]):
            return None
        after = state.deep_copy()
        if after.consume_token(token):
            return after
        _check_state(after)
        return None

    def mask(self, state: Any) -> UInt8[np.ndarray, " w"]:
        """The tokens that are allowed next; the end-of-sequence tokens where the text may end.

        Raises:
            ValueError: the grammar needs more work per token than is allowed.
        """
        started = time.thread_time()
        mask = np.frombuffer(state.compute_bitmask(), np.uint8)
        _check_state(state)
        if time.thread_time() - started > _MASK_SECONDS:
            raise ValueError(f"the grammar is too complex here: a token takes more than {_MASK_SECONDS:g} s")
        return mask

    def forced(self, state: Any) -> Sequence[Sequence[int]]:
        """The tokenizer's own tokens of the text that the grammar leaves next.

        The last of them may begin a longer token of the text that follows, where the grammar leaves several. So two
        ways are given: the end as the tokenizer writes it alone, and the same with the last byte as a token of its own,
        such as `":"` and `":` `"` before the text of a string.
        """
        if state.is_stopped():
            return ()
        tokens: list[int] = state.compute_ff_tokens()
        after = state.deep_copy()
        if tokens and not after.consume_tokens(tokens):
            return (tokens,)
        rest: bytes = after.compute_ff_bytes()
        ends = {tuple(self._tokenizer.tokenize_bytes(rest)): None} if rest else {}
        if len(rest) > 1:
            last_apart = self._tokenizer.tokenize_bytes(rest[:-1]) + self._tokenizer.tokenize_bytes(rest[-1:])
            ends[tuple(last_apart)] = None
        return tuple((*tokens, *end) for end in ends) if ends else (tokens,) if tokens else ()

    def is_final(self, state: Any) -> bool:
        """Whether nothing can follow."""
        return bool(state.is_stopped() and not state.is_error())


class ConstraintCompiler:
    """Compiles structured outputs for one tokenizer. It may be used by several threads at once.

    `eos`: tokens that end an answer; they are allowed where the text may end.

    Raises:
        ValueError: llguidance is not installed or cannot read the tokenizer, or there is no end-of-sequence token.
    """

    def __init__(self, codec: TextCodec, eos: Sequence[int]) -> None:
        if not eos:
            raise ValueError("structured outputs need a model with an end-of-sequence token, and this one has none")
        self._llguidance = _import_llguidance()
        self._vocab = codec.tokenizer.get_vocab_size(with_added_tokens=True)
        try:
            self._tokenizer = self._llguidance.LLTokenizer(
                codec.tokenizer.to_str(), n_vocab=self._vocab, eos_token=list(eos)
            )
        except Exception as error:  # llguidance raises nothing narrower
            raise ValueError(f"llguidance cannot read this model's tokenizer: {_first_line(str(error))}") from error
        self._limits = self._llguidance.LLParserLimits(verbose_errors=False, **_LIMITS)
        self._threads = ThreadPoolExecutor(2, "foretell-grammar")
        self._cache, self._lock = OrderedDict[object, LlguidanceConstraint](), Lock()

    def compile(self, outputs: StructuredOutputs, salt: str = "") -> TokenConstraint:
        """The constraint of these outputs, from the cache if it was compiled before for the same cache salt.

        Raises:
            ValueError: the grammar is invalid, uses what llguidance does not know, or takes too long.
        """
        key = (salt, outputs.kind, outputs.text, outputs.any_whitespace, outputs.whitespace_pattern)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        try:
            constraint = self._threads.submit(self._compile, outputs).result(_SECONDS)
        except LateError:
            raise ValueError(f"the {outputs.kind} takes more than {_SECONDS:g} s to compile: make it simpler") from None
        with self._lock:
            self._cache[key] = constraint
            while len(self._cache) > _CACHED:
                self._cache.popitem(last=False)
        return constraint

    def _compile(self, outputs: StructuredOutputs) -> LlguidanceConstraint:
        started = time.monotonic()
        try:
            return self._try_compile(outputs)
        except ValueError as error:
            message = str(error)
            slow = time.monotonic() - started > _SEARCHED_SECONDS
            raise _invalid(outputs, message, (lambda _: message) if slow else self._refuse) from None

    def _refuse(self, outputs: StructuredOutputs) -> str:
        """The message for which outputs are refused; empty if they compile."""
        try:
            self._try_compile(outputs)
        except ValueError as error:
            return str(error)
        return ""

    def _try_compile(self, outputs: StructuredOutputs) -> LlguidanceConstraint:
        grammar = self._grammar(outputs)
        matcher = self._llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        constraint = LlguidanceConstraint(matcher, self._tokenizer, self._vocab)
        constraint.mask(constraint.start())
        return constraint

    def _grammar(self, outputs: StructuredOutputs) -> str:
        matcher = self._llguidance.LLMatcher
        if outputs.kind in ("json", "json_object"):
            options: dict[str, object] = {"whitespace_flexible": outputs.any_whitespace}
            if outputs.whitespace_pattern is not None:
                options = {"whitespace_pattern": outputs.whitespace_pattern}
            return str(matcher.grammar_from_json_schema(outputs.text, overrides=options))
        if outputs.kind == "regex":
            return str(matcher.grammar_from_regex(outputs.text))
        if outputs.kind == "choice":
            texts = (json.dumps(text, ensure_ascii=False) for text in outputs.choice or ())
            return str(matcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(texts)))
        return str(matcher.grammar_from_lark(_to_lark(outputs.text)))


def _import_llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ValueError("structured outputs need llguidance: pip install 'foretell[structured]'") from None
    return llguidance


def _to_lark(grammar: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(grammar))
    except Exception as error:  # The converter raises nothing narrower.
        raise ValueError(str(error)) from error


def _check_state(state: Any) -> None:
    """Raise `ValueError` if the grammar needed more work than is allowed."""
    if state.is_error():
        raise ValueError(f"the grammar is too complex here: {_first_line(state.get_error())}")


def _first_line(message: str) -> str:
    return next((line.strip() for line in message.splitlines() if line.strip()), "no reason given")


def _invalid(outputs: StructuredOutputs, message: str, refuse: Callable[[StructuredOutputs], str]) -> ValueError:
    """One sentence with the reason that llguidance gives, and the keywords of a schema that it is about.

    `refuse`: the message for which other outputs are refused; empty if they compile.
    """
    reason = _reason(message)
    places = list[str]()
    if outputs.kind == "json":
        schema = outputs.schema
        places = [f"{word} at {where}" for word, where in keyword_places(schema) if f'"{word}"' in reason]
        places = places or find_faults(schema, reason, lambda changed: _reason(refuse(replace(outputs, json=changed))))
    named = f" ({', '.join(places[:_SHOWN])})" if places else ""
    return ValueError(f"the {outputs.kind} cannot be used: {reason}{named}")


def _reason(message: str) -> str:
    """The first line of a message of llguidance, with the error that a later line names; empty for none."""
    if not message:
        return ""
    if _NO_TEXT in message:
        return "no text can match it"
    message = message.replace("min/maxProperties", "minProperties and maxProperties")
    detail = next((line[7:].strip() for line in message.splitlines() if line.startswith("error: ")), "")
    return _first_line(message).rstrip(":") + (f": {detail}" if detail else "")
