"""Converts the requests of other APIs to chat completions."""
