"""Networks of trained speculators, one file each: the same code drafts and is trained."""

from collections.abc import Mapping

from foretell.draft.network.base import Speculator, SpeculatorConfig
from foretell.draft.network.blockwise import Blockwise, BlockwiseConfig
from foretell.draft.network.draft_model import DraftModelConfig, DraftNetwork
from foretell.draft.network.eagle import Eagle1, Eagle3, EagleConfig
from foretell.draft.network.look_ahead import LookAheadConfig, LookAheadEmbeddings
from foretell.draft.network.medusa import Medusa, MedusaConfig
from foretell.draft.network.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig

NETWORKS: Mapping[str, tuple[type[SpeculatorConfig], type[Speculator]]] = {
    "blockwise": (BlockwiseConfig, Blockwise),
    "draft_model": (DraftModelConfig, DraftNetwork),
    "eagle": (EagleConfig, Eagle1),
    "eagle3": (EagleConfig, Eagle3),
    "medusa": (MedusaConfig, Medusa),
    "mlp_speculator": (MLPSpeculatorConfig, MLPSpeculator),
    "pass": (LookAheadConfig, LookAheadEmbeddings),
}
"""Configuration and network of every kind, by the name that checkpoints carry."""
