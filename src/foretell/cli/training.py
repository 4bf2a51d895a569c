"""Checkpoints of commands that train by gradient descent."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import typer

from foretell.cli.given import all_options
from foretell.cli.interrupt import Interrupt
from foretell.train.exits.checkpoints import Checkpoints


@contextmanager
def interruptible(
    ctx: typer.Context, out: Path, save_minutes: float, read: Mapping[str, object]
) -> Iterator[Checkpoints]:
    """Checkpoints in `out` of the training that a command's options describe, and what it has `read`; Ctrl-C ends it
    after the present step, with a checkpoint.
    """
    training = {**all_options(ctx, but=("out", "save_minutes", "force")), **read}
    with Interrupt() as interrupt:
        yield Checkpoints(out, training, save_minutes, lambda: interrupt.requested)
