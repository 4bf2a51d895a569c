"""Drafting with the target's own first layers, in the target's cache."""

from dataclasses import replace
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import Context, StepResult, StepState, TokenBuffer
from foretell.core.noise import LevelNoise
from foretell.core.tree import NodeMask, TokenTree
from foretell.draft.base import Frontier, NodeLogits, TargetCachePredictor, TopTokens, in_engine, top_tokens
from foretell.draft.beta_mixture import AdaptiveThresholds
from foretell.draft.exit_blocks import ExitBlocks
from foretell.draft.exit_chain import ExitChain
from foretell.draft.exit_heads import ExitHeads, ExitRule, measure_confidence
from foretell.model.kernels import NodeLimits
from foretell.model.run.compact_runner import check_whole
from foretell.model.run.partial_pass import NodeStates, PartialPass
from foretell.model.run.runner import Runner, RunsLayers, required

MissingKeys = Literal["recompute", "copy"]
"""Keys and values of the layers above an exit: computed when a later token needs them (FREE, arXiv 2310.05424; EE-LLM,
arXiv 2312.04916), or those of the exit's state (CALM).
"""


class EarlyExitDrafter(TargetCachePredictor):
    """Drafts with the target's first layers and the head of an exit (self-speculation: LayerSkip, arXiv 2404.16710).

    Keys and values are written to the target's cache, and the target's pass goes on from the layer where the draft has
    stopped, so a drafted token costs the first layers once.

    `rule`: a node leaves at the first exit that is confident, and at the last one in any case; None: at the last one.
    `only_confident`: a node where the last exit is not confident either has no children. `missing_keys`: see
    `MissingKeys`; copied ones are for methods that do not verify the drafts. `adaptive`: the threshold of the only exit
    adapts to earlier requests (FREE), so that an answer depends on them.
    """

    label = "first layers of the target"

    def __init__(
        self,
        heads: ExitHeads,
        rule: ExitRule | None = None,
        only_confident: bool = False,
        missing_keys: MissingKeys = "recompute",
        adaptive: AdaptiveThresholds | None = None,
    ) -> None:
        if heads.blocks and (missing_keys == "copy" or (rule is not None and rule.confidence == "state")):
            raise ValueError("exits with decoder blocks need missing_keys recompute and no exit_confidence state")
        if rule is not None and len(rule.thresholds) != len(heads.layers):
            raise ValueError(f"{len(heads.layers)} exits need as many thresholds, found {len(rule.thresholds)}")
        self.heads, self.rule, self.missing_keys, self.adaptive = heads, rule, missing_keys, adaptive
        self._chooses_depth = rule is not None and rule.confidence == "classifier" and heads.chooses_depth
        self._only_confident = only_confident
        self.exact_keys = missing_keys == "recompute"
        # A token that is forced has no exit.
        self.drafts_forced = not only_confident
        self.exit_counts: Int[np.ndarray, " e"] = np.zeros(len(heads.layers), np.int64)
        """Nodes that left at every exit so far."""
        self._layers: RunsLayers | None = None
        """The target, whose passes begin with their first layers."""
        self._pass = StepState[PartialPass | None]()
        self._chain: ExitChain | None = None
        """Chains of the only exit, where the kernels can run them."""
        self._blocks: ExitBlocks | None = None
        """The decoder blocks of the only exit."""
        if heads.blocks:
            self.hidden_layers = heads.layers
        self._depths = WeakKeyDictionary[TokenBuffer, Float[np.ndarray, " e"]]()
        """Per sequence the distribution function of the depth of its answer, with classifiers for whole answers."""

    def attach(self, runner: Runner) -> None:
        """Draft in the cache of this runner.

        Raises:
            ValueError: it keeps a part of the text's keys and values only, or runs all layers at once.
        """
        check_whole(runner)
        if runner is self._runner:
            return
        self._layers = required(runner, RunsLayers, "early exit needs a model of the own decoder")
        self._runner = runner
        self._blocks = ExitBlocks(self.heads.blocks, self.heads.layers[0], runner) if self.heads.blocks else None
        self._chain = ExitChain.of(self.heads, runner, self._blocks)

    def _is_read(self, row: int, length: int) -> bool:
        """Also whether the exit's blocks know the states of these tokens."""
        return super()._is_read(row, length) and (self._blocks is None or self._blocks.ready(row, length))

    def expand(self, tree: TokenTree, frontier: Frontier, context: Context) -> NodeLogits:
        """Logits after the frontier; none for requests at their maximum depth."""
        logits, index = self._exit(tree, frontier, context)
        if self.heads.token_of is None:
            return logits, index
        out = logits.new_full((len(logits), self._target.vocab), float("-inf"))
        out[:, torch.from_numpy(self.heads.token_of).to(out.device)] = logits
        return out, index

    def top_tokens(
        self, tree: TokenTree, frontier: Frontier, context: Context, count: int, noise: LevelNoise | None = None
    ) -> TopTokens:
        """The `count` most probable tokens after the frontier."""
        return top_tokens(*self._exit(tree, frontier, context), count, self.heads.token_of, noise)

    def grow_chain(self, context: Context, length: int, limits: NodeLimits) -> TokenTree | None:
        """Chains in one call, with one exit and a confidence that the kernels measure."""
        active, rule = np.flatnonzero(context.max_depth), self._kernel_rule(context, limits)
        if self._chain is None or rule is None or not len(active):
            return None
        part = context.select(active.tolist())
        grown = self._chain.grow(part, length, *rule)
        tree = grown.tree
        self._pass.put(context, grown.partial)
        self.exit_counts[0] += int(np.count_nonzero(tree.valid[:, 1:]))
        if self.missing_keys == "copy":
            grown.partial.fill(np.pad(tree.valid[:, 1:], ((0, 0), (0, 1))))
        if self.adaptive is not None:
            for i, node in zip(*np.nonzero(grown.trees.confidence[:, 1:]), strict=True):
                confidence, token = grown.trees.confidence[i, node + 1], grown.trees.token[i, node + 1]
                self.adaptive.record(context, part.rows[i], int(node), float(confidence), int(token))
        return tree.spread(context.last_tokens, active.tolist())

    def _kernel_rule(self, context: Context, limits: NodeLimits) -> tuple[NodeLimits, float | None] | None:
        """The limits that the kernels apply to the nodes of a chain, and the confidence of those that are refused;
        None: they cannot.
        """
        rule = self.rule
        if rule is None:
            return limits, None
        levels = {self._threshold(text, 0, 0) for text in context.sequences}
        unsupported = rule.decay or rule.confidence not in ("softmax", "probability") or len(levels) != 1
        if not self._only_confident or unsupported or limits != NodeLimits():
            return None
        level = levels.pop()
        return NodeLimits(0.0, float(np.nextafter(level, 2.0)), rule.confidence == "softmax"), level

    def _threshold(self, text: TokenBuffer, exit_: int, position: int) -> float:
        """The threshold of an exit for the request with this text at a position of its answer."""
        assert self.rule is not None
        return float(self.rule.threshold(exit_, position)) if self.adaptive is None else self.adaptive.of(text)

    def _exit(self, tree: TokenTree, frontier: Frontier, context: Context) -> NodeLogits:
        """Logits after the frontier, each node's from the exit where it leaves, and their index."""
        staying, run = frontier_nodes(tree, frontier, context), self._begin(tree, context)
        parts, index, count = list[torch.Tensor](), np.full(tree.token.shape, -1), 0
        depths = self._choose_depths(staying, run, context) if self._chooses_depth else None
        for i, layer in enumerate(self.heads.layers):
            if not staying.any():
                break
            last = i == len(self.heads.layers) - 1
            if self.rule is not None and self.rule.thresholds[i] >= 1 and not last:
                continue
            at_exit = self._read_blocks(staying, run.advance(staying, layer), tree, context)
            logits = self.heads.logits(i, at_exit.states)
            sure = None if self.rule is None else self._measure(staying, i, at_exit, logits, depths)
            leaving = staying if sure is None else self._leaving(staying, i, sure, tree, context)
            if sure is not None and self.adaptive is not None:
                self._record(context, staying, sure, at_exit, logits)
            if last and not self._only_confident:
                leaving = staying
            staying = staying & ~leaving
            kept = at_exit.index[leaving]
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

    def _read_blocks(self, nodes: NodeMask, at_exit: NodeStates, tree: TokenTree, context: Context) -> NodeStates:
        """The outputs of the exit's blocks at nodes of a frontier, if it has any."""
        if self._blocks is None:
            return at_exit
        if tree.nodes == 1:
            states = self._blocks.read_roots(context, np.flatnonzero(nodes[:, 0]).tolist(), at_exit.states)
        else:
            length = np.array([self._target.length(row) for row in context.rows])
            states = self._blocks.read_nodes(tree, context.rows, length, nodes, at_exit.states)
        return replace(at_exit, states=states)

    def _measure(
        self,
        nodes: NodeMask,
        exit_: int,
        at_exit: NodeStates,
        logits: Float[torch.Tensor, "k w"],
        depths: Float[np.ndarray, "b n e"] | None,
    ) -> Float[np.ndarray, " k"]:
        """How sure an exit is at every one of the nodes, in their order."""
        if depths is not None:
            return depths[nodes][:, exit_]
        assert self.rule is not None
        sure = measure_confidence(self.rule.confidence, self.heads, exit_, at_exit, logits)
        return sure.double().cpu().numpy()[at_exit.index[nodes]]

    def _leaving(
        self, nodes: NodeMask, exit_: int, sure: Float[np.ndarray, " k"], tree: TokenTree, context: Context
    ) -> NodeMask:
        """Those of the nodes at which an exit is confident."""
        answered = [s.length - s.prompt_length for s in context.sequences]
        rows, depth = np.nonzero(nodes)[0].tolist(), tree.depth[nodes].tolist()
        pairs = zip(rows, depth, strict=True)
        level = [self._threshold(context.sequences[i], exit_, answered[i] + below) for i, below in pairs]
        out = np.zeros(nodes.shape, bool)
        # Rounding may give a confidence above 1, and a threshold of 1 is never passed.
        out[nodes] = np.minimum(sure, 1) > np.array(level)
        return out

    def _record(
        self,
        context: Context,
        nodes: NodeMask,
        sure: Float[np.ndarray, " k"],
        at_exit: NodeStates,
        logits: Float[torch.Tensor, "k w"],
    ) -> None:
        assert self.adaptive is not None
        best = logits.argmax(-1).cpu().numpy()[at_exit.index[nodes]]
        tokens = best if self.heads.token_of is None else self.heads.token_of[best]
        for request, node, confidence, token in zip(*np.nonzero(nodes), sure, tokens, strict=True):
            self.adaptive.record(context, context.rows[request], int(node), float(confidence), int(token))

    def _choose_depths(self, nodes: NodeMask, run: PartialPass, context: Context) -> Float[np.ndarray, "b n e"]:
        """The distribution function of every node's depth at the exits, by classifiers of the first fitted exit."""
        out = np.zeros((*nodes.shape, len(self.heads.layers)))
        at_exit = run.advance(nodes, self.heads.first_layer)
        out[nodes] = self.heads.depth_distribution(at_exit.states).double().cpu().numpy()[at_exit.index[nodes]]
        if self.heads.chooses_once:
            for i, node in zip(*np.nonzero(nodes), strict=True):
                out[i, node] = self._depths.setdefault(context.sequences[i], out[i, node].copy())
        return out

    def _begin(self, tree: TokenTree, context: Context) -> PartialPass:
        """The pass over the tree so far."""
        run = self._pass.of(context, None)
        if tree.nodes == 1 or run is None:
            run = in_engine(self._layers).begin_pass(context.rows, tree)
            run.keeps_previous = self.rule is not None and self.rule.confidence == "state"
            self._pass.put(context, run)
        else:
            run.extend(tree)
        return run

    def add_probes(self, tree: TokenTree, context: Context) -> TokenTree:
        """Leave out the logits of nodes with copied keys, which do not run the last layers."""
        run = self._pass.of(context, None)
        if run is None or self.missing_keys == "recompute" or run.tree.nodes > tree.nodes:
            return tree
        filled = np.zeros(tree.token.shape, bool)
        for i, row in enumerate(context.rows):
            if row in run.rows:  # Requests that may not draft are not in the pass.
                filled[i, : run.tree.nodes] = run.filled[run.rows.index(row)]
        return replace(tree, unscored=filled if tree.unscored is None else filled | tree.unscored)

    def observe(self, step: StepResult) -> None:
        """Keep what the exit's blocks and the threshold learn from."""
        if self._blocks is not None:
            self._blocks.observe(step)
        if self.adaptive is not None:
            self.adaptive.observe(step)

    def release(self, row: int) -> None:
        """Forget a row whose request has ended."""
        if self._blocks is not None:
            self._blocks.release(row)

    def rewind(self, row: int, length: int) -> int:
        """As `Drafter.rewind`: the exit's blocks keep what they know of the shared tokens."""
        if self._blocks is None:
            return super().rewind(row, length)
        return self._blocks.keep(row, length)

    def copy_row(self, source: int, target: int, length: int) -> int:
        """As `Drafter.copy_row`: the cache holds the keys of the exit's blocks, too."""
        if self._blocks is None:
            return super().copy_row(source, target, length)
        return self._blocks.copy(source, target, length)


def frontier_nodes(tree: TokenTree, frontier: Frontier, context: Context) -> NodeMask:
    """The valid nodes of a frontier that may have children."""
    wanted = np.zeros(tree.token.shape, bool)
    np.put_along_axis(wanted, frontier, True, 1)
    return wanted & tree.valid & (tree.depth < context.max_depth[:, None])
