"""The one place where what went wrong becomes a sentence on standard error and an exit status."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import typer

TRACEBACK = "FORETELL_TRACEBACK"
"""Environment variable that shows tracebacks in place of sentences, for whoever hunts a bug."""


@contextmanager
def report_errors() -> Iterator[None]:
    """Turn whatever a user can cause into one sentence and a non-zero exit.

    Bad input exits with 1, a wrong command line with 2, Ctrl-C with 130.
    """
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        raise _exit("interrupted", 130) from None
    except typer.TyperException as error:
        raise _exit(error.format_message(), error.exit_code) from None
    except (ValueError, OSError) as error:
        if os.environ.get(TRACEBACK):
            raise
        raise _exit(error_message(error), 1) from None


def error_message(error: ValueError | OSError) -> str:
    """What happened and, where it helps, what to do; no line breaks."""
    if isinstance(error, UnicodeDecodeError):
        return f"the input is not UTF-8 text (byte {error.start}); convert it first"
    if isinstance(error, BrokenPipeError):
        return "whoever read the output has closed it; the rest was not written"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = error.filename or "the output"
        return f"no space left on the device for {where}; free some, or write elsewhere"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror.lower()}"
    return " ".join(str(error).split()) or type(error).__name__


def print_error(message: str) -> None:
    """A sentence on standard error."""
    with suppress(OSError):
        typer.echo(f"foretell: {message}", err=True)


def _exit(message: str, status: int) -> typer.Exit:
    _discard_output()
    print_error(message)
    return typer.Exit(status)


def _discard_output() -> None:
    """Where standard output takes no more, let Python's own flush at exit go nowhere instead of failing a second
    time.
    """
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, sys.stdout.fileno())
            os.close(sink)
