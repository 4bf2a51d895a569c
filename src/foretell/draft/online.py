"""Online speculative decoding: a draft model that is distilled while it serves."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import Context, ModelOutput, StepResult, TokenBuffer
from foretell.core.tree import TokenTree
from foretell.distributions.divergence import Divergence, forward_kl, merge_tail
from foretell.draft.base import Frontier, NodeLogits, Predictor
from foretell.draft.draft_model import DraftModel
from foretell.speculator.network.draft_model import DraftNetwork


@dataclass(frozen=True)
class Correction:
    """The target's distribution of one token that it supplied itself, over the draft vocabulary."""

    position: int
    """Position of the token in its sequence."""
    top_tokens: Int[np.ndarray, " k"]
    """The target's most probable tokens, best first, as indices into the draft vocabulary."""
    log_p: Float[np.ndarray, " k1"]
    """Their log-probabilities within the draft vocabulary, and last that of all other tokens together."""
    weight: float
    """The target's probability mass on the draft vocabulary."""


@dataclass(frozen=True)
class ReplayExample:
    """A request that has ended: its tokens up to the last correction, and its corrections."""

    tokens: Int[np.ndarray, " t"]
    corrections: tuple[Correction, ...]


class ReplayBuffer:
    """At most `capacity` corrections; the oldest examples are removed first."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a buffer of corrections holds at least one, found {capacity}")
        self._capacity = capacity
        self._examples = deque[ReplayExample]()
        self._unseen = 0

    def __len__(self) -> int:
        """Corrections kept."""
        return sum(len(example.corrections) for example in self._examples)

    def add(self, example: ReplayExample) -> None:
        """Add an example; only its last `capacity` corrections are kept."""
        last = example.corrections[-self._capacity :]
        if not last:
            return
        self._examples.append(ReplayExample(example.tokens, last))
        self._unseen += 1
        while len(self) > self._capacity:
            self._examples.popleft()

    def sample(self, rng: random.Random) -> list[ReplayExample]:
        """The examples since the last call, and as many older ones at random, against forgetting."""
        new = min(self._unseen, len(self._examples))
        older = list(self._examples)[: len(self._examples) - new]
        self._unseen = 0
        return list(self._examples)[len(older) :] + rng.sample(older, min(new, len(older)))


@dataclass
class _RequestState:
    """State of a running request: its sequence, which grows in place, and its corrections so far."""

    sequence: TokenBuffer
    corrections: list[Correction] = field(default_factory=list)


class OnlineDrafter(Predictor):
    """Distils the target into its draft model on the positions where drafts were rejected (Liu et al., arXiv
    2310.07177).

    Every pass of the target supplies one token itself; its distribution is kept (the `top_k` most probable tokens and
    the mass of the rest). After every `interval` requests (0: never) one optimizer step is made on the examples since
    the last step and as many older ones; then the new weights are packed, and the draft model's cache is emptied. The
    token that the target adds after full acceptance counts as a correction too, as in the published code. `max_tokens`:
    tokens of context per example.
    """

    label = "draft model that learns from every correction"
    learns = True

    def __init__(
        self,
        network: DraftNetwork,
        interval: int = 8,
        buffer: int = 2048,
        learning_rate: float = 1e-4,
        divergence: Divergence = forward_kl,
        top_k: int = 64,
        max_tokens: int = 512,
    ) -> None:
        self.network = _trainable(network)
        self.interval, self.replay = interval, ReplayBuffer(buffer)
        self._divergence, self._top_k, self._max_tokens = divergence, top_k, max_tokens
        self._optimizer = torch.optim.AdamW(network.parameters(), learning_rate, weight_decay=0.0)
        self._rng = random.Random(0)
        self._rows: dict[int, _RequestState] = {}
        self._requests = self.updates = 0
        """Requests since the last update, and updates so far."""
        self._model = DraftModel(network.to_runner())
        self.max_context = self._model.max_context

    def expand(self, tree: TokenTree, frontier: Frontier, context: Context) -> NodeLogits:
        """Logits of the current draft model."""
        return self._model.expand(tree, frontier, context)

    def observe(self, step: StepResult) -> None:
        """Keep the distribution of every request's last new token, and train after `interval` requests."""
        self._model.observe(step)
        for i, row in enumerate(step.context.rows):
            sequence, count = step.context.sequences[i], len(step.new_tokens[i])
            if count:
                # A length limit or an end of sequence may cut the path; then the last new token is a drafted one.
                node = step.paths[i][int(step.tree.prefix_length[i]) - 1 :][count - 1]
                state = self._rows.setdefault(row, _RequestState(sequence))
                state.corrections.append(self._correction(sequence.length - 1, step.output, i, node))
        if self.interval and self._requests >= self.interval:
            self._requests = 0
            self.learn()

    def _correction(self, position: int, output: ModelOutput, i: int, node: int) -> Correction:
        logits, kept = output.logits[int(output.logit_index[i, node])].float(), self.network.token_of
        weight = 1.0
        if kept is not None:
            kept = kept.to(logits.device)
            weight = float(torch.softmax(logits, -1)[kept].sum())
            logits = logits[kept]
        likely = logits.topk(min(self._top_k, len(logits))).indices
        return Correction(position, likely.cpu().numpy(), merge_tail(logits, likely).cpu().numpy(), weight)

    def release(self, row: int) -> None:
        """Forget a row whose request has ended, and keep its corrections."""
        self._model.release(row)
        self._end_request(row)

    def rewind(self, row: int, length: int) -> int:
        """Keep the shared tokens."""
        self._end_request(row)
        return self._model.rewind(row, length)

    def copy_row(self, source: int, target: int, length: int) -> int:
        """Copy the tokens that the draft model has read."""
        self._end_request(target)
        return self._model.copy_row(source, target, length)

    def _end_request(self, row: int) -> None:
        state = self._rows.pop(row, None)
        if state is not None:
            last = state.corrections[-1].position
            self.replay.add(ReplayExample(state.sequence.tokens[:last].copy(), tuple(state.corrections)))
            self._requests += 1

    def learn(self) -> None:
        """Make one optimizer step, and draft with the new weights."""
        examples = self.replay.sample(self._rng)
        if not examples:
            return
        with torch.inference_mode(False), torch.enable_grad():
            self._optimizer.zero_grad(set_to_none=True)
            loss = distillation_loss(self.network, examples, self._divergence, self._max_tokens)
            loss.backward()
            if all(p.grad is None or bool(p.grad.isfinite().all()) for p in self.network.parameters()):
                self._optimizer.step()
            self.publish()
        self.updates += 1

    def publish(self) -> None:
        """Draft with the network as it is now, and an empty cache: its keys were those of other weights."""
        self._model = DraftModel(self.network.to_runner())


def distillation_loss(
    network: DraftNetwork, examples: Sequence[ReplayExample], divergence: Divergence, max_tokens: int
) -> Float[torch.Tensor, ""]:
    """The weighted mean divergence over all corrections of the examples, whose last `max_tokens` tokens are read.

    The correction at position `j` is compared with the draft model's distribution after token `j - 1`.
    """
    starts = [max(0, len(example.tokens) - max_tokens) for example in examples]
    device, wide = network.get_buffer("_embedding").device, max(min(len(x.tokens), max_tokens) for x in examples)
    token, mask = (
        torch.zeros(len(examples), wide, dtype=torch.int64),
        torch.zeros(len(examples), wide, dtype=torch.bool),
    )
    corrections = list[Correction]()
    for i, (example, start) in enumerate(zip(examples, starts, strict=True)):
        part = example.tokens[start:]
        token[i, : len(part)] = torch.from_numpy(part)
        for c in example.corrections:
            if c.position > start:
                mask[i, c.position - 1 - start] = True
                corrections.append(c)
    draft = network.compute_logits(network(token.to(device), mask.to(device)))
    likely = torch.from_numpy(np.stack([c.top_tokens for c in corrections])).to(device)
    log_p = torch.from_numpy(np.stack([c.log_p for c in corrections])).to(device)
    weight = torch.tensor([c.weight for c in corrections], device=device)
    return (divergence(log_p, merge_tail(draft, likely)) * weight).sum() / weight.sum().clamp_min(1e-9)


def _trainable(network: DraftNetwork) -> DraftNetwork:
    """The network with float32 weights, so that small updates are not rounded away; the target's are unchanged."""
    for parameter in network.parameters():
        if parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    return network.requires_grad_(True)
