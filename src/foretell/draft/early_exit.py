"""Drafting with the target's own first layers, in the target's cache."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Real

from foretell.core.context import Context, StepResult
from foretell.core.tree import TokenTree
from foretell.draft.base import Predictor, TopTokens, top_tokens
from foretell.model.compact_runner import check_whole
from foretell.model.network import Network
from foretell.model.partial_pass import NodeStates, PartialPass
from foretell.model.runner import Runner
from foretell.speculator.network.exits import Exits

Confidence = Literal["softmax", "state", "classifier"]
"""How sure an exit is (CALM, arXiv 2207.07061): the difference of its two largest probabilities; the cosine of the
outputs of its last two layers; or a trained classifier's probability that it gives the target's own token.
"""
CONFIDENCES = get_args(Confidence)
MissingKeys = Literal["recompute", "copy"]
"""Keys and values of the layers above an exit: computed when a later token needs them (FREE, arXiv 2310.05424; EE-LLM,
arXiv 2312.04916), or those of the exit's state (CALM).
"""


class ExitHeads(ABC):
    """The output heads of some layers of a target.

    `layers`: after how many layers each exit is, ascending. `token_of`: the token of every logit; None: all tokens.
    """

    layers: tuple[int, ...]
    token_of: Int[np.ndarray, " w"] | None = None

    @abstractmethod
    def logits(self, exit_: int, states: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, "k w"]:
        """Logits of an exit, counted from 0, from the outputs of its last layer."""

    def classify(self, exit_: int, states: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, " k"]:
        """Probability that the exit gives the target's own token.

        Raises:
            ValueError: there is no classifier.
        """
        raise ValueError("exits with the target's own head have no classifier; fit some with `foretell train exits`")


class SharedHead(ExitHeads):
    """One exit with the target's own final norm and head (LayerSkip, arXiv 2404.16710).

    Raises:
        ValueError: the target does not have so many layers.
    """

    def __init__(self, network: Network, layer: int) -> None:
        if not 1 <= layer <= network.config.layers:
            raise ValueError(f"cannot exit after {layer} layers: the model has {network.config.layers}")
        self._network, self.layers = network, (layer,)

    def logits(self, exit_: int, states: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, "k w"]:
        """Logits of the whole vocabulary."""
        return self._network.logits(self._network.final_norm(states))


class TrainedExits(ExitHeads):
    """Exits that `foretell train exits` has fitted: all of them, or those after some layers.

    Raises:
        ValueError: there is no exit after one of these layers.
    """

    def __init__(self, network: Exits, layers: Sequence[int] = ()) -> None:
        known = network.config.layers
        missing = [layer for layer in layers if layer not in known]
        if missing:
            raise ValueError(f"there is no exit after {missing[0]} layers: the exits are after {list(known)}")
        self._network, self.layers = network, tuple(layers) or known
        self._number = [known.index(layer) for layer in self.layers]
        self.token_of = None if network.token_of is None else network.token_of.cpu().numpy()

    def logits(self, exit_: int, states: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, "k w"]:
        """Logits over the draft vocabulary."""
        return self._network.compute_logits(self._network(self._number[exit_], states))

    def classify(self, exit_: int, states: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, " k"]:
        """The classifier's probability."""
        return torch.sigmoid(self._network.exit_score(self._number[exit_], states))


@dataclass(frozen=True)
class ExitRule:
    """When a token leaves: at the first exit with a confidence above the threshold.

    `thresholds`: of every exit; a threshold of 1 or more is never passed. `decay`: the threshold falls with the
    position t in the answer, to 0.9 l + 0.1 exp(-decay t / horizon), since early errors spread (CALM); 0: it is l.

    Raises:
        ValueError: an unknown confidence, or a decay below 0.
    """

    confidence: Confidence
    thresholds: tuple[float, ...]
    decay: float = 0.0
    horizon: int = 256

    def __post_init__(self) -> None:
        if self.confidence not in CONFIDENCES:
            raise ValueError(f"unknown confidence {self.confidence!r}: {', '.join(CONFIDENCES)}")
        if not self.decay >= 0 or self.horizon < 1:
            raise ValueError(f"decay and horizon are at least 0 and 1, found {self.decay} and {self.horizon}")

    def threshold(self, exit_: int, position: Real[np.ndarray, "*t"] | int) -> Float[np.ndarray, "*t"]:
        """The threshold of an exit at positions of the answer."""
        level = self.thresholds[exit_]
        at = np.asarray(position, np.float64)
        if not self.decay or level >= 1:
            return np.full(at.shape, level, np.float64)
        return np.clip(0.9 * level + 0.1 * np.exp(-self.decay * at / self.horizon), 0, 1)


def measure_confidence(
    confidence: Confidence,
    heads: ExitHeads,
    exit_: int,
    found: NodeStates,
    logits: Float[torch.Tensor, "k w"],
) -> Float[torch.Tensor, " k"]:
    """How sure an exit is at every node."""
    if confidence == "softmax":
        best = logits.float().softmax(-1).topk(min(2, logits.shape[-1]), -1).values
        return best[:, 0] - best[:, 1] if best.shape[1] > 1 else best[:, 0]
    if confidence == "state":
        return F.cosine_similarity(found.states.float(), found.before.float(), dim=-1)
    return heads.classify(exit_, found.states)


class EarlyExitDrafter(Predictor):
    """Drafts with the target's first layers and the head of an exit (self-speculation: LayerSkip, arXiv 2404.16710).

    Keys and values are written to the target's cache, and the target's pass goes on from the layer where the draft has
    stopped, so a drafted token costs the first layers once. There is no draft before the target has read the prompt.

    `rule`: a node leaves at the first exit that is confident, and at the last one in any case; None: at the last one.
    `only_confident`: a node where the last exit is not confident either has no children. `missing_keys`: see
    `MissingKeys`; copied ones are for methods that do not verify the drafts.
    """

    label = "first layers of the target"

    def __init__(
        self,
        heads: ExitHeads,
        rule: ExitRule | None = None,
        only_confident: bool = False,
        missing_keys: MissingKeys = "recompute",
    ) -> None:
        if rule is not None and len(rule.thresholds) != len(heads.layers):
            raise ValueError(f"{len(heads.layers)} exits need as many thresholds, found {len(rule.thresholds)}")
        self.heads, self.rule, self.missing_keys = heads, rule, missing_keys
        self._only_confident = only_confident
        # A token that is forced has no exit.
        self.drafts_forced = not only_confident
        self.exit_counts: Int[np.ndarray, " e"] = np.zeros(len(heads.layers), np.int64)
        """Nodes that left at every exit so far."""
        self._runner: Runner | None = None
        self._pass: PartialPass | None = None

    def attach(self, runner: Runner) -> None:
        """Draft in the cache of this runner.

        Raises:
            ValueError: it keeps a part of the text's keys and values only.
        """
        check_whole(runner)
        self._runner, self._pass = runner, None

    def max_depths(self, context: Context) -> Int[np.ndarray, " b"]:
        """As `Drafter.max_depths`; 0 for the first token of an answer, so that drafts do not depend on how the prompt
        was read.
        """
        pairs = zip(context.rows, context.sequences, strict=True)
        ready = [s.length > s.prompt_length and self._target.length(row) == s.length - 1 for row, s in pairs]
        return np.where(ready, super().max_depths(context), 0)

    @property
    def _target(self) -> Runner:
        if self._runner is None:
            raise ValueError("a drafter with the target's first layers works in an engine only: it shares its cache")
        return self._runner

    def expand(
        self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context
    ) -> tuple[Float[torch.Tensor, "k v"], Int[np.ndarray, "b n"]]:
        """Logits after the frontier; none for requests at their maximum depth."""
        logits, index = self._exit(tree, frontier, context)
        if self.heads.token_of is None:
            return logits, index
        out = logits.new_full((len(logits), self._target.vocab), float("-inf"))
        out[:, torch.from_numpy(self.heads.token_of).to(out.device)] = logits
        return out, index

    def top_tokens(self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context, count: int) -> TopTokens:
        """The `count` most probable tokens after the frontier."""
        return top_tokens(*self._exit(tree, frontier, context), count, self.heads.token_of)

    def _exit(
        self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context
    ) -> tuple[Float[torch.Tensor, "k w"], Int[np.ndarray, "b n"]]:
        """Logits after the frontier, each node's from the exit where it leaves, and their index."""
        staying, run = frontier_nodes(tree, frontier, context), self._begin(tree, context)
        parts, index, count = list[torch.Tensor](), np.full(tree.token.shape, -1), 0
        for i, layer in enumerate(self.heads.layers):
            if not staying.any():
                break
            last = i == len(self.heads.layers) - 1
            if self.rule is not None and self.rule.thresholds[i] >= 1 and not last:
                continue
            found = run.advance(staying, layer)
            logits = self.heads.logits(i, found.states)
            leaving = self._leaving(staying, i, found, logits, tree, context)
            if last and not self._only_confident:
                leaving = staying
            staying = staying & ~leaving
            kept = found.index[leaving]
            parts.append(logits[torch.from_numpy(kept).to(logits.device)])
            index[leaving] = count + np.arange(len(kept))
            count += len(kept)
            self.exit_counts[i] += len(kept)
            if self.missing_keys == "copy" and len(kept):
                run.fill(leaving)
        if not parts:
            width = self._target.vocab if self.heads.token_of is None else len(self.heads.token_of)
            parts.append(torch.zeros(0, width))
        return torch.cat(parts), index

    def _leaving(
        self,
        nodes: Bool[np.ndarray, "b n"],
        exit_: int,
        found: NodeStates,
        logits: Float[torch.Tensor, "k w"],
        tree: TokenTree,
        context: Context,
    ) -> Bool[np.ndarray, "b n"]:
        """Those of the nodes at which an exit is confident."""
        if self.rule is None:
            return nodes
        sure = measure_confidence(self.rule.confidence, self.heads, exit_, found, logits).double().cpu().numpy()
        answered = np.array([s.length - s.prompt_length for s in context.sequences])
        row = np.nonzero(nodes)[0]
        position = answered[row] + tree.depth[nodes]
        out = np.zeros(nodes.shape, bool)
        out[nodes] = sure[found.index[nodes]] > self.rule.threshold(exit_, position)
        return out

    def _begin(self, tree: TokenTree, context: Context) -> PartialPass:
        """The pass over the tree so far."""
        if tree.nodes == 1 or self._pass is None:
            self._pass = self._target.begin_pass(context.rows, tree)
            self._pass.keeps_previous = self.rule is not None and self.rule.confidence == "state"
        else:
            self._pass.extend(tree)
        return self._pass

    def add_probes(self, tree: TokenTree, context: Context) -> TokenTree:
        """Leave out the logits of nodes with copied keys, which do not run the last layers."""
        run = self._pass
        if run is None or self.missing_keys == "recompute" or run.tree.nodes > tree.nodes:
            return tree
        filled = np.pad(run.filled, ((0, 0), (0, tree.nodes - run.tree.nodes)))
        return replace(tree, unscored=filled if tree.unscored is None else filled | tree.unscored)

    def observe(self, step: StepResult) -> None:
        """Forget the pass: the target has finished it."""
        self._pass = None


def frontier_nodes(tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context) -> Bool[np.ndarray, "b n"]:
    """The valid nodes of a frontier that may have children."""
    wanted = np.zeros(tree.token.shape, bool)
    np.put_along_axis(wanted, frontier, True, 1)
    return wanted & tree.valid & (tree.depth < context.max_depth[:, None])
