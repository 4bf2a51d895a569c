"""The command line: one file per command, imported when it is called."""

from foretell.cli.app import app, main

__all__ = ["app", "main"]
