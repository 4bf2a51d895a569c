"""Recipes, one file per kind of speculator."""
