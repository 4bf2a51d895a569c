"""Parallel speculative sampling (PaSS): the target drafts for itself by reading look-ahead embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import Context, StepResult, StepState, TokenBuffer
from foretell.core.tree import TokenTree
from foretell.draft.base import Frontier, NodeLogits, Predictor
from foretell.speculator.network.look_ahead import LookAheadEmbeddings


@dataclass(frozen=True)
class _Scores:
    """What the groups of a step's requests predict."""

    logits: Float[torch.Tensor, "k v"]
    first: dict[int, int]
    """First row of every request's group in `logits`."""


class ParallelDrafter(Predictor):
    """Drafts from look-ahead embeddings that the previous pass read after the last accepted token (PaSS, arXiv
    2311.13581).

    A group of `ahead` embeddings is a chain of probes below a node of the tree. So the pass that accepts up to this
    node computes the next draft, too. `groups`: the number of nodes with a group, the most probable ends first; None:
    every node, for `(1 + drafts) * (1 + ahead)` tokens a pass; 0: the published form of two passes per draft, one that
    reads the embeddings after the root and one that verifies. Predictions of one group are independent of each other.
    """

    label = "the target at learned look-ahead vectors"

    def __init__(self, network: LookAheadEmbeddings, groups: int | None = None) -> None:
        if groups is not None and groups < 0:
            raise ValueError(f"look-ahead groups per pass: a number from 0 on, found {groups}")
        self.network, self.groups = network, groups
        self.hidden_layers = network.hidden_layers
        self._vectors = network().detach()
        self._vocab = network.target_info.vocab
        self._root_states = WeakKeyDictionary[TokenBuffer, tuple[int, torch.Tensor]]()
        """Per sequence its length before a group, and the hidden states [l d] of the group: a request that is paused
        keeps them, as they do not follow from its text.
        """
        self._scores = StepState[_Scores | None]()

    def max_depths(self, context: Context) -> Int[np.ndarray, " b"]:
        """The length of the group after every sequence; 0 where there was none."""
        lengths = [len(self._group_states(i, context)) for i in range(len(context.rows))]
        return np.minimum(super().max_depths(context), lengths)

    def _group_states(self, i: int, context: Context) -> Float[torch.Tensor, "l d"]:
        text = context.sequences[i]
        length, states = self._root_states.get(text, (0, self._vectors[:0]))
        return states if length == text.length else states[:0]

    def expand(self, tree: TokenTree, frontier: Frontier, context: Context) -> NodeLogits:
        """The logits of embedding `d + 1` for nodes at depth `d`, independent of the path; none beyond the group's
        end.
        """
        scores = self._scores.of(context, None)
        if scores is None or tree.nodes == 1:
            scores = self._score(context)
        known = np.array([[len(self._group_states(i, context))] for i in range(len(context.rows))])
        first = np.array([[scores.first[row]] for row in context.rows])
        return scores.logits, np.where(tree.depth < known, first + tree.depth, -1)

    def _score(self, context: Context) -> _Scores:
        groups = [self._group_states(i, context) for i in range(len(context.rows))]
        ends = np.cumsum([len(g) for g in groups]).tolist()
        first = {row: end - len(g) for row, end, g in zip(context.rows, ends, groups, strict=True)}
        states = torch.cat(groups).to(self.network.dtype)
        scores = _Scores(self.network.to_target_vocab(self.network.compute_logits(states)), first)
        self._scores.put(context, scores)
        return scores

    def add_probes(self, tree: TokenTree, context: Context) -> TokenTree:
        """Add the groups: below the root of requests without a draft, else below the most probable ends."""
        tokens, parents = list[list[int]](), list[list[int]]()
        for i in range(tree.rows):
            token, parent = list[int](), list[int]()
            for node in self._group_nodes(tree, i, context):
                # A prediction beyond the next pass's maximum depth is not needed.
                length = min(len(self._vectors), int(context.max_depth[i] - tree.depth[i, node]) - 1)
                if length > 0:
                    start = tree.nodes + len(token)
                    token += range(self._vocab, self._vocab + length)
                    parent += [node, *range(start, start + length - 1)]
            tokens.append(token)
            parents.append(parent)
        if not any(tokens):
            return tree
        return replace(tree.with_probes(tokens, parents, scored=[()] * tree.rows), probe_embeddings=self._vectors)

    def _group_nodes(self, tree: TokenTree, i: int, context: Context) -> list[int]:
        """Nodes of batch row `i` that get a group."""
        nodes = np.flatnonzero(tree.valid[i]).tolist()
        if self.groups is None or len(nodes) == 1:
            return nodes
        if self.groups == 0 or not len(self._group_states(i, context)):
            # The drafts are another drafter's (of a hybrid), of unknown probability.
            return nodes[: self.groups]
        probability = self._end_probabilities(tree, i, context, nodes)
        return sorted(nodes, key=lambda n: -probability[n])[: self.groups]

    def _end_probabilities(self, tree: TokenTree, i: int, context: Context, nodes: Sequence[int]) -> dict[int, float]:
        """The probability of every valid node, by the drafter's own distribution, to be accepted and no child of it."""
        scores, depth = self._scores.of(context, None), len(self._group_states(i, context))
        accepted, ends = {0: 1.0}, {0: 1.0}
        distribution = torch.zeros(0, 0)
        if scores is not None and (first := scores.first.get(context.rows[i], -1)) >= 0:
            distribution = torch.softmax(scores.logits[first : first + depth], -1)
        for node in nodes[1:]:
            above, place = int(tree.parent[i, node]), int(tree.depth[i, node]) - 1
            probability = float(distribution[place, int(tree.token[i, node])]) if place < len(distribution) else 0.0
            accepted[node] = ends[node] = accepted[above] * probability
            ends[above] -= accepted[node]
        return ends

    def observe(self, step: StepResult) -> None:
        """Keep the states of the group after the newest token of every request."""
        for i, text in enumerate(step.context.sequences):
            if not step.new_tokens[i]:
                continue
            self._root_states.pop(text, None)
            group = self._group_probes(step.tree, i, step.paths[i][-1])
            if group:
                at = torch.from_numpy(step.output.hidden_index[i, group])
                states = step.output.hidden_states[0]
                self._root_states[text] = text.length, states[at.to(states.device)]

    def _group_probes(self, tree: TokenTree, i: int, node: int) -> list[int]:
        """The probes of the group below a node of batch row `i`, in order."""
        heads = np.flatnonzero(tree.probe[i] & (tree.parent[i] == node) & (tree.token[i] == self._vocab))
        if not len(heads):
            return []
        first = int(heads[0])
        tokens = tree.token[i, first : first + len(self._vectors)]
        whole = tokens == np.arange(self._vocab, self._vocab + len(tokens))
        return list(range(first, first + (len(whole) if whole.all() else int(whole.argmin()))))

    def rewind(self, row: int, length: int) -> int:
        """Nothing of the last request is needed: every step brings the state that is drafted from."""
        return length
