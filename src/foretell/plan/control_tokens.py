"""The control tokens of APAR: how a tokenizer names them, and which may follow which."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import UInt8
from tokenizers import Tokenizer

from foretell.tokenizer.codec import TextCodec

FORK, CHILD = "<|fork|>", "<|child|>"
"""Names in the tokenizer of a tuned model. A fork ends what introduces a detail; the detail begins with a child token,
while the text after it goes on behind the fork.
"""


@dataclass(frozen=True)
class ControlTokens:
    """Ids of the control tokens."""

    fork: int
    child: int


def find_control_tokens(codec: TextCodec) -> ControlTokens | None:
    """The control tokens of a tokenizer; None: its model was not tuned to fork."""
    fork, child = codec.tokenizer.token_to_id(FORK), codec.tokenizer.token_to_id(CHILD)
    return None if fork is None or child is None else ControlTokens(fork, child)


def choose_control_tokens(codec: TextCodec, eos: Collection[int]) -> ControlTokens:
    """The control tokens of a tokenizer, or two special tokens that its chat template does not use: the last ones.

    Raises:
        ValueError: there are no two such tokens.
    """
    known = find_control_tokens(codec)
    if known is not None:
        return known
    free = codec.unused_special_tokens(eos)
    if len(free) < 2:
        raise ValueError("forking needs two special tokens that the chat template does not use, and there are none")
    return ControlTokens(free[-2], free[-1])


def with_control_tokens(codec: TextCodec, tokens: ControlTokens) -> TextCodec:
    """The codec with these two tokens under the names of the control tokens."""
    state, names = json.loads(codec.tokenizer.to_str()), {tokens.fork: FORK, tokens.child: CHILD}
    for token in state["added_tokens"]:
        token["content"] = names.get(token["id"], token["content"])
    vocab = state["model"]["vocab"]
    if isinstance(vocab, dict):
        state["model"]["vocab"] = {names.get(i, text): i for text, i in vocab.items()}
    else:
        state["model"]["vocab"] = [(names.get(i, text), score) for i, (text, score) in enumerate(vocab)]
    return replace(codec, tokenizer=Tokenizer.from_str(json.dumps(state)))


@dataclass(frozen=True)
class ForkState:
    """`after_control`: the last token is a control token; `forks`: number of forks so far."""

    after_control: bool
    forks: int = 0


class ForkRules:
    """A `TokenConstraint`: a child token is never sampled, and a fork neither after a control token nor after
    `max_forks` forks. `after_child`: the text begins after a child token.
    """

    def __init__(self, tokens: ControlTokens, vocab: int, max_forks: int, after_child: bool) -> None:
        self._tokens, self._max_forks, self._start = tokens, max_forks, ForkState(after_child)
        self._with_fork, self._without = _all_but(vocab, [tokens.child]), _all_but(vocab, [tokens.child, tokens.fork])

    def start(self) -> ForkState:
        """The state before the first token."""
        return self._start

    def advance(self, state: ForkState, token: int) -> ForkState | None:
        """The state after one more token."""
        if token == self._tokens.fork:
            return ForkState(True, state.forks + 1) if self._may_fork(state) else None
        return None if token == self._tokens.child else ForkState(False, state.forks)

    def mask(self, state: ForkState) -> UInt8[np.ndarray, " w"]:
        """The tokens that are allowed next."""
        return self._with_fork if self._may_fork(state) else self._without

    def forced(self, state: ForkState) -> Sequence[Sequence[int]]:
        """None."""
        return ()

    def is_final(self, state: ForkState) -> bool:
        """Never: the model ends its text itself."""
        return False

    def _may_fork(self, state: ForkState) -> bool:
        return not state.after_control and state.forks < self._max_forks


def _all_but(vocab: int, tokens: Sequence[int]) -> UInt8[np.ndarray, " w"]:
    allowed = np.ones(vocab, bool)
    allowed[list(tokens)] = False
    return np.packbits(allowed, bitorder="little")
