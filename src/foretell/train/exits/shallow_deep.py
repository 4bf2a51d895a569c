"""How the first layers of a model learn from its deeper ones: FREE (arXiv 2310.05424)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float


def aligned_distance(states: Sequence[Float[torch.Tensor, "*t d"]], shallow: int) -> Float[torch.Tensor, ""]:
    """The mean squared distance of the outputs of the first `shallow` layers to those of the layers that they are
    aligned with, which get no gradient. `states`: after each layer.
    """
    teachers = torch.stack([states[layer - 1].detach() for layer in teacher_layers(shallow, len(states))]).float()
    students = torch.stack(list(states[:shallow])).float()
    errors = torch.stack([(teacher - students).square().flatten(1).mean(1) for teacher in teachers])
    return torch.stack([errors[t, s] for t, s in align_layers(errors.detach())]).mean()


def teacher_layers(shallow: int, layers: int) -> list[int]:
    """The layers whose outputs the shallow ones learn from, counted from 1: as many as these, in equal distances."""
    return [round(i * layers / shallow) for i in range(1, shallow + 1)]


def align_layers(errors: Float[torch.Tensor, "t s"]) -> list[tuple[int, int]]:
    """Pairs of a teacher and a student, counted from 0: from the last teacher on, the student of the smallest error
    among those before the last one that was taken; teachers that no student is left for have none.
    """
    pairs, free = list[tuple[int, int]](), errors.shape[1]
    for teacher in reversed(range(len(errors))):
        if free == 0:
            break
        free = int(errors[teacher, :free].argmin())
        pairs.append((teacher, free))
    return pairs[::-1]
