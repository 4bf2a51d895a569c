"""Recipes, one file per kind of speculator."""

from collections.abc import Mapping

from foretell.train.recipe.base import Recipe

RECIPES: Mapping[str, type[Recipe]] = {}
"""Every recipe by its name; `RECIPES[name].of(setup)` builds one."""
