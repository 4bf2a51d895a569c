"""Options of drafting with a masked diffusion model."""

from typing import Annotated

from foretell.catalogue.options.fields import TreeNodes, option
from foretell.catalogue.options.shared import BeamOptions


class MaskedDiffusionOptions(BeamOptions):
    """A dynamic tree of the most probable tokens of a block of masks."""

    num_draft_tokens: TreeNodes = 8
    block_length: Annotated[int, option("Masked tokens that are predicted together.", ge=1, le=256)] = 6
    denoising_steps: Annotated[
        int, option("Passes of the drafter; before each one the surest tokens are revealed.", ge=1, le=64)
    ] = 1
