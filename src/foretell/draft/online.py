"""A draft model that keeps learning while it serves: from every token that the target had to supply itself."""

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.core.context import Context, ModelOutput, StepResult, TokenBuffer
from foretell.core.tree import TokenTree
from foretell.distributions.divergence import Divergence, coarse, forward_kl
from foretell.draft.base import Predictor
from foretell.draft.draft_model import DraftModel
from foretell.speculator.network.draft_model import DraftNetwork


@dataclass(frozen=True)
class Correction:
    """The target's distribution of one token that no draft supplied, in the numbers of the drafted tokens."""

    position: int
    """Of that token in its text: everything before it is the context."""
    top_tokens: Int[np.ndarray, " k"]
    """The target's best drafted tokens, best first."""
    log_p: Float[np.ndarray, " k1"]
    """Their log-probabilities among the drafted tokens, and at the end that of all others together."""
    weight: float
    """The target's mass on drafted tokens: what there is to win here."""


@dataclass(frozen=True)
class ReplayExample:
    """A request that is over: its text up to the last correction, and all its corrections."""

    tokens: Int[np.ndarray, " t"]
    corrections: tuple[Correction, ...]


class ReplayBuffer:
    """The last corrections, at most `most` of them; whole lessons leave first in, first out."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a buffer of corrections holds at least one, found {capacity}")
        self._most = capacity
        self._kept = deque[ReplayExample]()
        self._fresh = 0

    def __len__(self) -> int:
        """Corrections kept."""
        return sum(len(example.corrections) for example in self._kept)

    def add(self, example: ReplayExample) -> None:
        """Keep a lesson, of a very long one the end."""
        last = example.corrections[-self._most :]
        if not last:
            return
        self._kept.append(ReplayExample(example.tokens, last))
        self._fresh += 1
        while len(self) > self._most:
            self._kept.popleft()

    def sample(self, chance: random.Random) -> list[ReplayExample]:
        """The lessons since the last call, and as many older ones drawn at random, against forgetting."""
        new = min(self._fresh, len(self._kept))
        older = list(self._kept)[: len(self._kept) - new]
        self._fresh = 0
        return list(self._kept)[len(older) :] + chance.sample(older, min(new, len(older)))


@dataclass
class _Row:
    """A request that runs: its text, which grows in place, and its corrections so far."""

    text: TokenBuffer
    corrections: list[Correction] = field(default_factory=list)


class OnlineDrafter(Predictor):
    """Distils the target into its draft model on the positions that it failed at (Liu et al., arXiv 2310.07177).

    Every pass ends with one token that the target supplied; its distribution is kept (the `best` most probable tokens
    and the mass of the rest). After every `interval` requests (0: never) one step is made on the lessons since the last
    one and as many older ones, after the next pass; the new weights are packed, and the draft's cache starts anew,
    because keys of old weights belong to another model. After full acceptance the token that the target adds counts as
    a correction too, as it does in the published code. `longest`: tokens of context that a step reads.
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
        self._divergence, self._best, self._longest = divergence, top_k, max_tokens
        self._optimizer = torch.optim.AdamW(network.parameters(), learning_rate, weight_decay=0.0)
        self._chance = random.Random(0)
        self._rows: dict[int, _Row] = {}
        self._requests = self.updates = 0
        """Requests that have ended since the last update, and updates so far."""
        self.training_seconds = 0.0
        """Spent on learning so far, packing included."""
        self._model = DraftModel(network.to_runner())
        self.max_context = self._model.max_context

    def expand(
        self, tree: TokenTree, frontier: Int[np.ndarray, "b f"], context: Context
    ) -> tuple[Float[torch.Tensor, "k v"], Int[np.ndarray, "b n"]]:
        """Scores of the draft model as it is now."""
        return self._model.expand(tree, frontier, context)

    def observe(self, step: StepResult) -> None:
        """Note the distribution of the last token of every text that got one, and learn if enough requests are over."""
        self._model.observe(step)
        for i, row in enumerate(step.context.rows):
            text, count = step.context.sequences[i], len(step.new_tokens[i])
            if count:
                # A limit or an end of sequence may cut a path short: then the last token that counts was drafted, and
                # is noted all the same.
                node = step.paths[i][int(step.tree.prefix_length[i]) - 1 :][count - 1]
                mine = self._rows.setdefault(row, _Row(text))
                mine.corrections.append(self._correction(text.length - 1, step.output, i, node))
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
        likely = logits.topk(min(self._best, len(logits))).indices
        return Correction(position, likely.cpu().numpy(), coarse(logits, likely).cpu().numpy(), weight)

    def release(self, row: int) -> None:
        """A request is over: keep what it taught."""
        self._model.release(row)
        self._close(row)

    def rewind(self, row: int, length: int) -> int:
        """Keep what was read of the common tokens."""
        self._close(row)
        return self._model.rewind(row, length)

    def _close(self, row: int) -> None:
        mine = self._rows.pop(row, None)
        if mine is not None:
            last = mine.corrections[-1].position
            self.replay.add(ReplayExample(mine.text.tokens[:last].copy(), tuple(mine.corrections)))
            self._requests += 1

    def learn(self) -> None:
        """One step of the optimizer, then the new weights draft."""
        started = time.perf_counter()
        examples = self.replay.sample(self._chance)
        if not examples:
            return
        with torch.inference_mode(False), torch.enable_grad():
            self._optimizer.zero_grad(set_to_none=True)
            loss = distillation_loss(self.network, examples, self._divergence, self._longest)
            loss.backward()
            if all(p.grad is None or bool(p.grad.isfinite().all()) for p in self.network.parameters()):
                self._optimizer.step()
            self._model = DraftModel(self.network.to_runner())
        self.updates += 1
        self.training_seconds += time.perf_counter() - started


def distillation_loss(
    network: DraftNetwork, examples: Sequence[ReplayExample], divergence: Divergence, longest: int
) -> Float[torch.Tensor, ""]:
    """The mean divergence over all corrections of some lessons, of which the last `longest` tokens are read.

    The state before a token scores it: the correction at position `j` is compared with what the draft says at `j - 1`.
    """
    starts = [max(0, len(example.tokens) - longest) for example in examples]
    device, wide = network.get_buffer("_embedding").device, max(min(len(x.tokens), longest) for x in examples)
    token, where = (
        torch.zeros(len(examples), wide, dtype=torch.int64),
        torch.zeros(len(examples), wide, dtype=torch.bool),
    )
    used = list[Correction]()
    for i, (example, start) in enumerate(zip(examples, starts, strict=True)):
        part = example.tokens[start:]
        token[i, : len(part)] = torch.from_numpy(part)
        for c in example.corrections:
            if c.position > start:
                where[i, c.position - 1 - start] = True
                used.append(c)
    draft = network.compute_logits(network(token.to(device), where.to(device)))
    likely = torch.from_numpy(np.stack([c.top_tokens for c in used])).to(device)
    log_p = torch.from_numpy(np.stack([c.log_p for c in used])).to(device)
    weight = torch.tensor([c.weight for c in used], device=device)
    return (divergence(log_p, coarse(draft, likely)) * weight).sum() / weight.sum().clamp_min(1e-9)


def _trainable(network: DraftNetwork) -> DraftNetwork:
    """With weights wide enough for small steps to add up; the target's ends stay as they are."""
    for parameter in network.parameters():
        if parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    return network.requires_grad_(True)
