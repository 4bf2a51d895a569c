"""Turns errors into one sentence on standard error and an exit status."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import typer
from typer.core import TyperGroup

TRACEBACK = "FORETELL_TRACEBACK"
"""Environment variable that shows the traceback of an error instead of its sentence."""


@contextmanager
def report_errors() -> Iterator[None]:
    """Turn every error that a user can cause into one sentence and a non-zero exit status.

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


class ErrorReportingGroup(TyperGroup):
    """A command group that reports errors in one sentence and exits non-zero, also when run as a module."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with report_errors():
            return super().invoke(ctx)


def error_message(error: ValueError | OSError) -> str:
    """What happened and, where it helps, what to do; on one line."""
    if isinstance(error, UnicodeDecodeError):
        return f"the input is not UTF-8 text (byte {error.start}); convert it first"
    if isinstance(error, UnicodeEncodeError) and error.encoding != "utf-8":
        text = error.object[error.start : error.end][:20]
        return f"the output is in {error.encoding}, which cannot write {text!a}; set PYTHONIOENCODING=utf-8"
    if isinstance(error, BrokenPipeError):
        return "the reader of the output has closed it; the rest was not written"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = error.filename or "the output"
        return f"no space left on the device for {where}; free some, or write elsewhere"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror.lower()}"
    return " ".join(str(error).split()) or type(error).__name__


def print_error(message: str) -> None:
    """Print a sentence on standard error."""
    with suppress(OSError):
        typer.echo(f"foretell: {message}", err=True)


def _exit(message: str, status: int) -> typer.Exit:
    _discard_output()
    print_error(message)
    return typer.Exit(status)


def _discard_output() -> None:
    """Where standard output cannot be written, redirect it to the null device: else Python's own flush at exit fails
    again.
    """
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, sys.stdout.fileno())
            os.close(sink)
