"""`python -m foretell.cli.bench`."""

from foretell.cli.bench import app

app(prog_name="foretell bench")
