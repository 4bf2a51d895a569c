"""Families of architectures, one file each: how their configurations are read and how their tensors are named."""

from collections.abc import Mapping

from foretell.model.config.families.base import Family, Kind
from foretell.model.config.families.cohere2 import COHERE2
from foretell.model.config.families.deepseek import DEEPSEEK, GLM
from foretell.model.config.families.ernie import ERNIE
from foretell.model.config.families.exaone4 import EXAONE4
from foretell.model.config.families.gemma import GEMMA
from foretell.model.config.families.gemma4 import GEMMA4
from foretell.model.config.families.glm4 import GLM4
from foretell.model.config.families.gpt_oss import GPT_OSS
from foretell.model.config.families.granite import GRANITE
from foretell.model.config.families.hunyuan import HUNYUAN
from foretell.model.config.families.lfm2 import LFM2
from foretell.model.config.families.llama import LLAMA, MISTRAL, SMOLLM3
from foretell.model.config.families.llama4 import LLAMA4
from foretell.model.config.families.minicpm3 import MINICPM3
from foretell.model.config.families.ministral3 import MINISTRAL3
from foretell.model.config.families.mixtral import MIXTRAL
from foretell.model.config.families.nemotron import NEMOTRON
from foretell.model.config.families.olmo import OLMO
from foretell.model.config.families.phi3 import PHI3
from foretell.model.config.families.qwen import QWEN, QWEN3_5, QWEN3_NEXT, QWEN_MOE
from foretell.model.config.families.seed_oss import SEED_OSS

FAMILIES: tuple[Family, ...] = (
    LLAMA, MISTRAL, QWEN, GEMMA, MIXTRAL, QWEN_MOE, QWEN3_NEXT, QWEN3_5, LFM2, GRANITE, NEMOTRON, SMOLLM3, GPT_OSS,
    DEEPSEEK, GLM, GEMMA4, LLAMA4, MINISTRAL3, PHI3, SEED_OSS, ERNIE, GLM4, MINICPM3,
    OLMO, EXAONE4, HUNYUAN, COHERE2,
)  # fmt: skip
"""All families."""
_BY_KIND = {kind: family for family in FAMILIES for kind in family.kinds}
KINDS: Mapping[str, Kind] = {name: kind for family in FAMILIES for name, kind in family.kinds.items()}
"""Supported values of `model_type`."""
TEXT_MODELS = {kind.text_of: name for name, kind in KINDS.items() if kind.text_of is not None}
"""The language models of multimodal values of `model_type`."""
GGUF_KINDS = {name: kind for family in FAMILIES for name, kind in family.gguf_kinds.items()}
"""`model_type` of every supported architecture of GGUF files; `llama` with experts is Mixtral."""


def family_of(architecture: str) -> Family:
    """The family of an architecture; Llama's where it has none of its own."""
    return _BY_KIND.get(architecture, LLAMA)
