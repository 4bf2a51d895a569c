"""Log-probabilities of tokens under the model's softmax, before any sampling parameter, with the likeliest tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foretell.core.context import StepResult
from foretell.model.run.topk import top_k
from foretell.utils.transfer import to_device, to_host

TopLogprobs = tuple[tuple[int, float], ...]
"""The most probable tokens of a position with their log-probabilities, best first."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of the probabilities of some tokens, and the most probable tokens in their places."""

    logprobs: tuple[float, ...] = ()
    top: tuple[TopLogprobs, ...] = ()
    """Empty where no alternatives were asked for."""

    def __add__(self, other: "TokenLogprobs") -> "TokenLogprobs":
        return TokenLogprobs(self.logprobs + other.logprobs, self.top + other.top)


def new_token_logprobs(
    step: StepResult, i: int, count: int, alternatives: int, wanted: Sequence[int] = ()
) -> TokenLogprobs:
    """Of the first `count` new tokens of request `i`; `wanted`: tokens that are reported in place of alternatives."""
    nodes = step.paths[i][int(step.tree.prefix_length[i]) - 1 :][:count]
    return _node_logprobs(step, i, nodes, step.new_tokens[i][:count], alternatives, wanted)


def prompt_token_logprobs(step: StepResult, i: int, alternatives: int) -> TokenLogprobs:
    """Of the tokens of the prompt of request `i` that follow those which this step read."""
    sequence, start = step.context.sequences[i], step.start_positions[i]
    following = sequence.tokens[start + 1 : min(sequence.prompt_length, start + int(step.tree.prefix_length[i]) + 1)]
    return _node_logprobs(step, i, range(len(following)), following.tolist(), alternatives)


def _node_logprobs(
    step: StepResult,
    i: int,
    nodes: Sequence[int],
    tokens: Sequence[int],
    alternatives: int,
    wanted: Sequence[int] = (),
) -> TokenLogprobs:
    """Of these tokens, each after its node."""
    if not tokens:
        return TokenLogprobs()
    logits, device = step.output.logits, step.output.logits.device
    scores = torch.log_softmax(logits[to_device(step.output.logit_index[i, list(nodes)], device)], -1)
    results = [scores.gather(1, to_device(torch.tensor(tokens), device)[:, None])[:, 0]]
    if wanted:
        asked = to_device(torch.tensor(wanted), device)
        values, order = scores[:, asked].sort(stable=True, dim=-1, descending=True)
        results += values, asked[order]
    elif alternatives:
        results += top_k(scores, min(alternatives, scores.shape[1]))
    chosen, *top = (part.tolist() for part in to_host(results))
    pairs = zip(*top, strict=True) if top else ()
    return TokenLogprobs(tuple(chosen), tuple(tuple(zip(ids, values, strict=True)) for values, ids in pairs))
