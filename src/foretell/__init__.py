"""Foretell: large language models that decode faster and say the same.

A decoding method is a drafter that guesses, a shape that arranges the guesses into a token tree, and an acceptor that decides which of them stand; one batched
engine runs them all.

    import foretell

    model = foretell.load("smollm2-135m")
    answer = model.generate("Why is the sky blue?", method="sam_recycling")[0]
    print(answer.text, answer.statistics.tokens_per_pass)
"""

from importlib.metadata import version

from foretell.api import Answer, Model
from foretell.catalogue import catalogue
from foretell.config import SpeculativeConfig
from foretell.engine import Engine, Request, Statistics, Update
from foretell.load import load
from foretell.method import Method
from foretell.sampling import Sampling

__version__ = version("foretell")
__all__ = [
    "Answer",
    "Engine",
    "Method",
    "Model",
    "Request",
    "Sampling",
    "SpeculativeConfig",
    "Statistics",
    "Update",
    "__version__",
    "catalogue",
    "load",
]
