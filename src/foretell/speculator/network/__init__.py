"""Networks of trained speculators, one file per family, for training and drafting."""

from collections.abc import Mapping

from foretell.speculator.network.apar import AparAdapters, AparConfig
from foretell.speculator.network.base import Speculator, SpeculatorConfig
from foretell.speculator.network.blockwise import Blockwise, BlockwiseConfig
from foretell.speculator.network.dflash import DFlash, DFlashConfig
from foretell.speculator.network.draft_model import DraftModelConfig, DraftNetwork
from foretell.speculator.network.eagle import Eagle1, Eagle3, EagleConfig
from foretell.speculator.network.exits import Exits, ExitsConfig
from foretell.speculator.network.look_ahead import LookAheadConfig, LookAheadEmbeddings
from foretell.speculator.network.masked_diffusion import MaskedDiffusion, MaskedDiffusionConfig
from foretell.speculator.network.medusa import Medusa, MedusaConfig
from foretell.speculator.network.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from foretell.speculator.network.mtp import AssistantConfig, AssistantNetwork, MTPConfig, MTPNetwork
from foretell.speculator.network.p_eagle import PEagle, PEagleConfig
from foretell.speculator.network.pard import PardConfig, PardNetwork
from foretell.speculator.network.redrafter import ReDrafter, ReDrafterConfig
from foretell.speculator.network.uno import UnoAdapters, UnoConfig

NETWORKS: Mapping[str, tuple[type[SpeculatorConfig], type[Speculator]]] = {
    "apar": (AparConfig, AparAdapters),
    "assistant": (AssistantConfig, AssistantNetwork),
    "blockwise": (BlockwiseConfig, Blockwise),
    "dflash": (DFlashConfig, DFlash),
    "draft_model": (DraftModelConfig, DraftNetwork),
    "eagle": (EagleConfig, Eagle1),
    "eagle3": (EagleConfig, Eagle3),
    "exits": (ExitsConfig, Exits),
    "masked_diffusion": (MaskedDiffusionConfig, MaskedDiffusion),
    "medusa": (MedusaConfig, Medusa),
    "mlp_speculator": (MLPSpeculatorConfig, MLPSpeculator),
    "mtp": (MTPConfig, MTPNetwork),
    "p_eagle": (PEagleConfig, PEagle),
    "pard": (PardConfig, PardNetwork),
    "pass": (LookAheadConfig, LookAheadEmbeddings),
    "redrafter": (ReDrafterConfig, ReDrafter),
    "uno": (UnoConfig, UnoAdapters),
}
"""Configuration and network of every kind, by the `kind` in `config.json`."""
