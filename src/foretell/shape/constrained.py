"""Fits drafted trees to the rules of their requests: forbidden drafts are left out, and the tokens that a constraint
leaves next are drafted.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foretell.core.context import Context
from foretell.core.draft_origins import Path
from foretell.core.token_rules import TokenRules
from foretell.core.tree import TokenTree

_MOST_FORCED = 16
"""Most forced tokens that are drafted below one node."""
_EXTENDED_LEAVES = 4
"""Leaves of the drafted tree below which forced tokens are drafted, the first ones of the tree."""
GRAMMAR = "grammar"
"""Origin of forced tokens."""


def fit_to_rules(tree: TokenTree, context: Context, sampled: bool, added: bool) -> TokenTree:
    """The trees, with a prefix of 1, without drafts that the rules of their requests forbid and those beyond the end of
    an answer, and with forced tokens.

    What the acceptor allows without a change of the answer's distribution: `sampled`: sampled drafts may be left out;
    `added`: drafts that were not sampled may be added.
    """
    constrained = [i for i, rules in enumerate(context.rules) if rules is not None]
    if not constrained:
        return tree
    tree = replace(tree, valid=tree.valid.copy())
    tokens, parents = [[list[int]() for _ in context.rows] for _ in range(2)]
    for row in constrained:
        rules = context.rules[row]
        assert rules is not None
        fitted = _RowTree(tree, row, rules, context)
        fitted.prune(sampled)
        if added and rules.has_constraint:
            fitted.add_forced()
            tokens[row], parents[row] = fitted.new_tokens, fitted.new_parents
            if context.origins is not None:
                for path in fitted.forced_paths:
                    context.origins.record(context.rows[row], path, GRAMMAR)
    return tree.with_drafts(tokens, parents)


class _RowTree:
    """The tree of one request while it is fitted to its rules."""

    def __init__(self, tree: TokenTree, row: int, rules: TokenRules, context: Context) -> None:
        self._tree, self._row, self._rules = tree, row, rules
        self._generated, self._most_depth = context.sequences[row].generated, int(context.max_depth[row])
        self._paths: dict[int, Path] = {0: ()}
        """Tokens from the root to every node that the rules allow."""
        self._children: dict[tuple[int, int], int] = {}
        """The node below a node that holds a token."""
        self._ends = set[int]()
        """Nodes with which the answer is over."""
        self.new_tokens, self.new_parents = list[int](), list[int]()

    @property
    def forced_paths(self) -> list[Path]:
        """The paths to all new nodes."""
        return [self._paths[self._tree.nodes + i] for i in range(len(self.new_tokens))]

    def prune(self, sampled: bool) -> None:
        """Leave out forbidden drafts, and all below them and below the end of an answer, which no acceptor asks for;
        `sampled`: also forbidden drafts that were sampled.
        """
        tree, row = self._tree, self._row
        token, parent, q_index = tree.token[row].tolist(), tree.parent[row].tolist(), tree.q_index[row].tolist()
        for node in np.flatnonzero(tree.valid[row]).tolist()[1:]:
            above = None if parent[node] in self._ends else self._paths.get(parent[node])
            if above is not None and self._rules.allows(self._generated, above, token[node]):
                self._paths[node] = (*above, token[node])
                self._children.setdefault((parent[node], token[node]), node)
                if self._rules.ends(self._generated, self._paths[node]):
                    self._ends.add(node)
            else:
                tree.valid[row, node] = above is not None and q_index[node] >= 0 and not sampled

    def add_forced(self) -> None:
        """Draft forced tokens below the root, then below the first leaves."""
        self._add_below(0)
        inner = {parent for parent, _ in self._children}
        for leaf in [node for node in self._paths if node and node not in inner | self._ends][:_EXTENDED_LEAVES]:
            self._add_below(leaf)

    def _add_below(self, node: int) -> None:
        most = max(0, min(_MOST_FORCED, self._most_depth - len(self._paths[node])))
        for tokens in self._rules.forced(self._generated, self._paths[node]):
            self._add_path(node, tokens[:most])

    def _add_path(self, node: int, tokens: Sequence[int]) -> None:
        path = self._paths[node]
        for token in tokens:
            path = (*path, token)
            child = self._children.get((node, token))
            if child is None:
                child = self._tree.nodes + len(self.new_tokens)
                self.new_tokens.append(token)
                self.new_parents.append(node)
                self._paths[child], self._children[node, token] = path, child
            node = child
