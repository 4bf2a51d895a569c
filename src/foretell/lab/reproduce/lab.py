"""Decodes prompts with methods for the checks of claims, and keeps every run, so that a check can be repeated."""

import json
import sysconfig
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

import torch

from foretell.api import Model, named_inputs
from foretell.bench.questions import BUILT_IN, load_questions
from foretell.bench.schema import FileModel
from foretell.catalogue import find
from foretell.core.sampling import SamplingParams
from foretell.draft import OnlineDrafter
from foretell.engine.budget import Budget
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod
from foretell.engine.pass_times import PassTimes
from foretell.engine.request import Request
from foretell.lab.reproduce.claim import Run
from foretell.lab.reproduce.counts import Counts
from foretell.lab.reproduce.preparation.preparation import Preparation, Prepared
from foretell.utils.store import RunStore
from foretell.utils.validation import FrozenModel

PLAIN = "autoregressive"
_REQUESTS = ("Summarise", "Continue")
_LONG = 24
_LONG_CHARACTERS = 7000
_HELD_BACK = (
    "bisect", "calendar", "cmd", "colorsys", "configparser", "csv", "difflib", "fileinput", "fractions", "gzip",
    "heapq", "imaplib", "mailbox", "netrc", "poplib", "pprint", "sched", "shelve", "shlex", "smtplib", "statistics",
    "tarfile", "textwrap", "wave",
)  # fmt: skip
"""Modules of Python's library that are in no corpus: their code is to be continued."""
_HELD_BACK_OF_PACKAGES = {
    "rich": ("color", "layout", "markdown", "panel", "prompt", "spinner", "status", "tree"),
    "jinja2": ("bccache", "debug", "loaders", "visitor"),
}
"""The same of packages that are installed with this one and that others wrote."""


class _FreeDrafts(PassTimes):
    """Passes of one request take a second, drafts a thousandth of one to verify and nothing to make."""

    def __init__(self) -> None:
        super().__init__({n: 1 + 0.001 * (n - 1) for n in range(1, 65)})

    def draft_seconds(self, drafter: str, requests: int, expected: float, levels: float = 0.0) -> float:
        return 0.0


def mixed_prompts(per_category: int) -> tuple[str, ...]:
    """The first turns of the built-in questions, so many of each category, and half as many about the built-in texts:
    two sources, written apart.
    """
    questions = load_questions(BUILT_IN).select(per_category).questions
    texts = [f"{request}:\n\n{text}" for request in _REQUESTS for text in _texts()]
    return (*(q.turns[0] for q in questions), *texts[: max(1, len(questions) // 2)])


def _texts() -> Iterator[str]:
    folder = files("foretell.lab.assess").joinpath("texts")
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        yield path.read_text(encoding="utf-8")[:600]


def library_sources() -> tuple[dict[str, str], list[str]]:
    """The source of every module of Python's library that is held back, by name, and those of all others but tests.

    Raises:
        ValueError: this Python has no sources of its library.
    """
    return _sources(Path(sysconfig.get_path("stdlib")), _HELD_BACK)


def code_sources() -> tuple[dict[str, str], list[str]]:
    """`library_sources`, and the same of packages: two sources, written apart.

    Raises:
        ValueError: see `library_sources`.
    """
    held, others = library_sources()
    for package, names in _HELD_BACK_OF_PACKAGES.items():
        more, rest = _sources(Path(str(files(package))), names)
        held |= {f"{package}.{name}": text for name, text in more.items()}
        others += rest
    return held, others


def _sources(root: Path, names: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """The modules of a folder with these names, and all others but tests and other packages."""
    left_out = {"test", "tests", "idle_test", "site-packages"}
    paths = [path for path in sorted(root.rglob("*.py")) if not left_out & set(path.relative_to(root).parts)]
    sources = {path: path.read_text(encoding="utf-8", errors="ignore") for path in paths}
    held = {path.stem: text for path, text in sources.items() if path.stem in names and path.parent == root}
    if len(held) < len(names):
        raise ValueError(f"{root}: sources of Python are missing here, of which the claim makes its datastore")
    return held, [text for path, text in sources.items() if path.stem not in names]


def _add_noise(method: AnyMethod, share: float) -> None:
    """Noise in the matrices of a draft model that may learn, the same in every run."""
    assert isinstance(method.draft, OnlineDrafter)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for matrix in (p for p in method.draft.network.parameters() if p.ndim > 1):
            matrix.add_(share * matrix.std() * torch.randn(matrix.shape, generator=generator))
    method.draft.publish()


class LabSettings(FileModel):
    """What all runs of a folder have in common."""

    format: str = "foretell reproduce 2"
    model: str
    dtype: str
    draft_models: tuple[str, ...]
    new_tokens: int
    prompts: str
    """Digest of the prompts of the checks that need no prompts of their own."""


class LabRun(FrozenModel):
    """What one method did with the prompts."""

    key: str
    prompts: tuple[Counts, ...]
    tokens: tuple[tuple[int, ...], ...]
    """The answers, those of the first seed first."""
    prepared: str = ""
    """What it drafted with and how that was made for the check, or that it was named; empty: neither."""


class PromptTooLongError(ValueError):
    """A prompt of a check is longer than the model's context."""


class Lab:
    """A model, prompts, and the runs so far.

    `mixed`: prompts of many kinds, for the checks that need none of their own.
    `drafts`: draft models or speculators for methods that take one; where there is none, those that ship.
    `preparation`: makes what methods need and nothing ships; None: such methods are not checked.
    `rows`: answers that are decoded together. Methods are built afresh for every run, so that runs do not depend on
    their order.
    """

    def __init__(
        self,
        model: Model,
        store: RunStore[LabRun],
        settings: LabSettings,
        mixed: Sequence[str],
        drafts: Sequence[Model | Path] = (),
        preparation: Preparation | None = None,
        rows: int = 8,
    ) -> None:
        self.model, self._store, self._settings = model, store, settings
        self._mixed, self._drafts, self._rows = tuple(mixed), drafts, rows
        self.preparation = preparation
        self._runs = {run.key: run for run in store.records}

    @cached_property
    def _long(self) -> tuple[str, ...]:
        """Long texts with a request each: the mixed prompts, beginning with another one each time."""
        texts = [*mixed_prompts(4)]
        begins = [len(texts) * i // _LONG for i in range(_LONG)]
        joined = ["\n\n".join((*texts[begin:], *texts[:begin]))[:_LONG_CHARACTERS] for begin in begins]
        return tuple(f"{text}\n\n{_REQUESTS[i % len(_REQUESTS)]} all of the above." for i, text in enumerate(joined))

    @cached_property
    def _code(self) -> tuple[str, ...]:
        """Pieces of the modules that are held back, with a request to continue each."""
        return tuple(f"Continue:\n\n```python\n{source[800:1400]}" for source in code_sources()[0].values())

    def run(self, run: Run) -> LabRun:
        """The answers of a run, which are decoded once per folder.

        Raises:
            PromptTooLongError: the model reads no prompt of this length.
            ValueError: the method cannot be built for this model.
        """
        options = dict(run.options_for(self.model.config.layers))
        prompts = {"mixed": lambda: self._mixed, "long": lambda: self._long, "code": lambda: self._code}[run.prompts]()
        lacks = "" if self.preparation is None else self.preparation.label(run.method)
        digest = sha256(json.dumps(prompts).encode()).hexdigest()[:16]
        what = [run.method, options, digest, run.temperature, run.repeat, run.corpus, run.free, run.noise, lacks]
        key = json.dumps(what, sort_keys=True)
        if key not in self._runs:
            made = None if self.preparation is None else self.preparation.prepared(run.method)
            self._store.append(done := self._decode(key, run, options, prompts, made))
            self._runs[key] = done
        return self._runs[key]

    def changed(self, run: Run) -> int:
        """Answers that differ from those of plain decoding, of a run in which none may."""
        entry = find(run.method)
        if not entry.lossless or (run.temperature and not entry.same_seed):
            return 0
        plain = self.run(Run(PLAIN, prompts=run.prompts, temperature=run.temperature, repeat=run.repeat))
        return sum(a != b for a, b in zip(self.run(run).tokens, plain.tokens, strict=True))

    def _decode(
        self, key: str, run: Run, options: dict[str, object], prompts: Sequence[str], made: Prepared | None
    ) -> LabRun:
        drafts = self._drafts
        if made is not None:
            drafts = (made.folder,)
        method = self.build(run, options, drafts)
        requests = [
            self.model.request(
                text, SamplingParams(temperature=run.temperature, seed=seed), max_new_tokens=self._settings.new_tokens
            )
            for text in prompts
            for seed in range(run.repeat)
        ]
        self._check_length(requests, run)
        done = self._engine(method, run).complete(requests)
        answers = [done[i : i + run.repeat] for i in range(0, len(done), run.repeat)]
        return LabRun(
            key=key,
            prompts=tuple(map(Counts.of, answers)),
            tokens=tuple(tuple(c.tokens) for of_seed in zip(*answers, strict=True) for c in of_seed),
            prepared=self._named(method) if made is None else made.note,
        )

    def build(self, run: Run, options: Mapping[str, object], drafts: Sequence[Model | Path]) -> AnyMethod:
        """The method of a run."""
        references = code_sources()[1] if run.corpus else ()
        method = self.model.method(run.method, options or None, drafts=drafts, references=references, shared=True)
        if run.noise:
            _add_noise(method, run.noise)
        return method

    def _engine(self, method: AnyMethod, run: Run) -> Engine:
        if not run.free:
            # The seeds of a prompt follow each other, so that it is read once.
            return self.model.engine(method, rows=self._rows, prefix_caching=run.repeat > 1)
        budget = Budget(_FreeDrafts())
        return Engine(self.model.runner(), method, 1, detokenizer=self.model.codec.detokenizer, budget=budget)

    def _check_length(self, requests: Sequence[Request], run: Run) -> None:
        longest, most = max(len(r.prompt) for r in requests), self.model.config.context - 1
        if longest > most:
            remedy = (
                "give shorter ones with --prompts FILE.jsonl"
                if run.prompts == "mixed"
                else "the claim needs prompts of its own, so it cannot be checked on this model"
            )
            raise PromptTooLongError(f"a prompt has {longest} tokens, and the model reads at most {most}; {remedy}")

    def _named(self, method: AnyMethod) -> str:
        """Which of the draft models that were named a method drafts with."""
        named = named_inputs(self._drafts)
        used = [name for kind, names in vars(named).items() if kind in method.inputs for name in names]
        return f"{method.name} drafts with {', '.join(used)}, as named" if used else ""
