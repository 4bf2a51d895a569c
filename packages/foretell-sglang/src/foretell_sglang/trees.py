"""Trees of a fixed number of nodes for the requests of another engine, from their texts alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from foretell.catalogue.other_engines import context_of_texts, free_row, output_without_logits, retrieval_method
from foretell.core.context import Context, StepResult, TokenBuffer
from foretell.core.tree import TokenTree
from foretell.shape.trie import Trie

DEFAULT_METHOD = "suffix"


@dataclass
class _Request:
    row: int
    text: TokenBuffer
    new: tuple[int, ...] = field(default=())


class TreeDrafter:
    """Drafts `nodes` nodes for every request, the root among them; stands in the place of SGLang's corpus of n-grams.

    `options`: `method`, `references` and the options of the method, as `retrieval_method` takes them. Recycling gets no
    logits here, so it learns from chosen tokens alone and drafts nothing.

    Raises:
        ValueError: an option is wrong, or there is no room for a draft.
    """

    def __init__(self, options: Mapping[str, Any], nodes: int, vocab: int, tokenizer: str) -> None:
        if nodes < 2:
            raise ValueError(f"a tree of drafts needs 2 nodes at least, found {nodes}")
        method = retrieval_method({"method": DEFAULT_METHOD, **options}, vocab, tokenizer)
        self.nodes, self._vocab = nodes, vocab
        self._method = replace(method, tree=Trie(nodes - 1))
        self._requests = dict[str, _Request]()
        self._step: tuple[list[str], Context, TokenTree] | None = None

    def draft(
        self, requests: Sequence[tuple[str, Sequence[int], int]]
    ) -> tuple[Int[np.ndarray, " bn"], UInt8[np.ndarray, " bnn"]]:
        """The tokens of the trees and the ancestors of every node with itself, both flat; of each request its id, the
        tokens that are new, and how many it has with them.

        A tree with fewer drafts is filled with children of the root that repeat its token.
        """
        names = [name for name, _, _ in requests]
        for name, new, length in requests:
            self._extend(name, new, length)
        self._learn()
        for gone in set(self._requests) - set(names):
            self._method.release(self._requests.pop(gone).row)
        running = [self._requests[name] for name in names]
        depth = [self.nodes - 1] * len(running)
        context = context_of_texts([r.row for r in running], [r.text for r in running], depth)
        tree = self._method.grow(context)
        self._step = names, context, tree
        return self._filled(tree)

    def known(self, name: str) -> int:
        """Tokens of a request that need not be given again."""
        return self._requests[name].text.length if name in self._requests else 0

    def _extend(self, name: str, new: Sequence[int], length: int) -> None:
        request = self._requests.get(name)
        if request is None or request.text.length + len(new) != length:
            if request is not None:
                self._method.release(self._requests.pop(name).row)
            self._requests[name] = _Request(free_row({r.row for r in self._requests.values()}), TokenBuffer(new))
        else:
            request.text.append(new)
            request.new = tuple(new)

    def _learn(self) -> None:
        if self._step is None:
            return
        names, context, tree = self._step
        stay = [n for n, name in enumerate(names) if (r := self._requests.get(name)) and r.text is context.sequences[n]]
        if stay:
            new = tuple(self._requests[name].new if n in stay else () for n, name in enumerate(names))
            nothing = output_without_logits(tree, self._vocab)
            step = StepResult(context, tree, nothing, ((0,),) * len(names), new, (0,) * len(names))
            self._method.observe(step.select(stay))

    def _filled(self, tree: TokenTree) -> tuple[Int[np.ndarray, " bn"], UInt8[np.ndarray, " bnn"]]:
        tokens = np.repeat(tree.token[:, :1], self.nodes, axis=1)
        seen = np.zeros((tree.rows, self.nodes, self.nodes), np.uint8)
        seen[:, :, 0] = 1
        seen[:, np.arange(self.nodes), np.arange(self.nodes)] = 1
        for row in range(tree.rows):
            for node in range(1, tree.nodes):
                if tree.valid[row, node]:
                    tokens[row, node] = tree.token[row, node]
                    seen[row, node] |= seen[row, tree.parent[row, node]]
        return tokens.reshape(-1), seen.reshape(-1)

    def reset(self) -> None:
        """Forget all requests."""
        for request in self._requests.values():
            self._method.release(request.row)
        self._requests.clear()
        self._step = None

    def synchronize(self) -> None:
        """Do nothing: there is no queue."""

    def erase_match_state(self, names: Sequence[str]) -> None:
        """Do nothing: requests that are gone are forgotten with the next draft."""

    def list_external_corpora(self) -> dict[str, int]:
        """None: texts are named by `references`."""
        return {}
