"""From the command line's words to a model and a method."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from foretell.api import Model
from foretell.catalogue import find
from foretell.catalogue.config import SpeculativeConfig
from foretell.engine.method import AnyMethod
from foretell.load import load, load_draft


def set_threads(threads: int | None) -> int:
    """Set the CPU threads of torch and of the kernels (None: torch's own choice), and return how many there are.

    Raises:
        ValueError: fewer than one thread, or more than the machine has processors.
    """
    if threads is not None:
        processors = os.cpu_count() or 1
        if not 1 <= threads <= processors:
            raise ValueError(
                f"threads must lie between 1 and {processors} (this machine's processors), found {threads}"
            )
        torch.set_num_threads(threads)
    return torch.get_num_threads()


@dataclass(frozen=True)
class MethodSelection:
    """Which method was asked for, in whichever way it was said."""

    name: str
    config: SpeculativeConfig
    drafts: tuple[str, ...]


@dataclass(frozen=True)
class ModelSetup:
    """A model in memory and what methods are built from."""

    model: Model
    config: SpeculativeConfig
    drafts: tuple[Model | Path, ...]
    references: tuple[str, ...]

    def method(self, name: str) -> AnyMethod:
        """The method of this name, afresh."""
        return self.model.method(name, self.config, drafts=self.drafts, references=self.references)


def parse_method(
    method: str | None,
    speculative_config: str | None,
    drafts: Sequence[str] | None,
    methods: Sequence[str] = (),
) -> MethodSelection:
    """Bring `--method`, `--draft-model` and `--speculative-config` together.

    `methods`: further ones that the config is for.

    Raises:
        ValueError: an unknown method, a bad config, options of no method, or two answers to one question.
    """
    config = SpeculativeConfig() if speculative_config is None else SpeculativeConfig.parse(speculative_config)
    entries = [find(n) for n in (method, config.method) if n is not None]
    names = [entry.name for entry in entries]
    if len(set(names)) > 1:
        raise ValueError(f"--method says {method} and the speculative config says {config.method}; give one of them")
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
            f"--draft-model says {', '.join(drafts)} and the speculative config says {config.model}; give one of them"
        )
    return MethodSelection(names[0] if names else "autoregressive", config, tuple(drafts or in_config))


def load_models(
    model: str,
    dtype: str,
    device: str,
    wish: MethodSelection,
    references: Sequence[Path] | None,
    memory_limit: int | None = None,
) -> ModelSetup:
    """Load everything; what can be refused quickly is refused first.

    `memory_limit`: MiB that the target's weights may take.

    Raises:
        ValueError: a model cannot be loaded, or the method cannot be built.
        OSError: a reference cannot be read.
    """
    texts = tuple(read_text(path) for path in references or ())
    with spinner(f"loading {model}"):
        target = load(model, dtype, device, None if memory_limit is None else memory_limit << 20)
        drafts = tuple(load_draft(d, dtype, device) for d in wish.drafts)
    return ModelSetup(target, wish.config, drafts, texts)


def read_text(path: Path) -> str:
    """A text file.

    Raises:
        ValueError: it is not UTF-8.
    """
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text (byte {error.start}); convert it first") from error


@contextmanager
def spinner(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner on standard error while something takes its time; silent where nobody watches.

    Gives a function that changes its text.
    """
    with Console(file=sys.stderr).status(f"[dim]{what}[/]", spinner="dots") as status:
        yield lambda text: status.update(f"[dim]{text}[/]")
