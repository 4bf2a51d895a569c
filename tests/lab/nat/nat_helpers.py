"""Small sequence-to-sequence models with random weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from foretell.lab.nat.network import Kind, NatConfig, NatModel
from foretell.lab.nat.pairs import PAD, UNKNOWN

WORDS = tuple("abcdefghij")
SOURCES = ([5, 6, 7], [8, 9], [6, 6, 10, 11, 12], [7])


def config(kind: Kind, **sizes: int) -> NatConfig:
    """A configuration of width 16."""
    values = {"hidden": 16, "heads": 2, "layers": 2, "ffn": 32, "max_source": 6, "max_target": 9, "max_fertility": 3}
    return NatConfig.model_validate({"kind": kind, "source_words": WORDS, "target_words": WORDS, **values, **sizes})


def model(kind: Kind, seed: int = 0, scale: float = 3.0) -> NatModel:
    """A model in float64 whose predictions are far from uniform."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = NatModel(config(kind)).double()
        for parameter in made.parameters():
            parameter.data *= scale
    return made.eval().requires_grad_(False)


def targets() -> tuple[torch.Tensor, torch.Tensor]:
    """Padded targets and their lengths."""
    length = torch.tensor([4, 9, 1])
    token = torch.randint(UNKNOWN + 1, UNKNOWN + 1 + len(WORDS), (3, 9), generator=torch.Generator().manual_seed(0))
    return token.masked_fill(torch.arange(9) >= length[:, None], PAD), length


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Torch's default generator from a seed, restored afterwards."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
