"""The method that drafts with a masked diffusion model."""

from foretell.accept import Match
from foretell.catalogue.build_context import BuildContext, dynamic_tree
from foretell.catalogue.entry import Entry, Paper
from foretell.catalogue.options.masked_diffusion import MaskedDiffusionOptions
from foretell.catalogue.speculators import trained_speculator
from foretell.draft import MaskedDiffusionDrafter
from foretell.engine.method import AnyMethod, Method
from foretell.shape import DynamicTree
from foretell.speculator.network.masked_diffusion import MaskedDiffusion


def masked_diffusion(context: BuildContext, options: MaskedDiffusionOptions) -> AnyMethod:
    """A tree of what a block of masks is predicted to be."""
    network = trained_speculator(context, MaskedDiffusion.kind)
    assert isinstance(network, MaskedDiffusion)
    drafter = MaskedDiffusionDrafter(network.to_predictor(), options.block_length, options.denoising_steps)
    return Method(drafter, dynamic_tree(options, options.block_length), Match())


ENTRIES = (
    Entry(
        name="masked_diffusion",
        family="draft model",
        description=(
            "A masked diffusion model with the target's tokenizer predicts a block of masks behind the text in one "
            "pass, or in a few; a dynamic tree of the predictions is verified."
        ),
        when_to_use=("with a well-trained diffusion sibling that is much cheaper than the target."),
        papers=(
            Paper("Speculative Diffusion Decoding: Accelerating Language Generation through Diffusion", "2408.05636"),
        ),
        drafter=MaskedDiffusionDrafter,
        shape=DynamicTree,
        acceptor=Match,
        builder=masked_diffusion,
        reads=("speculators",),
        options=MaskedDiffusionOptions,
        speculator="masked_diffusion",
        aliases=("speculative_diffusion",),
    ),
)
