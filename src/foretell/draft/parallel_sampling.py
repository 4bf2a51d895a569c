"""Parallel speculative sampling: the target drafts for itself by reading learned vectors in the places of the tokens to
come.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import Context, StepResult
from foretell.core.tree import TokenTree
from foretell.draft.base import Predictor
from foretell.speculator.network.look_ahead import LookAheadEmbeddings


class ParallelDrafter(Predictor):
    """Drafts from look-ahead embeddings that the previous pass read after the token at which the text then stood (PaSS,
    arXiv 2311.13581).

    A group of `ahead` vectors hangs as a chain of probes below a node of the tree, so it sees that node and what
    precedes it, and is forgotten with the refused drafts. The pass that decides where the text stands thereby holds the
    next drafts already, if it had a group there. `groups`: after how many nodes of a tree, the likeliest ends first,
    there is one: None is every node, for `(1 + drafts) * (1 + ahead)` tokens a pass; 0 is the published form of two
    passes a round, one that reads the vectors after the root of a text without drafts, one that tests what came of
    them. Guesses of one group do not know of each other.
    """

    label = "the target at learned look-ahead vectors"

    def __init__(self, network: LookAheadEmbeddings, groups: int | None = None) -> None:
        if groups is not None and groups < 0:
            raise ValueError(f"look-ahead groups per pass: a number from 0 on, found {groups}")
        self.network, self.groups = network, groups
        self.hidden_layers = network.hidden_layers
        self._vectors = network().detach()
        self._vocab = network.target_info.vocab
        self._states: dict[int, tuple[int, torch.Tensor]] = {}
        """Per row the length of the text that a group looked ahead of, and the states [l d] that its vectors ended
        in.
        """
        self._logits = torch.zeros(0, 0)
        self._first: dict[int, int] = {}
        """Where in `_logits` the scores of each row's group begin."""

    def max_depths(self, context: Context) -> Int[np.ndarray, " b"]:
        """As deep as the group after each text's end looked; 0 where there was none."""
        return np.minimum(super().max_depths(context), [len(self._known(i, context)) for i in range(len(context.rows))])

    def _known(self, i: int, context: Context) -> Float[torch.Tensor, "l d"]:
        length, states = self._states.get(context.rows[i], (0, self._vectors[:0]))
        return states if length == context.sequences[i].length else states[:0]

    def expand(
        self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context
    ) -> tuple[Float[torch.Tensor, "k v"], Int[np.ndarray, "b n"]]:
        """The scores of vector `d + 1` for nodes at depth `d`, whatever the path to them; no scores beyond the group's
        end.
        """
        if tree.nodes == 1:
            self._score(context)
        known = np.array([[len(self._known(i, context))] for i in range(len(context.rows))])
        first = np.array([[self._first[row]] for row in context.rows])
        return self._logits, np.where(tree.depth < known, first + tree.depth, -1)

    def _score(self, context: Context) -> None:
        groups = [self._known(i, context) for i in range(len(context.rows))]
        ends = np.cumsum([len(g) for g in groups]).tolist()
        self._first = {row: end - len(g) for row, end, g in zip(context.rows, ends, groups, strict=True)}
        states = torch.cat(groups)
        self._logits = self.network.to_target_vocab(self.network.compute_logits(states.to(self.network.dtype)))

    def add_probes(self, tree: TokenTree, context: Context) -> TokenTree:
        """Hang the groups: below the root where nothing was drafted, else below the likeliest ends."""
        tokens, parents = list[list[int]](), list[list[int]]()
        for i in range(tree.rows):
            token, parent = list[int](), list[int]()
            for node in self._ends(tree, i, context):
                # A vector is of use if the token it guesses could still be tested in the next pass.
                length = min(len(self._vectors), int(context.max_depth[i] - tree.depth[i, node]) - 1)
                if length > 0:
                    start = tree.nodes + len(token)
                    token += range(self._vocab, self._vocab + length)
                    parent += [node, *range(start, start + length - 1)]
            tokens.append(token)
            parents.append(parent)
        # A step in which nothing is asked of it must not take these for its own.
        self._first = {}
        if not any(tokens):
            return tree
        return replace(tree.with_probes(tokens, parents, scored=[()] * tree.rows), probe_embeddings=self._vectors)

    def _ends(self, tree: TokenTree, i: int, context: Context) -> list[int]:
        """Nodes of text `i` that get a group."""
        nodes = np.flatnonzero(tree.valid[i]).tolist()
        if self.groups is None or len(nodes) == 1:
            return nodes
        if self.groups == 0 or not len(self._known(i, context)):
            # Drafts that are not its own (a hybrid's): nothing is known about where they end.
            return nodes[: self.groups]
        chance = self._chances(tree, i, context, nodes)
        return sorted(nodes, key=lambda n: -chance[n])[: self.groups]

    def _chances(self, tree: TokenTree, i: int, context: Context, nodes: Sequence[int]) -> dict[int, float]:
        """For each live node the chance, by the drafter's own law, that it stands and none of its children does."""
        first, depth = self._first.get(context.rows[i], -1), len(self._known(i, context))
        stands, ends = {0: 1.0}, {0: 1.0}
        distribution = torch.softmax(self._logits[first : first + depth], -1) if first >= 0 else self._logits[:0]
        for node in nodes[1:]:
            above, place = int(tree.parent[i, node]), int(tree.depth[i, node]) - 1
            chance = float(distribution[place, int(tree.token[i, node])]) if place < len(distribution) else 0.0
            stands[node] = ends[node] = stands[above] * chance
            ends[above] -= stands[node]
        return ends

    def observe(self, step: StepResult) -> None:
        """Remember what the group after each text's new end ended in."""
        for i, row in enumerate(step.context.rows):
            self._states.pop(row, None)
            group = self._group(step.tree, i, step.paths[i][-1]) if step.new_tokens[i] else []
            if group:
                at = torch.from_numpy(step.output.hidden_index[i, group])
                states = step.output.hidden_states[0]
                self._states[row] = step.context.sequences[i].length, states[at.to(states.device)]

    def _group(self, tree: TokenTree, i: int, node: int) -> list[int]:
        """The probes that hold the group below a node of text `i`, in order."""
        heads = np.flatnonzero(tree.probe[i] & (tree.parent[i] == node) & (tree.token[i] == self._vocab))
        if not len(heads):
            return []
        first = int(heads[0])
        tokens = tree.token[i, first : first + len(self._vectors)]
        whole = tokens == np.arange(self._vocab, self._vocab + len(tokens))
        return list(range(first, first + (len(whole) if whole.all() else int(whole.argmin()))))

    def release(self, row: int) -> None:
        """Forget a row."""
        self._states.pop(row, None)

    def rewind(self, row: int, length: int) -> int:
        """Nothing of the last request is needed: every step brings the state that is drafted from."""
        self.release(row)
        return length
