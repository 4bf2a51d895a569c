"""Drafting with Gemma 4's assistant, which attends to the keys and values of its target."""

from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Int

from foretell.core.context import Context
from foretell.core.tree import TokenTree
from foretell.draft.base import Frontier, NodeLogits, RootStatePredictor
from foretell.draft.cached_states import layout_of
from foretell.model.cache.layout import Layout
from foretell.model.run.assistant import Assistant
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.runner import Runner, offered
from foretell.utils.inference import in_inference_mode


class AssistantDrafter(RootStatePredictor):
    """Gemma 4's assistant, for any number of tokens. It keeps nothing but the states of the nodes of one draft."""

    label = "a small decoder over the target's keys and values"
    network: Assistant

    def __init__(self, network: Assistant) -> None:
        super().__init__(network)
        self.max_context = network.context - 1
        self._runner: DecoderRunner | None = None
        self._states = torch.zeros(0, 0)
        """States of the nodes that were read in this draft, in the order of reading."""
        self._index: Int[np.ndarray, "b n"] = np.zeros((0, 0), np.int64)
        """The row of every node in them; -1: it was not read."""

    def attach(self, runner: Runner) -> None:
        """Learn whose keys and values it attends to.

        Raises:
            ValueError: they are not kept whole.
        """
        inner = offered(runner, DecoderRunner)
        if inner is None:
            raise ValueError(
                "mtp with an assistant attends to the keys and values of its target, which this cache does not keep as "
                "they are; leave out --kv-cache-policy and --sparsity, or use another method"
            )
        self._runner = inner

    def _ready(self, context: Context) -> list[bool]:
        """Also whether the target has the tokens before the root: those of a paused request are read again."""
        assert self._runner is not None
        held = [
            self._runner.length(row) == t.length - 1 for row, t in zip(context.rows, context.sequences, strict=True)
        ]
        return [ready and there for ready, there in zip(super()._ready(context), held, strict=True)]

    @in_inference_mode
    def _scores(self, tree: TokenTree, frontier: Frontier, context: Context) -> NodeLogits:
        """Logits after the frontier: one call for all requests."""
        if tree.nodes == 1:
            which = np.flatnonzero(self.max_depths(context))
            node, self._index = np.zeros_like(which), np.full((tree.rows, 1), -1)
            states = [self._root_states[context.sequences[i]][1] for i in which]
            state, self._states = (torch.stack(states) if states else self._states[:0]), self._states[:0]
        else:
            row = np.arange(tree.rows)[:, None]
            parent = self._index[row, tree.parent[row, frontier]]
            wanted = tree.valid[row, frontier] & (parent >= 0) & (context.max_depth > 0)[:, None]
            which, node = np.nonzero(wanted)[0], frontier[wanted]
            state = self._states[torch.from_numpy(parent[wanted])]
            self._index = np.pad(self._index, ((0, 0), (0, tree.nodes - self._index.shape[1])), constant_values=-1)
        logit_index = np.full(tree.token.shape, -1, np.int64)
        if not len(which):
            return self._no_logits(), logit_index
        assert self._runner is not None
        logit_index[which, node] = np.arange(len(which))
        self._index[which, node] = np.arange(len(which)) + len(self._states)
        new, logits = self.network.draft_step(
            state,
            torch.from_numpy(tree.token[which, node]),
            self._layout(which, context),
            self.network.attended(self._runner.cache),
        )
        self._states = torch.cat((self._states, new)) if len(self._states) else new
        return logits, logit_index

    def _layout(self, which: Int[np.ndarray, " k"], context: Context) -> Layout:
        """Nodes of these requests: all at the position of the last token, the first that the target has not read."""
        length = np.array([context.sequences[i].length - 1 for i in which])
        layout = layout_of(np.array(context.rows)[which], length - 1, length, length)
        return replace(layout, window_end=layout.position + 1)
