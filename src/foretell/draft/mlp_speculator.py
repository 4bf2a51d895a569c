"""Drafting with a multi-stage MLP speculator: a small state at every node of the tree, made from its parent's and its
token.
"""

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import Context, StepResult
from foretell.core.tree import TokenTree, tree_from_parents
from foretell.draft.base import Predictor, TopTokens, top_tokens
from foretell.model.kernels import Trees
from foretell.speculator.network.mlp_speculator import MLPSpeculator


class MLPSpeculatorDrafter(Predictor):
    """Stage `i` scores what follows the nodes at depth `i` (Wertheimer et al., arXiv 2404.19124).

    The first stage starts from the target's state that produced the root. Nothing is drafted before there is one, nor
    deeper than there are stages.
    """

    label = "recurrent MLP on the target's last hidden state"

    def __init__(self, network: MLPSpeculator) -> None:
        self.network, self.hidden_layers = network, network.hidden_layers
        self._token_of = None if network.token_of is None else network.token_of.cpu().numpy()
        self._start: dict[int, tuple[int, torch.Tensor]] = {}
        """Per row the length of the text whose last token a state produced, and that state, as the first stage takes
        it.
        """
        self._states = torch.zeros(0, 0)
        """States of the nodes expanded in this step, in the order in which they were."""
        self._stage: Int[np.ndarray, " k"] = np.zeros(0, np.int64)
        """The stage that made each of them."""
        self._at: Int[np.ndarray, "b n"] = np.zeros((0, 0), np.int64)
        """Which of them a node has; -1: none."""

    def max_depths(self, context: Context) -> Int[np.ndarray, " b"]:
        """As many tokens as there are stages, for texts whose last token was produced by a known state."""
        ready = [self._ready(row, text.length) for row, text in zip(context.rows, context.sequences, strict=True)]
        return np.minimum(super().max_depths(context), np.where(ready, self.network.stages, 0))

    def _ready(self, row: int, length: int) -> bool:
        return row in self._start and self._start[row][0] == length

    def top_tokens(self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context, count: int) -> TopTokens:
        """The `count` likeliest tokens after the frontier; the tokens that it does not draft are not looked at."""
        return top_tokens(*self._scores(tree, frontier, context), count, self._token_of)

    @torch.inference_mode()
    def grow_dynamic_tree(
        self, context: Context, sizes: tuple[int, int, int], bounds: tuple[float, float]
    ) -> TokenTree | None:
        """Whole trees from the CPU kernels, where these run the network."""
        kernels, (depth, width, budget) = self.network.native, sizes
        ready = [self._ready(row, text.length) for row, text in zip(context.rows, context.sequences, strict=True)]
        able = np.flatnonzero((context.max_depth > 0) & ready)
        if kernels is None or self.network.softcap or not len(able):
            return None
        start = torch.cat([self._start[context.rows[i]][1] for i in able.tolist()])
        trees = Trees(context.max_depth[able], (min(depth, self.network.stages), width, budget), bounds)
        kernels.beam(start, torch.tensor(context.last_tokens)[able], trees)
        return tree_from_parents(context.last_tokens, able, trees.token, trees.parent, trees.count)

    def expand(
        self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context
    ) -> tuple[Float[torch.Tensor, "k v"], Int[np.ndarray, "b n"]]:
        """Scores after the frontier; none for nodes as deep as there are stages or room."""
        logits, at = self._scores(tree, frontier, context)
        return self.network.to_target_vocab(logits), at

    def _scores(
        self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context
    ) -> tuple[Float[torch.Tensor, "k w"], Int[np.ndarray, "b n"]]:
        """Scores of the drafted tokens: one matrix product per stage over all texts."""
        if tree.nodes == 1:
            return self._first(tree, context)
        row = np.arange(tree.rows)[:, None]
        parent = self._at[row, tree.parent[row, frontier]]
        stage = self._stage[parent] + 1
        most = np.minimum(context.max_depth, self.network.stages)[:, None]
        wanted = tree.valid[row, frontier] & (stage < most) & (parent >= 0)
        at = np.full(tree.token.shape, -1, np.int64)
        have, self._at = self._at, at.copy()
        self._at[:, : have.shape[1]] = have
        found = list[torch.Tensor]()
        for each in sorted(set(stage[wanted].tolist())):
            mine = wanted & (stage == each)
            which, node = np.nonzero(mine)[0], frontier[mine]
            state = self._states[torch.from_numpy(parent[mine]).to(self._states.device)]
            logits, number = self._score(state, tree.token[which, node], each)
            at[which, node] = np.arange(len(node)) + sum(map(len, found))
            self._at[which, node] = number
            found.append(logits)
        if not found:
            return self._none(), at
        return found[0] if len(found) == 1 else torch.cat(found), at

    def _first(self, tree: TokenTree, context: Context) -> tuple[Float[torch.Tensor, "k w"], Int[np.ndarray, "b 1"]]:
        """Scores after the roots, from the target's states; where one is not known, there are none."""
        ready = [self._ready(row, text.length) for row, text in zip(context.rows, context.sequences, strict=True)]
        self._at = np.where(ready, np.cumsum(ready) - 1, -1)[:, None]
        self._states, self._stage = torch.zeros(0, 0), np.zeros(1, np.int64)
        if not any(ready):
            return self._none(), self._at
        start = torch.cat([self._start[row][1] for row, yes in zip(context.rows, ready, strict=True) if yes])
        return self._score(start, tree.token[ready, 0], 0)[0], self._at

    def _score(
        self, state: Float[torch.Tensor, "k e"], token: Int[np.ndarray, " k"], stage: int
    ) -> tuple[Float[torch.Tensor, "k w"], Int[np.ndarray, " k"]]:
        """Scores after nodes with these parents' states and these tokens; the places of their own states, which are
        remembered.
        """
        new, logits = self.network.draft_step(state, torch.from_numpy(token).to(state.device), stage)
        number = np.arange(len(new)) + len(self._states)
        made = np.full(len(new), stage)
        self._stage = np.concatenate([self._stage, made]) if len(self._states) else made
        self._states = torch.cat([self._states, new]) if len(self._states) else new
        return logits, number

    def _none(self) -> Float[torch.Tensor, "0 w"]:
        """No scores."""
        return torch.zeros(0, self.network.target_info.vocab if self._token_of is None else len(self._token_of))

    def observe(self, step: StepResult) -> None:
        """Remember the state that produced each text's newest token."""
        rows = np.arange(len(step.context.rows))
        last = torch.from_numpy(step.output.hidden_index[rows, [path[-1] for path in step.paths]])
        start = self.network.initial_state([f[last.to(f.device)] for f in step.output.hidden_states])
        for i, row in enumerate(step.context.rows):
            if step.new_tokens[i]:
                self._start[row] = step.context.sequences[i].length, start[i : i + 1]
            else:
                self.release(row)

    def release(self, row: int) -> None:
        """Forget a row."""
        self._start.pop(row, None)

    def rewind(self, row: int, length: int) -> int:
        """Nothing of the last request is needed: every step brings the state that is drafted from."""
        self.release(row)
        return length
