"""Loads the models and parses the method that a command line names."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from foretell.api import Model, named_inputs
from foretell.catalogue import DEFAULT_METHOD, find
from foretell.catalogue.config import SpeculativeConfig
from foretell.catalogue.inputs import NamedInputs
from foretell.cli.garbage import freeze_garbage_collector
from foretell.cli.pass_times import kept_pass_times
from foretell.core.target_options import PLAIN_TARGET, TargetOptions
from foretell.engine.method import AnyMethod
from foretell.load import load, load_draft, load_target


def set_threads(threads: int | None) -> int:
    """Set the CPU threads of torch and of the kernels (None: torch's own choice), and return how many there are.

    Raises:
        ValueError: fewer than one thread, or more than the machine has processors.
    """
    if threads is not None:
        torch.set_num_threads(check_threads(threads))
    return torch.get_num_threads()


def check_threads(threads: int) -> int:
    """The number of CPU threads, if the machine has as many processors.

    Raises:
        ValueError: it has not, or there is not one thread.
    """
    processors = os.cpu_count() or 1
    if not 1 <= threads <= processors:
        raise ValueError(f"threads must lie between 1 and {processors} (this machine's processors), found {threads}")
    return threads


@dataclass(frozen=True)
class MethodSelection:
    """A method, its options and its draft models, from `--method`, `--draft-model` and `--speculative-config`."""

    name: str
    config: SpeculativeConfig
    drafts: tuple[str, ...]
    """References of draft models, and directories of speculators."""


@dataclass(frozen=True)
class ModelSetup:
    """A loaded target and what methods are built from."""

    model: Model
    config: SpeculativeConfig
    drafts: tuple[Model | Path, ...]
    references: tuple[str, ...]

    def method(self, name: str) -> AnyMethod:
        """Build the method of this name."""
        return self.model.method(name, self.config, drafts=self.drafts, references=self.references)

    def shared_method(self, name: str) -> AnyMethod:
        """Build one of several methods, which uses what it can of the draft models and references."""
        return self.model.method(name, self.config, drafts=self.drafts, references=self.references, shared=True)

    def other_method(self, name: str) -> AnyMethod:
        """The same for a method that the command line did not name: the options given there are not for it."""
        return replace(self, config=SpeculativeConfig()).shared_method(name)

    @property
    def inputs(self) -> NamedInputs:
        """What the command line names for methods to draft with."""
        return named_inputs(self.drafts, self.references)


def parse_method(
    method: str | None,
    speculative_config: str | None,
    drafts: Sequence[str] | None,
    methods: Sequence[str] = (),
) -> MethodSelection:
    """Combine `--method`, `--draft-model` and `--speculative-config`.

    `methods`: further methods that must read the options of the config.

    Raises:
        ValueError: an unknown method, an invalid config, options without a method, or two different methods or draft
            models.
    """
    config = SpeculativeConfig() if speculative_config is None else SpeculativeConfig.parse(speculative_config)
    entries = [find(n) for n in (method, config.method) if n is not None]
    names = [entry.name for entry in entries]
    if len(set(names)) > 1:
        raise ValueError(
            f"--method is {method} and the method of --speculative-config is {config.method}; give one of them"
        )
    entries += [find(n) for n in methods]
    for entry in entries:
        entry.parse_options(config)
    if config.options and not entries:
        raise ValueError(
            f"the speculative config sets {', '.join(config.options)} and names no method: "
            'add --method NAME, or "method" to the config'
        )
    in_config = tuple(config.model.split(",")) if config.model else ()
    if drafts and in_config and tuple(drafts) != in_config:
        raise ValueError(
            f"--draft-model is {', '.join(drafts)} and the model of --speculative-config is {config.model}; "
            f"give one of them"
        )
    return MethodSelection(names[0] if names else DEFAULT_METHOD, config, tuple(drafts or in_config))


def load_model(reference: str, dtype: str = "auto", device: str = "cpu") -> Model:
    """Load a model without options, and show a spinner meanwhile.

    Raises:
        ValueError: it cannot be loaded.
    """
    with spinner(f"loading {reference}"):
        return load(reference, dtype, device)


def load_models(
    model: str,
    dtype: str,
    device: str,
    selection: MethodSelection,
    references: Sequence[Path] | None,
    memory_limit: int | None = None,
    target_options: TargetOptions = PLAIN_TARGET,
) -> ModelSetup:
    """Load the target, the draft models and the reference documents.

    `memory_limit`: MiB that the target's weights may take.

    Raises:
        ValueError: a model cannot be loaded.
        OSError: a reference cannot be read.
    """
    texts = tuple(read_text(path) for path in references or ())
    with spinner(f"loading {model}"):
        target = load_target(target_options, model, dtype, device, None if memory_limit is None else memory_limit << 20)
        target.pass_times = kept_pass_times(target, device)
        drafts = tuple(load_draft(d, dtype, device) for d in selection.drafts)
    freeze_garbage_collector()
    return ModelSetup(target, selection.config, drafts, texts)


def read_text(path: Path) -> str:
    """Read a text file.

    Raises:
        ValueError: it is not UTF-8.
    """
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text (byte {error.start}); convert it first") from error


@contextmanager
def spinner(text: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner with a text on standard error, if that is a terminal. Gives a function that changes the text."""
    with Console(file=sys.stderr).status(f"[dim]{text}[/]", spinner="dots") as status:
        yield lambda text: status.update(f"[dim]{text}[/]")
