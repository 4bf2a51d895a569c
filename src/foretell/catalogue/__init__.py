"""The catalogue of methods: one module per family builds and describes them, `registry.py` lists them."""

from foretell.catalogue.build_context import BuildContext
from foretell.catalogue.entry import Entry, Paper
from foretell.catalogue.options.base import MethodOptions
from foretell.catalogue.registry import BUILT_IN, DEFAULT_METHOD, build, catalogue, find, installed_methods

__all__ = [
    "BUILT_IN",
    "DEFAULT_METHOD",
    "BuildContext",
    "Entry",
    "MethodOptions",
    "Paper",
    "build",
    "catalogue",
    "find",
    "installed_methods",
]
