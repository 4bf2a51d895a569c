"""Helpers without knowledge of models: names, JSON and validation, append-only stores."""
