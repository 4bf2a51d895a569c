"""Readers of Hugging Face configurations, one file per family: the values of `ModelConfig` that are its own.

The values of mixtures of experts are those of `MoEConfig`, as a mapping.
"""

from collections.abc import Callable, Mapping
from typing import Any

from foretell.model.config.families.gemma4 import read_gemma4
from foretell.model.config.families.llama4 import read_llama4
from foretell.model.config.families.ministral3 import read_ministral3
from foretell.utils.validation import Fields

FAMILIES: Mapping[str, Callable[[Fields, int], dict[str, Any]]] = {
    "gemma4_text": read_gemma4,
    "gemma4_unified_text": read_gemma4,
    "llama4_text": read_llama4,
    "ministral3": read_ministral3,
}
"""By `model_type`; the arguments are the configuration and the number of layers."""
