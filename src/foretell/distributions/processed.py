"""Next-token distributions at the nodes of a tree after all sampling parameters, computed on demand."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import Context, StepResult
from foretell.core.draft_tests import NodeDrafts, test_drafts
from foretell.core.sampling import DEPTHS_PER_STREAM, SamplingParams, Stream, apply_penalties
from foretell.core.token_rules import TokenRules
from foretell.core.tree import TokenTree
from foretell.distributions.sampler import (
    KeptTokens,
    NoTokenError,
    draw,
    kept_tokens,
    kept_weights,
    sample,
)
from foretell.model.run.topk import argmax
from foretell.model.triton import has_triton, run
from foretell.utils.transfer import to_device, to_host

Node = tuple[int, int]
"""A row of the batch and a node of its tree."""


_NOT_SAMPLED = -2
"""In `ModelOutput.sampled`."""


class Reads(Enum):
    """What an acceptor asks of the distributions of a request."""

    TOKENS = "tokens"
    """The tokens that the target samples."""
    TESTS = "tests"
    """These, and the results of the tests of sampled drafts that `core.draft_tests` makes."""
    DISTRIBUTIONS = "distributions"
    """Distributions."""


class ProcessedDistributions:
    """Next-token distributions after the scored nodes of `tree`, under the sampling parameters of each request.

    `logits[logit_index[i, j]]` are the logits at node `j` of row `i`, from the target or from a draft model; `best`:
    the argmax of every row of them, if it is known. `rules`: which tokens may follow, per request (empty: any);
    drafters need none. `sampled`: see `ModelOutput`. Random numbers depend on the request's seed, the position that the
    node predicts, and the stream.
    """

    def __init__(
        self,
        context: Context,
        tree: TokenTree,
        logits: Float[torch.Tensor, "k v"],
        logit_index: Int[np.ndarray, "b n"],
        best: Int[np.ndarray, " k"] | None = None,
        rules: Sequence[TokenRules | None] = (),
        sampled: Int[np.ndarray, "b n"] | None = None,
    ) -> None:
        self._context, self._tree, self._logits, self._logit_index = context, tree, logits, logit_index
        self._argmax: list[int] | None = None if best is None else best.tolist()
        self._rules, self._sampled = rules, sampled
        self._samples: dict[Node, int] = {}
        self._best_processed: dict[Node, int] = {}
        """Most probable tokens after processing, as far as they are known; -1: no token may follow."""
        self._tests: dict[Node, tuple[int, int]] = {}
        self._last: tuple[tuple[int, int], Float[torch.Tensor, " v"]] | None = None
        """The node whose logits were processed last, and these."""

    def with_logits(
        self, row: int, node: int, logits_of: Callable[[int], Float[torch.Tensor, " v"] | None]
    ) -> "ProcessedDistributions | None":
        """The distribution at a node from other logits, which are given for the cache row of its request; None: there
        are none.
        """
        index = np.full(self._tree.token.shape, -1)
        index[row, node] = 0
        logits = logits_of(self._context.rows[row])
        if logits is None:
            return None
        return ProcessedDistributions(self._context, self._tree, logits[None], index, rules=self._rules)

    @property
    def tree(self) -> TokenTree:
        """The tree."""
        return self._tree

    def on_host(self, reads: Sequence[Reads | None]) -> "ProcessedDistributions":
        """The same distributions, from which the host gets what the acceptors of the requests read (None: nothing)
        without waiting for the device: it waits once, here, for all of it.
        """
        # Those whose argmax the pass computed are on the host: after a pass, asking for a device takes 30 µs.
        if self._argmax is not None or self._logits.device.type == "cpu":
            return self
        tree, rows = self._tree, [row for row, what in enumerate(reads) if what is not None]
        drafts = {row: self._sampled_drafts(row) for row in rows if reads[row] is not Reads.TOKENS}
        greedy = any(below and self.sampling_params(row).temperature == 0 for row, below in drafts.items())
        if greedy or Reads.DISTRIBUTIONS in reads:
            logits, *q = to_host([self._logits] if tree.q is None else [self._logits, tree.q])
            tree = replace(tree, q=q[0]) if q else tree
            return ProcessedDistributions(self._context, tree, logits, self._logit_index, rules=self._rules)
        self._read_tokens(rows, {(row, node): c for row, below in drafts.items() for node, c in below.items()})
        return self

    def _sampled_drafts(self, row: int) -> dict[int, list[int]]:
        """The sampled children of every scored node of a row that has any."""
        below = self._tree.children(row).items()
        sampled = {node: [c for c in children if self._tree.q_index[row, c] >= 0] for node, children in below}
        return {node: children for node, children in sampled.items() if children and self.is_known(row, node)}

    def _read_tokens(self, rows: Sequence[int], drafts: dict[Node, list[int]]) -> None:
        """Sample at all nodes where the acceptors of these rows may ask, and test these drafts below them."""
        asked = [(r, n) for r in rows for n in np.flatnonzero(self._tree.valid[r]).tolist()]
        nodes = [(r, n) for r, n in asked if n >= self._tree.root(r) and self.is_known(r, n)]
        processed = [node for node in nodes if not self._uses_raw_logits(node[0])]
        logits, results = self._logits, [argmax(self._logits)]
        place = {node: int(self._logit_index[node]) for node in nodes}
        if processed:
            changed = self._process(processed)
            best = changed.argmax(-1)
            is_possible = changed.gather(1, best[:, None])[:, 0] > -torch.inf
            results.append(torch.where(is_possible, best, -1))
            place |= {node: len(logits) + i for i, node in enumerate(processed)}
            logits = torch.cat([logits, changed])
        sampled = [node for node in nodes if self.sampling_params(node[0]).temperature > 0]
        if sampled:
            keys = [self._context.rngs[row].key(self._position(row, node)) for row, node in sampled]
            params = [self.sampling_params(row) for row, _ in sampled]
            tokens, weights = draw(logits, [place[node] for node in sampled], params, keys)
            results.append(tokens)
            if drafts:
                index = {node: i for i, node in enumerate(sampled)}
                results += self._test(weights, drafts, [index[node] for node in drafts])
        known = [part.tolist() for part in to_host(results)]
        self._argmax = known.pop(0)
        if processed:
            self._best_processed.update(zip(processed, known.pop(0), strict=True))
        if sampled:
            self._samples.update(zip(sampled, known.pop(0), strict=True))
        if drafts:
            self._tests.update(zip(drafts, zip(*known, strict=True), strict=True))

    def _test(
        self, weights: Int[torch.Tensor, "r v"], drafts: dict[Node, list[int]], place: Sequence[int]
    ) -> list[Int[torch.Tensor, " m"]]:
        """The accepted draft below every node, and the token after the node."""
        tree, device, most = self._tree, weights.device, max(map(len, drafts.values()))
        assert tree.q is not None
        draft, source = np.zeros((2, len(drafts), most), np.int32)
        uniform = np.zeros((len(drafts), most + 1))
        for i, ((row, node), children) in enumerate(drafts.items()):
            count = len(children)
            draft[i, :count] = tree.token[row, children]
            source[i, :count] = row * tree.q.shape[1] + tree.q_index[row, children]
            uniform[i, :count] = [self.uniform(row, node, Stream.ACCEPT, trial) for trial in range(count)]
            uniform[i, most] = self.uniform(row, node, Stream.RESIDUAL)
        counts = np.array([len(children) for children in drafts.values()], np.int32)
        distinct = np.array([tree.distinct[row] for row, _ in drafts])
        tensors = NodeDrafts(*(to_device(x, device) for x in (draft, source, counts, distinct, uniform)))
        q, at = to_device(tree.q, device).flatten(0, 1), to_device(np.array(place, np.int32), device)
        if not has_triton(device):
            return list(test_drafts(weights, at, q, tensors)[:2])
        from foretell.model.triton import acceptance

        return list(run(acceptance.test_drafts(weights, at, q, tensors))[:2])

    def tested(self, row: int, node: int) -> tuple[int, int] | None:
        """Which of the sampled children of a node is accepted, by its number (-1: none), and the token after the node;
        None: the tests were not made.
        """
        return self._tests.get((row, node))

    def sampling_params(self, row: int) -> SamplingParams:
        """Sampling parameters of a batch row."""
        return self._context.sampling_params[row]

    def uniform(self, row: int, node: int, stream: Stream, number: int = 0) -> float:
        """Random number `number` in [0, 1) of this stream at a node."""
        depth, position = self._draft_depth(row, node), self._position(row, node)
        return self._context.rngs[row].uniform(position, stream + number * DEPTHS_PER_STREAM + depth)

    def sample(self, row: int, node: int) -> int:
        """The token that plain decoding samples after this node: it depends on seed and position, not on the drafts.

        Raises:
            NoTokenError: no token may follow.
        """
        if self.sampling_params(row).temperature == 0:
            return self.argmax(row, node)
        if self._sampled is not None and (token := int(self._sampled[row, node])) > _NOT_SAMPLED:
            if token < 0:
                raise NoTokenError
            return token
        if (row, node) not in self._samples:
            if self._uses_raw_logits(row):
                nodes = self._raw_roots() if node == self._tree.root(row) else [(row, node)]
                self._sample_from_rows(nodes, self._logits, [int(self._logit_index[n]) for n in nodes])
            else:
                self._sample_from_rows([(row, node)], self._processed(row, node)[None], [0])
        if self._samples[row, node] < 0:
            raise NoTokenError
        return self._samples[row, node]

    def _raw_roots(self) -> list[tuple[int, int]]:
        """The scored roots of all requests that sample from the logits as they are, which one call does."""
        roots = [(row, self._tree.root(row)) for row in range(self._tree.rows)]
        return [
            (row, node)
            for row, node in roots
            if self.sampling_params(row).temperature > 0 and self.is_known(row, node) and self._uses_raw_logits(row)
        ]

    def _uses_raw_logits(self, row: int) -> bool:
        return self.sampling_params(row).uses_raw_logits and not (self._rules and self._rules[row] is not None)

    def _sample_from_rows(
        self, nodes: Sequence[tuple[int, int]], logits: Float[torch.Tensor, "k v"], rows: Sequence[int]
    ) -> None:
        keys = [self._context.rngs[row].key(self._position(row, node)) for row, node in nodes]
        tokens = sample(logits, rows, [self.sampling_params(row) for row, _ in nodes], keys)
        self._samples.update(zip(nodes, tokens, strict=True))

    def is_known(self, row: int, node: int) -> bool:
        """Whether there are logits after this node."""
        return bool(self._logit_index[row, node] >= 0)

    def goes_on(self, row: int, node: int) -> bool:
        """Whether a token may follow this node: not below the root where the answer is over, by an ending token or a
        complete constraint, nor where the rules forbid every token. Acceptors ask for no token there: a draft at which
        it ends is the last token of their result.
        """
        rules = self._rules[row] if self._rules else None
        if rules is None or node == self._tree.root(row):
            return True
        sequence, drafted = self._context.sequences[row], self._drafted(row, node).tolist()
        if rules.ends(sequence.generated, drafted):
            return False
        if not self.is_known(row, node):
            return True
        if self.sampling_params(row).uses_raw_logits and self._allows(row, node, self._best(row, node)):
            return True
        if (row, node) in self._best_processed:
            return self._best_processed[row, node] >= 0
        return bool((self._processed(row, node) > -torch.inf).any())

    def log_ratio(self, row: int, node: int, first: int, second: int) -> float:
        """The log of the ratio of two tokens' probabilities after this node, before the temperature."""
        logits = self._processed(row, node)
        return float(logits[first].double() - logits[second].double())

    def argmax(self, row: int, node: int) -> int:
        """The most probable token after this node.

        Raises:
            NoTokenError: no token may follow.
        """
        if self.sampling_params(row).uses_raw_logits:
            best = self._best(row, node)
            if self._allows(row, node, best):  # Then it is the best of the allowed tokens, too.
                return best
        if (row, node) not in self._best_processed:
            processed = self._processed(row, node)
            best = int(processed.argmax())
            self._best_processed[row, node] = -1 if processed[best] == -torch.inf else best
        if self._best_processed[row, node] < 0:
            raise NoTokenError
        return self._best_processed[row, node]

    def _best(self, row: int, node: int) -> int:
        """The token with the largest logit after this node."""
        if self._argmax is None:
            self._argmax = argmax(self._logits).tolist()
        return self._argmax[int(self._logit_index[row, node])]

    def _allows(self, row: int, node: int, token: int) -> bool:
        """Whether the rules of the request allow a token after this node; quicker than the mask of all tokens."""
        rules = self._rules[row] if self._rules else None
        if rules is None:
            return True
        return rules.allows(self._context.sequences[row].generated, self._drafted(row, node).tolist(), token)

    def _drafted(self, row: int, node: int) -> Int[np.ndarray, " d"]:
        """The drafts on the path to a node."""
        return self._tree.token[row, self._tree.ancestors(row, node)[int(self._tree.prefix_length[row]) :]]

    def probabilities(self, row: int, node: int) -> Float[torch.Tensor, " v"]:
        """The distribution after this node, float64; one-hot at temperature 0.

        Raises:
            NoTokenError: no token may follow.
        """
        sampling = self.sampling_params(row)
        if sampling.temperature == 0:
            one_hot = torch.zeros(self._logits.shape[-1], dtype=torch.float64, device=self._logits.device)
            one_hot[self.argmax(row, node)] = 1
            return one_hot
        if self._logits.device.type != "cpu":
            weights = kept_weights(self._processed(row, node)[None], [sampling])[0]
            return weights / weights.sum().double()
        kept = self.kept_tokens(row, node)
        p = torch.zeros(self._logits.shape[-1], dtype=torch.float64)
        p[torch.from_numpy(kept.token.astype(np.int64))] = torch.from_numpy(kept.probability)
        return p

    def kept_tokens(self, row: int, node: int) -> KeptTokens:
        """The tokens that may follow this node and their weights, at a temperature above 0."""
        return kept_tokens(self._processed(row, node), self.sampling_params(row))

    def softmax_at(self, row: int, node: int) -> Float[torch.Tensor, " v"]:
        """As `probabilities`, but the softmax of the processed logits at temperature 0."""
        if self.sampling_params(row).temperature > 0:
            return self.probabilities(row, node)
        return torch.softmax(self._processed(row, node).double(), -1)

    def confidence(self, row: int, node: int) -> Float[torch.Tensor, " v"]:
        """The model's softmax after this node, before any sampling parameter: what shapes rank and stop by."""
        return torch.softmax(self._logits[self._logit_index[row, node]], -1)

    def _processed(self, row: int, node: int) -> Float[torch.Tensor, " v"]:
        if self._uses_raw_logits(row):
            return self._logits[self._logit_index[row, node]]
        if self._last is None or self._last[0] != (row, node):
            self._last = (row, node), self._process([(row, node)])[0]
        return self._last[1]

    def _process(self, nodes: Sequence[Node]) -> Float[torch.Tensor, "k v"]:
        """Logits at these nodes with penalties, bias and rules."""
        index = np.array([self._logit_index[node] for node in nodes])
        logits = self._logits[to_device(index, self._logits.device)]
        sequences, drafted = (
            [self._context.sequences[row] for row, _ in nodes],
            [self._drafted(*node) for node in nodes],
        )
        params = [self.sampling_params(row) for row, _ in nodes]
        if not all(s.uses_raw_logits for s in params):
            histories = [np.concatenate([s.tokens, d]) for s, d in zip(sequences, drafted, strict=True)]
            logits = apply_penalties(logits, histories, [s.prompt_length for s in sequences], params)
        masks = np.ones(logits.shape, bool)
        is_restricted = False
        for i, (row, _) in enumerate(nodes):
            rules = self._rules[row] if self._rules else None
            path = drafted[i].tolist()
            allowed = None if rules is None else rules.allowed(sequences[i].generated, path, logits.shape[1])
            if allowed is not None:
                masks[i], is_restricted = allowed, True
        if not is_restricted:
            return logits
        return torch.where(to_device(masks, logits.device), logits, -torch.inf)

    def _position(self, row: int, node: int) -> int:
        """Position in the sequence of the token that the node predicts."""
        return self._context.sequences[row].length + self._draft_depth(row, node)

    def _draft_depth(self, row: int, node: int) -> int:
        """Depth below the root of the token that the node predicts, less 1: 0 for the root."""
        return int(self._tree.depth[row, node] - self._tree.prefix_length[row]) + 1


def target_distributions(step: StepResult) -> ProcessedDistributions:
    """The target's distributions at the nodes of a finished step, with the sequences as they were before it."""
    pairs = zip(step.context.sequences, step.new_tokens, strict=True)
    sequences = tuple(sequence.prefix(sequence.length - len(new)) for sequence, new in pairs)
    return ProcessedDistributions(
        replace(step.context, sequences=sequences),
        step.tree,
        step.output.logits,
        step.output.logit_index,
        rules=step.context.rules,
    )
