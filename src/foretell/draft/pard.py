"""Drafting with PARD: a draft model reads mask tokens behind the sequence and predicts all of them in one pass."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import Context, StepResult
from foretell.core.tree import TokenTree, tree_from_lists
from foretell.draft.base import Predictor
from foretell.draft.draft_model import OwnCache, read_backlog, unread_tokens
from foretell.draft.heads import OnePassPredictor
from foretell.model.load.pard2 import StateProjection
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.runner import Runner


class PardDrafter(OnePassPredictor, OwnCache):
    """A draft model with mask tokens (PARD, arXiv 2504.18583).

    A pass reads the tokens that the draft model has not read yet and a chain of masks behind them. Keys and values of
    the tokens are kept, those of the masks are not.
    """

    label = "draft model over mask tokens, in one pass"

    def __init__(self, runner: Runner, mask_token: int, depth: int, chunk: int = 512) -> None:
        self.runner, self.depth, self._mask_token = runner, depth, mask_token
        self.max_context = runner.context - depth
        self._chunk = chunk

    def _inputs(self, rows: Sequence[int], tree: TokenTree) -> TokenTree:
        """What the draft model reads of the unread tokens of some rows, the prefixes, and of the masks after them."""
        return tree

    def _predict(self, context: Context) -> Float[torch.Tensor, "l r v"]:
        """Logits of all depths for the requests that may have drafts."""
        active = np.flatnonzero(context.max_depth)
        if not len(active):
            return torch.zeros(self.depth, 0, self.runner.vocab)
        part, masks = context.select(active.tolist()), self.depth - 1
        for row, text in zip(part.rows, part.sequences, strict=True):
            # A step that failed proposes again: its last token was read.
            self.runner.truncate(row, min(self.runner.length(row), text.length - 1))
        read_backlog(self.runner, part, self._chunk, self._inputs)
        chains = tree_from_lists(
            [[last, *[self._mask_token] * masks] for last in part.last_tokens], [list(range(-1, masks))] * len(active)
        )
        full = chains.with_prefix(unread_tokens(self.runner, part))
        last = full.prefix_length[:, None] - 1
        place = last + np.arange(masks + 1)
        scored = np.zeros(full.token.shape, bool)
        np.put_along_axis(scored, place, True, 1)
        output = self.runner.forward(part.rows, self._inputs(part.rows, full), active=full.valid, scored=scored)
        for row, length in zip(part.rows, full.prefix_length.tolist(), strict=True):
            self.runner.commit(row, range(length))
        index = torch.from_numpy(np.take_along_axis(output.logit_index, place, 1).T.copy())
        return output.logits[index.to(output.logits.device)]


class Pard2Drafter(PardDrafter):
    """PARD-2 (arXiv 2605.08632): to the embedding of every token the target's hidden states at the token before it are
    added, projected; to those of masks the states that the last token reads, to that of the first token none.
    """

    label = "draft model over mask tokens and the target's hidden states, in one pass"
    runner: DecoderRunner

    def __init__(self, runner: DecoderRunner, mask_token: int, depth: int, projection: StateProjection) -> None:
        super().__init__(runner, mask_token, depth)
        self.hidden_layers, self._projection = projection.layers, projection
        self._added: dict[int, tuple[int, Float[torch.Tensor, "n d"]]] = {}
        """By row what the states at consecutive positions add to the next token, and the first of these positions."""

    def max_depths(self, context: Context) -> Int[np.ndarray, " b"]:
        """0 where the states at a token that is to be read are not known, and before the first new token."""
        known = []
        for row, text in zip(context.rows, context.sequences, strict=True):
            first, added = self._added.get(row, (0, ()))
            read = min(self.runner.length(row), text.length - 1)
            whole = first <= max(read - 1, 0) and first + len(added) == text.length - 1
            known.append(whole and text.length > text.prompt_length)
        return np.where(known, super().max_depths(context), 0)

    @torch.inference_mode()
    def observe(self, step: StepResult) -> None:
        """Keep what the states at the accepted nodes add."""
        output, projection = step.output, self._projection
        for i, (row, start) in enumerate(zip(step.context.rows, step.start_positions, strict=True)):
            index = torch.from_numpy(output.hidden_index[i, list(step.paths[i])])
            states = torch.cat([part[index.to(part.device)].float().cpu() for part in output.hidden_states], -1)
            new = states @ projection.weight.T + projection.bias
            first, added = self._added.get(row, (start, new[:0]))
            if first + len(added) != start:
                first, added = start, new[:0]
            # A step that fails is drafted again, from the last token that was read.
            past = max(min(self.runner.length(row) - 2, start) - first, 0)
            self._added[row] = first + past, torch.cat((added[past:], new))

    def release(self, row: int) -> None:
        """Forget a row whose request has ended."""
        self._added.pop(row, None)
        super().release(row)

    # Of a prefix that is shared the states are not kept, so it is read again.
    rewind, copy_row = Predictor.rewind, Predictor.copy_row

    def _inputs(self, rows: Sequence[int], tree: TokenTree) -> TokenTree:
        table = self.runner.network.embed(torch.from_numpy(tree.token.ravel())).float()
        table = table.unflatten(0, tree.token.shape).clone()
        for i, row in enumerate(rows):
            first, added = self._added[row]
            last = int(tree.prefix_length[i]) - 1
            position = self.runner.length(row) + np.minimum(np.arange(tree.nodes), last) - 1
            some = np.flatnonzero(tree.valid[i] & (position >= 0))
            table[i, some] += added[torch.from_numpy(position[some] - first)].to(table.device)
        token = self.runner.vocab + np.arange(tree.token.size).reshape(tree.token.shape)
        return replace(tree, token=token, probe_embeddings=table.flatten(0, 1))
