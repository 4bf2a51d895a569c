"""The catalogue of methods: `table.py` lists them, the other files build them."""

from foretell.catalogue.parts import Parts
from foretell.catalogue.table import BUILT_IN, Entry, build, catalogue, find

__all__ = ["BUILT_IN", "Entry", "Parts", "build", "catalogue", "find"]
