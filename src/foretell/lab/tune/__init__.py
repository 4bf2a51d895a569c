"""Searches for settings of a method on given prompts."""
