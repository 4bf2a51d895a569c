"""Foretell: speculative decoding for open-weight language models.

A decoding method is a drafter that proposes tokens, a shape that arranges them in a token tree, and an acceptor that
accepts or rejects them after one forward pass of the target. One batched engine runs every method. Lossless methods
keep the target's distribution exactly.

    import foretell

    model = foretell.load("smollm2-135m")
    answer = model.generate("Why is the sky blue?", method="sam_recycling")[0]
    print(answer.text, answer.statistics.tokens_per_pass)
"""

import sys
from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foretell.api import Answer, Model
    from foretell.catalogue import catalogue
    from foretell.catalogue.config import SpeculativeConfig
    from foretell.core.sampling import SamplingParams
    from foretell.engine.engine import Engine
    from foretell.engine.method import Method
    from foretell.engine.request import Completion, Output, Request, Update
    from foretell.engine.statistics import RequestStatistics
    from foretell.load import load
    from foretell.plan import SkeletonPlan
    from foretell.structured.outputs import StructuredOutputs

__version__ = version("foretell")
__all__ = [
    "Answer",
    "Completion",
    "Engine",
    "Method",
    "Model",
    "Output",
    "Request",
    "RequestStatistics",
    "SamplingParams",
    "SkeletonPlan",
    "SpeculativeConfig",
    "StructuredOutputs",
    "Update",
    "__version__",
    "catalogue",
    "load",
]
_MODULES = {
    "Answer": "api",
    "Completion": "engine.request",
    "Engine": "engine.engine",
    "Method": "engine.method",
    "Model": "api",
    "Output": "engine.request",
    "Request": "engine.request",
    "RequestStatistics": "engine.statistics",
    "SamplingParams": "core.sampling",
    "SkeletonPlan": "plan",
    "SpeculativeConfig": "catalogue.config",
    "StructuredOutputs": "structured.outputs",
    "Update": "engine.request",
    "catalogue": "catalogue",
    "load": "load",
}
"""The module of every public name, relative to the package."""


class _LazyPackage(ModuleType):
    """Imports a public name when it is first used: torch takes seconds to import, and `foretell --help` does not need
    it.

    `load` and `catalogue` are functions and modules. Importing such a module must not replace the function.
    """

    def __getattr__(self, name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value: object = vars(import_module(f"{__name__}.{_MODULES[name]}"))[name]
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _MODULES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_MODULES})


sys.modules[__name__].__class__ = _LazyPackage
