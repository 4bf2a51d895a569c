"""Fewer layers the later a token is: a budget of layers per position (SkipDecode, arXiv 2307.02628)."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import Context, StepResult, StepState
from foretell.core.tree import TokenTree, root_tree
from foretell.draft.base import Drafter
from foretell.draft.draft_model import read_backlog, unread_tokens
from foretell.model.run.compact_runner import check_whole
from foretell.model.run.runner import Runner, RunsLayers, required


@dataclass(frozen=True)
class LayerBudget:
    """How many of `layers` layers the token at each position of an answer runs: from `most` it falls in equal parts to
    `least` at position `horizon - 1`, and stays there.

    The first `warm_up` layers and the last ones run; the lower and middle ones between them are left out, so that later
    tokens attend to states of the upper layers. A layer that runs at a position ran at all earlier ones: no key is
    missing.

    Raises:
        ValueError: not 0 <= warm_up < least <= most <= layers, or a horizon below 2.
    """

    layers: int
    most: int
    least: int
    warm_up: int = 1
    horizon: int = 256

    def __post_init__(self) -> None:
        if not (0 <= self.warm_up < self.least <= self.most <= self.layers and self.horizon >= 2):
            raise ValueError(
                f"a budget of {self.most} to {self.least} layers, the first {self.warm_up} of them always, over "
                f"{self.horizon} tokens was asked for: 0 <= warmup_layers < min_layers <= max_layers <= {self.layers} "
                "(the model's layers) and a horizon of at least 2 are needed"
            )

    def count(self, position: Int[np.ndarray, "*t"] | int) -> Int[np.ndarray, "*t"]:
        """Layers that run at positions of the answer."""
        share = np.minimum(np.asarray(position, np.float64) / (self.horizon - 1), 1)
        return np.asarray(np.floor(self.most - (self.most - self.least) * share + 0.5), np.int64)

    def resumes_at(self, position: Int[np.ndarray, "*t"] | int) -> Int[np.ndarray, "*t"]:
        """The first layer, counted from 0, that runs after the first `warm_up` ones."""
        return np.asarray(self.layers - (self.count(position) - self.warm_up))

    @property
    def mean(self) -> float:
        """Mean layers of the tokens of an answer of `horizon` tokens."""
        return float(self.count(np.arange(self.horizon)).mean())


class SkipDecodeDrafter(Drafter):
    """Drafts nothing: it lets the target leave out layers by a budget. Prompts run all layers.

    Rows of a batch share the layers that they have in common at their positions. `measures`: the whole model reads the
    answer too, in a cache of its own, for `reference_logits`; a step then costs more than plain decoding.
    """

    label = "fewer layers, the later a token is"
    drafts_forced = False
    exact_keys = False

    def __init__(self, budget: LayerBudget, reference: Runner | None = None, chunk: int = 512) -> None:
        self.budget, self._reference, self._chunk = budget, reference, chunk
        self._runner: Runner | None = None
        self._layers: RunsLayers | None = None
        """The target, whose passes begin with their first layers."""
        self._logits: dict[int, Float[torch.Tensor, " v"]] = {}
        self._read = StepState[dict[int, int]]()
        """How many tokens of each row the whole model has read in a step."""
        self.layer_counts: Int[np.ndarray, " n"] = np.zeros(budget.layers + 1, np.int64)
        """Tokens that have run so many layers."""

    @property
    def measures(self) -> bool:
        """Whether the whole model reads the answer too."""
        return self._reference is not None

    def attach(self, runner: Runner) -> None:
        """Run this runner's passes.

        Raises:
            ValueError: it keeps a part of the text's keys and values only, or runs all layers at once.
        """
        check_whole(runner)
        self._layers = required(runner, RunsLayers, "early exit needs a model of the own decoder")
        self._runner = runner

    def add_probes(self, tree: TokenTree, context: Context) -> TokenTree:
        """Begin the pass with the first layers of all answers' last tokens, after which it goes on higher up."""
        runner, layers = self._runner, self._layers
        if runner is None or layers is None:
            raise ValueError("a budget of layers works in an engine only: it changes the passes of its target")
        if self._reference is not None:
            self._read_whole(self._reference, context)
        pairs = zip(context.rows, context.sequences, strict=True)
        ready = [i for i, (row, s) in enumerate(pairs) if runner.length(row) == s.length - 1 >= s.prompt_length]
        if ready:
            part = context.select(ready)
            trees = tree if len(ready) == len(context.rows) else tree.select(np.array(ready))
            run = layers.begin_pass(part.rows, trees)
            position = np.array([s.length - s.prompt_length for s in part.sequences])
            run.skip_layers(self.budget.warm_up, self.budget.resumes_at(position))
            run.advance(run.tree.valid, self.budget.warm_up)
            self.layer_counts += np.bincount(self.budget.count(position), minlength=len(self.layer_counts))
        return tree

    def _read_whole(self, reference: Runner, context: Context) -> None:
        """Run the whole model over what it has not read; the logits after the last tokens are kept."""
        context = replace(context, max_depth=np.ones(len(context.rows), np.int64))
        read_backlog(reference, context, self._chunk)
        unread = unread_tokens(reference, context)
        whole = root_tree(context.last_tokens).with_prefix(unread)
        roots = np.arange(whole.nodes) == whole.prefix_length[:, None] - 1
        output = reference.forward(context.rows, whole, scored=roots)
        self._read.put(context, dict(zip(context.rows, map(len, unread), strict=True)))
        for i, row in enumerate(context.rows):
            self._logits[row] = output.logits[int(output.logit_index[i, len(unread[i]) - 1])]

    def reference_logits(self, row: int) -> Float[torch.Tensor, " v"] | None:
        """The whole model's logits after the last token of a row; None: it has not read it in this step."""
        return self._logits.get(row)

    def observe(self, step: StepResult) -> None:
        """Keep what the whole model has read, and forget its logits: the next step has others."""
        self._logits.clear()
        if self._reference is not None:
            for row, count in self._read.of(step.context, {}).items():
                self._reference.commit(row, range(count))

    def release(self, row: int) -> None:
        """Forget a row whose request has ended."""
        self._logits.pop(row, None)
        if self._reference is not None:
            self._reference.truncate(row, 0)
