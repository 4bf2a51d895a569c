"""What a format of checkpoints is: how it is recognised, and how its names become ours."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from foretell.draft.network.base import SpeculatorConfig, TargetCard
from foretell.model.ends import Ends
from foretell.speculator.formats.files import Published


@dataclass(frozen=True)
class Reading:
    """A published checkpoint in our words."""

    config: SpeculatorConfig
    tensors: Mapping[str, torch.Tensor]
    """What `state_dict` of the network of this kind holds."""


@dataclass(frozen=True)
class Format:
    """A line of the table of formats."""

    name: str
    fits: Callable[[Published], bool]
    """Whether a checkpoint is in this format, by its configuration and, where that does not tell, by the names of its tensors."""
    read: Callable[[Published, TargetCard, Ends], Reading]


def card(found: Published, target: TargetCard, hidden: int, vocab: int, name: str = "") -> TargetCard:
    """Which target a checkpoint says it is for; what it does not say is taken to fit.

    Raises:
        ValueError: its sizes are not those of the target.
    """
    said = name or str(found.config.get("base_model_name_or_path") or found.folder.name)
    if (hidden, vocab) != (target.hidden, target.vocab):
        raise ValueError(
            f"{found.folder}: this speculator was trained for another model ({said}: width {hidden}, {vocab} tokens); "
            f"the target has width {target.hidden} and {target.vocab} tokens"
        )
    return target.model_copy(update={"name": said, "fingerprint": ""})


def ascending(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of a reduced vocabulary in ascending order, and the order that sorts the rows of its output matrices."""
    order = torch.argsort(tokens)
    return tokens[order].long(), order
