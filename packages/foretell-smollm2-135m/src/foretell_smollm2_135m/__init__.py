"""Speculators for SmolLM2-135M-Instruct: one folder per kind, data only.

Foretell finds them by the entry point and does not import this.
"""
