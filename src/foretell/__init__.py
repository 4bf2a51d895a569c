"""Foretell: large language models that decode faster and say the same.

A decoding method is a drafter that guesses, a shape that arranges the guesses into a token tree, and an acceptor that
decides which of them stand; one batched engine runs them all.

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
    from foretell.engine.engine import Completion, Engine, Request, Update
    from foretell.engine.method import Method
    from foretell.engine.statistics import RequestStatistics
    from foretell.load import load

__version__ = version("foretell")
__all__ = [
    "Answer",
    "Completion",
    "Engine",
    "Method",
    "Model",
    "Request",
    "RequestStatistics",
    "SamplingParams",
    "SpeculativeConfig",
    "Update",
    "__version__",
    "catalogue",
    "load",
]
_HOME = {
    "Answer": "api",
    "Completion": "engine.engine",
    "Engine": "engine.engine",
    "Method": "engine.method",
    "Model": "api",
    "Request": "engine.engine",
    "SamplingParams": "core.sampling",
    "SpeculativeConfig": "catalogue.config",
    "RequestStatistics": "engine.statistics",
    "Update": "engine.engine",
    "catalogue": "catalogue",
    "load": "load",
}


class _Package(ModuleType):
    """Imports a public name when it is first used: torch takes seconds, and `foretell --help` does not need it.

    `load` and `catalogue` are functions as well as the modules they live in; importing such a module must not hide its
    function.
    """

    def __getattr__(self, name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value: object = vars(import_module(f"{__name__}.{_HOME[name]}"))[name]
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
