"""Choices: which of several continuations of a prompt a model finds most probable, in one pass over a token tree."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch
from jaxtyping import Float

from foretell.core.tree import root_tree
from foretell.model.run.runner import Runner
from foretell.tokenizer.codec import TextCodec

_ROWS = 8
"""Prompts of a pass."""


@dataclass(frozen=True)
class Choice:
    """A prompt and its candidates, as tokens."""

    prompt: tuple[int, ...]
    candidates: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(codec: TextCodec, prompt: str, candidates: Sequence[str]) -> "Choice":
        """Encode each candidate behind the prompt, so that it is split into tokens as in a text. Tokens that all have
        in common belong to the prompt.
        """
        texts = [codec.encode(f"{prompt} {candidate}") for candidate in candidates]
        shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False)))
        shared = max(1, min(shared, min(map(len, texts)) - 1))
        return Choice(tuple(texts[0][:shared]), tuple(tuple(text[shared:]) for text in texts))


def score_choices(runner: Runner, choices: Sequence[Choice], context: int) -> list[Float[np.ndarray, " c"]]:
    """Log-probabilities of the whole candidates behind their prompts.

    Raises:
        ValueError: a prompt with its candidates is longer than the model's context.
    """
    longest = max((len(c.prompt) + sum(map(len, c.candidates)) for c in choices), default=0)
    if longest > context:
        raise ValueError(f"a prompt with its candidates has {longest} tokens, and the model reads {context}")
    scores = list[Float[np.ndarray, " c"]]()
    for at in range(0, len(choices), _ROWS):
        part = choices[at : at + _ROWS]
        for row in range(len(part)):
            runner.truncate(row, 0)
        scores += score_unread(runner, part)
    return scores


@torch.inference_mode()
def score_unread(runner: Runner, choices: Sequence[Choice]) -> list[Float[np.ndarray, " c"]]:
    """Log-probabilities of the candidates of row 0, 1, … whose prompts are what the row has not read yet."""
    tree = root_tree([c.prompt[-1] for c in choices]).with_prefix([c.prompt for c in choices])
    first = tree.nodes
    tries = [_trie(c, tree.root(row), first) for row, c in enumerate(choices)]
    tree = tree.with_drafts([t.tokens for t in tries], [t.parents for t in tries])
    scored = np.zeros(tree.valid.shape, bool)
    for row, trie in enumerate(tries):
        scored[row, [tree.root(row), *range(first, first + len(trie.tokens))]] = True
    output = runner.forward(list(range(len(choices))), tree, scored=scored)
    log_p = torch.log_softmax(output.logits.float(), -1).cpu()
    scores = []
    for row, (choice, trie) in enumerate(zip(choices, tries, strict=True)):
        steps = [
            [float(log_p[output.logit_index[row, parent], token]) for parent, token in zip(path, tokens, strict=True)]
            for path, tokens in zip(trie.paths, choice.candidates, strict=True)
        ]
        scores.append(np.array([sum(s) for s in steps]))
    return scores


@dataclass(frozen=True)
class _Trie:
    """Nodes below a root: all tokens of the candidates but their last ones, which no pass has to read."""

    tokens: list[int]
    parents: list[int]
    """Indices in the tree."""
    paths: list[list[int]]
    """Of every candidate, the node before each of its tokens."""


def _trie(choice: Choice, root: int, first: int) -> _Trie:
    known: dict[tuple[int, ...], int] = {(): root}
    trie = _Trie([], [], [])
    for candidate in choice.candidates:
        trie.paths.append([root])
        for length in range(1, len(candidate)):
            prefix = candidate[:length]
            if prefix not in known:
                known[prefix] = first + len(trie.tokens)
                trie.tokens.append(prefix[-1])
                trie.parents.append(known[prefix[:-1]])
            trie.paths[-1].append(known[prefix])
    return trie
