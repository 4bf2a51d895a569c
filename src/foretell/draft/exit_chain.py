"""Chains of the target's first layers and the head of one exit, in one call of the CPU kernels."""

from dataclasses import dataclass

import numpy as np
import torch

from foretell.core.context import Context
from foretell.core.tree import TokenTree, root_tree, tree_from_scores
from foretell.distributions.coupling import kernel_noise
from foretell.draft.exit_blocks import ExitBlocks
from foretell.draft.exit_heads import ChainDecoder, ExitHeads
from foretell.model.kernels import DynamicTrees, NodeLimits
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.partial_pass import PartialPass
from foretell.model.run.runner import Runner, RunsLayers, offered


@dataclass(frozen=True)
class GrownChains:
    """Chains, the kernel's report on them, and the pass that goes on from where their nodes stopped, which is that of
    the roots alone if the exit has blocks.
    """

    tree: TokenTree
    trees: DynamicTrees
    partial: PartialPass


class ExitChain:
    """Grows chains in the target's cache, for an exit after `layer` layers, and after `blocks` if it has some."""

    def __init__(self, decoder: ChainDecoder, layer: int, runner: RunsLayers, blocks: ExitBlocks | None = None) -> None:
        self._decoder, self._layer, self._runner, self._blocks = decoder, layer, runner, blocks

    @staticmethod
    def of(heads: ExitHeads, runner: Runner, blocks: ExitBlocks | None = None) -> "ExitChain | None":
        """None: there are several exits, or the kernels cannot run them."""
        target = offered(runner, DecoderRunner)
        if len(heads.layers) != 1 or target is None:
            return None
        decoder = heads.chain_decoder(0, target.network if blocks is None else blocks.network)
        return None if decoder is None else ExitChain(decoder, heads.layers[0], target, blocks)

    def grow(self, context: Context, length: int, limits: NodeLimits, refused: float | None) -> GrownChains:
        """Chains for requests that may all draft; `refused`: nodes of at most this confidence are not in the tree."""
        roots = root_tree(context.last_tokens)
        run = self._runner.begin_pass(context.rows, roots)
        states = run.advance(np.ones(roots.token.shape, bool), self._layer).states
        if self._blocks is not None:
            states = self._blocks.read_roots(context, range(len(context.rows)), states)
        run.reserve(length)
        rows, noise = np.array(context.rows), kernel_noise(context, length)
        trees = DynamicTrees(
            np.minimum(context.max_depth, length),
            (length, 1, length),
            bounds=(0.0, 0.0),
            row=rows,
            length=run.length + 1,
            noise=noise,
            limits=limits,
            hidden=states.shape[1],
        )
        self._decoder.network.grow_dynamic_trees(states, trees, run.cache, self._decoder.token_of)
        count = trees.count
        if refused is not None:
            # A chain goes on after confident nodes only, so that the refused ones are the last ones.
            drafted = np.arange(1, trees.token.shape[1]) <= count[:, None]
            count = np.count_nonzero(drafted & (trees.confidence[:, 1:] > refused), axis=1)
        which = range(len(context.rows))
        tree = tree_from_scores(context.last_tokens, which, trees.token, trees.parent, trees.score, count)
        run.extend(tree)
        if self._blocks is not None:
            return GrownChains(tree, trees, run)
        place = trees.output_row[:, : tree.nodes]
        run.record(place >= 0, self._layer, trees.outputs[torch.from_numpy(place[place >= 0])])
        return GrownChains(tree, trees, run)
