"""`foretell bench`: measure methods against plain decoding and other runtimes."""

from foretell.cli.bench.commands import app as app
