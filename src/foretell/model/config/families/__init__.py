"""Readers of Hugging Face configurations, one file per family: the values of `ModelConfig` that are its own.

The values of mixtures of experts are those of `MoEConfig`, as a mapping.
"""

from collections.abc import Callable, Mapping
from typing import Any

from foretell.model.config.families.base import LLAMA, Family
from foretell.model.config.families.gemma4 import GEMMA4, read_gemma4
from foretell.model.config.families.gpt_oss import GPT_OSS
from foretell.model.config.families.granite import GRANITE_MOE
from foretell.model.config.families.lfm2 import LFM2
from foretell.model.config.families.llama4 import LLAMA4, read_llama4
from foretell.model.config.families.ministral3 import read_ministral3
from foretell.model.config.families.mixtral import MIXTRAL
from foretell.model.config.families.nemotron import NEMOTRON
from foretell.model.config.families.qwen import QWEN3_NEXT, QWEN_MOE
from foretell.utils.validation import Fields

FAMILIES: Mapping[str, Callable[[Fields, int], dict[str, Any]]] = {
    "gemma4_text": read_gemma4,
    "gemma4_unified_text": read_gemma4,
    "llama4_text": read_llama4,
    "ministral3": read_ministral3,
}
"""By `model_type`; the arguments are the configuration and the number of layers."""

_OF: Mapping[str, Family] = {
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "gpt_oss": GPT_OSS,
    "granitemoe": GRANITE_MOE,
    "granitemoeshared": GRANITE_MOE,
    "granitemoehybrid": GRANITE_MOE,
    "lfm2": LFM2,
    "llama4_text": LLAMA4,
    "mixtral": MIXTRAL,
    "nemotron_h": NEMOTRON,
    "qwen2_moe": QWEN_MOE,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_moe_text": QWEN_MOE,
}


def family_of(architecture: str) -> Family:
    """The family of an architecture; Llama's where it has none of its own."""
    return _OF.get(architecture, LLAMA)
