"""Recipes, one file per kind of speculator."""

from collections.abc import Mapping

from foretell.train.recipe.apar import AparRecipe
from foretell.train.recipe.base import Recipe
from foretell.train.recipe.blockwise import BlockwiseRecipe
from foretell.train.recipe.dflash import DFlashRecipe
from foretell.train.recipe.draft_model import DraftModelRecipe
from foretell.train.recipe.eagle import Eagle1Recipe, Eagle3Recipe
from foretell.train.recipe.look_ahead import LookAheadRecipe
from foretell.train.recipe.masked_diffusion import MaskedDiffusionRecipe
from foretell.train.recipe.medusa import MedusaRecipe
from foretell.train.recipe.mlp_speculator import MLPSpeculatorRecipe, ReDrafterRecipe
from foretell.train.recipe.mtp import AssistantRecipe, MTPRecipe
from foretell.train.recipe.p_eagle import PEagleRecipe
from foretell.train.recipe.pard import PardRecipe
from foretell.train.recipe.uno import UnoRecipe

RECIPES: Mapping[str, type[Recipe]] = {
    "apar": AparRecipe,
    "assistant": AssistantRecipe,
    "blockwise": BlockwiseRecipe,
    "dflash": DFlashRecipe,
    "draft_model": DraftModelRecipe,
    "eagle": Eagle1Recipe,
    "eagle3": Eagle3Recipe,
    "masked_diffusion": MaskedDiffusionRecipe,
    "medusa": MedusaRecipe,
    "mlp_speculator": MLPSpeculatorRecipe,
    "mtp": MTPRecipe,
    "p_eagle": PEagleRecipe,
    "pard": PardRecipe,
    "pass": LookAheadRecipe,
    "redrafter": ReDrafterRecipe,
    "uno": UnoRecipe,
}
"""All recipes by name; `RECIPES[name].build(setup)` builds one."""
