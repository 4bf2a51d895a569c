"""The Python interface: a model that generates with any method, and its answers."""

from foretell.api.answer import Answer
from foretell.api.model import Model, named_inputs

__all__ = ["Answer", "Model", "named_inputs"]
