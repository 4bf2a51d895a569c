"""Training of the decoder blocks of an exit, with its norm and map, on whole sequences of a target's states."""

from collections.abc import Sequence
from itertools import count

import torch
from jaxtyping import Bool, Float

from foretell.speculator.network.exits import Exits
from foretell.train.exits.checkpoints import Checkpoints
from foretell.train.exits.descent import Descent, OnStep, ignore_step, random_batches
from foretell.train.exits.states import LayerStates, SequenceStates
from foretell.train.objective.candidates import sample_candidates

BATCH_TOKENS = 1536
"""Tokens of a batch, those of prompts included."""
_CANDIDATES = 2048
"""Tokens of the draft vocabulary in the loss of a batch."""


def train_blocks(
    exits: Exits,
    states: SequenceStates,
    steps: int,
    rate: float,
    seed: int = 0,
    on_step: OnStep = ignore_step,
    checkpoints: Checkpoints | None = None,
) -> None:
    """Train the blocks, norm and map of the only exit on the cross-entropy with the target's distribution over the
    draft vocabulary, a sample of it per batch; `on_step` gets the step and the loss.
    """
    parameters = [p for part in (exits.blocks, exits.norms, exits.maps) for p in part.parameters()]
    device, drawn = parameters[0].device, count()
    batches = random_batches([len(x) for x in states.exit], BATCH_TOKENS, seed)

    def loss(step: int) -> Float[torch.Tensor, ""]:
        while next(drawn) < step:
            next(batches)  # of a step before the checkpoint
        return _loss(exits, *(part.to(device) for part in _batch(states, next(batches))))

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        Descent.of_blocks(steps, rate).run(parameters, loss, on_step, checkpoints)


@torch.inference_mode()
def block_outputs(exits: Exits, states: SequenceStates, num_tokens: int) -> LayerStates:
    """Outputs of the exit's blocks at the first `num_tokens` tokens that are to be learned, or some more."""
    outputs, count = list[torch.Tensor](), 0
    for x, first in zip(states.exit, states.first, strict=True):
        if count < num_tokens:
            outputs.append(exits.run_blocks(x.float()[None])[0, first:].to(torch.bfloat16))
            count += len(outputs[-1])
    final = torch.cat(states.final[: len(outputs)])
    return LayerStates((torch.cat(outputs),), final, tuple(map(len, outputs)))


def _loss(
    exits: Exits, x: Float[torch.Tensor, "b s d"], mask: Bool[torch.Tensor, "b s"], final: Float[torch.Tensor, "t d"]
) -> Float[torch.Tensor, ""]:
    with torch.no_grad():
        target = exits.compute_logits(final)
        candidates = sample_candidates(target, _CANDIDATES)
        target = (target if candidates is None else candidates.select(target)).softmax(-1)
    logits = exits.compute_logits(exits(0, exits.run_blocks(x)[mask]), candidates)
    return -(target * logits.log_softmax(-1)).sum(-1).mean()


def _batch(states: SequenceStates, chosen: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Some sequences: the states at the exit, padded at the end; which tokens are to be learned; and the last layer's
    states there.
    """
    longest = max(len(states.exit[i]) for i in chosen)
    x = torch.zeros(len(chosen), longest, states.exit[0].shape[1])
    mask = torch.zeros(len(chosen), longest, dtype=torch.bool)
    for row, i in enumerate(chosen):
        length = len(states.exit[i])
        x[row, :length], mask[row, states.first[i] : length] = states.exit[i].float(), True
    return x, mask, torch.cat([states.final[i] for i in chosen]).float()
