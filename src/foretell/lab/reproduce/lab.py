"""Decodes prompts with methods for the checks of claims, and keeps every run, so that a check can be repeated."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from pathlib import Path

from foretell.api import Model, named_inputs
from foretell.bench.questions import BUILT_IN, load_questions
from foretell.bench.schema import FileModel, FrozenModel
from foretell.core.sampling import SamplingParams
from foretell.engine.budget import Budget
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod
from foretell.engine.pass_times import PassTimes
from foretell.engine.request import Completion, Request
from foretell.lab.reproduce.preparation.preparation import Preparation
from foretell.utils.store import RunStore

PLAIN = "autoregressive"
COPY = (
    "Minutes: Ada reports that the pump in hall 2 leaks. Grace orders a seal. Alan checks the valves on Friday."
    " Everyone meets again on 10 May at nine.\n\nRepeat the minutes word by word.",
    "The train to Lund leaves at 8:05 from track 4 and arrives at 9:40. The train to Ystad leaves at 8:20 from track 7"
    " and arrives at 9:55.\n\nCopy the two sentences, then copy them again.",
    "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n"
    "    return width * height * depth\n\nRepeat this code without any change.",
    "Apples are red. Pears are green. Plums are blue. Lemons are yellow. Cherries are dark red.\n\n"
    "Write these sentences again, each on its own line.",
)
"""Prompts whose answers repeat them; written for this package."""
_REQUESTS = (
    "Summarise all of the above in some sentences.",
    "List the subjects of all of the above, one on each line.",
    "Which of the above is the hardest to answer? Explain why.",
    "Answer the last of the questions above.",
)
"""What is asked about a long text."""


def mixed_prompts(per_category: int) -> tuple[str, ...]:
    """The first turns of the built-in questions, so many of each category."""
    return tuple(q.turns[0] for q in load_questions(BUILT_IN).select(per_category).questions)


class LabSettings(FileModel):
    """What all runs of a folder have in common."""

    format: str = "foretell reproduce 1"
    model: str
    dtype: str
    draft_models: tuple[str, ...]
    new_tokens: int
    prompts: str
    """Digest of the prompts of the checks that need no prompts of their own."""


class LabRun(FrozenModel):
    """What one method did with one set of prompts."""

    key: str
    new_tokens: int
    passes: int
    drafting_passes: int
    """Those that had drafts."""
    drafted: int
    accepted_per_position: tuple[int, ...]
    """Passes that accepted a draft at depth 1, 2, …"""
    identical: int
    """Answers equal to those of plain decoding with the same seeds."""
    answers: int
    mean_variation: float
    """Mean total variation distance per token from the target, of a lossy method."""
    changed_share: float
    """Share of tokens that a lossy method changed."""
    tokens: tuple[tuple[int, ...], ...]
    prepared: str = ""
    """What it drafted with and how that was made for the check, or that it was named; empty: neither."""

    @property
    def tokens_per_pass(self) -> float:
        """Mean new tokens per pass, the target's own included."""
        return self.new_tokens / self.passes

    @property
    def tokens_per_drafting_pass(self) -> float:
        """Mean new tokens of the passes that had drafts."""
        return 1 + sum(self.accepted_per_position) / self.drafting_passes if self.drafting_passes else 1.0

    @property
    def acceptance(self) -> float:
        """Share of the drafting passes that accept their first draft."""
        return self.conditional_acceptance(1)

    @property
    def accepted_by_depth(self) -> list[tuple[float, float]]:
        """Depth of a draft, and the passes that accepted one there."""
        return [(depth, passes) for depth, passes in enumerate(self.accepted_per_position, 1)]

    def conditional_acceptance(self, depth: int) -> float:
        """Share of the passes that accepted a draft at `depth` - 1 that accept one at `depth`; depths begin with 1."""
        reached = (self.drafting_passes, *self.accepted_per_position)
        return self.accepted_per_position[depth - 1] / reached[depth - 1] if depth < len(reached) else 0.0


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
        self.mixed, self._drafts, self._rows = tuple(mixed), drafts, rows
        self.preparation = preparation
        self._runs = {run.key: run for run in store.records}
        self._notes: dict[str, None] = {}

    def take_notes(self) -> tuple[str, ...]:
        """What methods drafted with since the last call that was named, or made for the check and how."""
        notes, self._notes = tuple(self._notes), {}
        return notes

    @cached_property
    def free(self) -> tuple[str, ...]:
        """Questions whose answers do not repeat them."""
        return tuple(q.turns[0] for q in load_questions(BUILT_IN).select(4, ["conversation"]).questions)

    @cached_property
    def long(self) -> tuple[str, ...]:
        """Long texts with a request each: the built-in questions, beginning with another one each time."""
        parts = [q.turns[0] for q in load_questions(BUILT_IN).questions]
        begins = [len(parts) * i // len(_REQUESTS) for i in range(len(_REQUESTS))]
        texts = ["\n\n".join((*parts[begin:], *parts[:begin])) for begin in begins]
        return tuple(f"{text}\n\n{request}" for text, request in zip(texts, _REQUESTS, strict=True))

    def run(
        self,
        method: str,
        options: Mapping[str, object] | None = None,
        *,
        prompts: Sequence[str] | None = None,
        temperature: float = 0.0,
        references: Sequence[str] = (),
        repeat: int = 1,
        pass_seconds: Mapping[int, float] | None = None,
    ) -> LabRun:
        """Decode `prompts` (default: `mixed`) with a method, `repeat` times with other seeds; once per folder.
        `pass_seconds`: times of passes by their tokens, by which drafts are chosen; None: measured ones.

        Raises:
            PromptTooLongError: the model reads no prompt of this length.
            ValueError: the method cannot be built for this model.
        """
        prompts = tuple(prompts or self.mixed)
        lacks = "" if self.preparation is None else self.preparation.label(method)
        what = [method, options or {}, prompts, temperature, list(references), repeat, *([lacks] if lacks else [])]
        what += [pass_seconds] if pass_seconds else []
        key = json.dumps(what, sort_keys=True)
        if key not in self._runs:
            run = self._decode(key, method, options, prompts, temperature, references, repeat, pass_seconds)
            self._store.append(run)
            self._runs[key] = run
        if self._runs[key].prepared:
            self._notes[self._runs[key].prepared] = None
        return self._runs[key]

    def plain_texts(self, prompts: Sequence[str] | None = None) -> list[str]:
        """The greedy answers of plain decoding."""
        return [self.model.codec.decode(list(tokens)) for tokens in self.run(PLAIN, prompts=prompts).tokens]

    def _decode(
        self,
        key: str,
        method: str,
        options: Mapping[str, object] | None,
        prompts: Sequence[str],
        temperature: float,
        references: Sequence[str],
        repeat: int,
        pass_seconds: Mapping[int, float] | None,
    ) -> LabRun:
        made = None if self.preparation is None else self.preparation.prepared(method)
        drafts, wanted = self._drafts, dict(options or {})
        if made is not None:
            drafts, wanted = made.drafts, wanted | dict(made.options)
        built = self.model.method(method, wanted or None, drafts=drafts, references=references, shared=made is None)
        engine, longest = self.model.engine(built, rows=self._rows), self._settings.new_tokens
        if pass_seconds is not None:
            budget = Budget(PassTimes(pass_seconds))
            runner, detokenizer = self.model.runner(), self.model.codec.detokenizer
            engine = Engine(runner, built, self._rows, detokenizer=detokenizer, budget=budget)
        requests = [
            self.model.request(text, SamplingParams(temperature=temperature, seed=seed), max_new_tokens=longest)
            for seed in range(repeat)
            for text in prompts
        ]
        self._check_length(requests, prompts)
        done = engine.complete(requests)
        plain: Sequence[Sequence[int]] = [c.tokens for c in done]
        if method != PLAIN:
            plain = self.run(PLAIN, prompts=prompts, temperature=temperature, repeat=repeat).tokens
        return _summarise(key, done, plain, self._named(built) if made is None else made.note)

    def _check_length(self, requests: Sequence[Request], prompts: Sequence[str]) -> None:
        """Check that the model reads prompts of this length.

        Raises:
            PromptTooLongError: it does not.
        """
        longest, most = max(len(r.prompt) for r in requests), self.model.config.context - 1
        if longest > most:
            remedy = (
                "give shorter ones with --prompts FILE.jsonl"
                if tuple(prompts) == self.mixed
                else "the claim needs prompts of its own, so it cannot be checked on this model"
            )
            raise PromptTooLongError(f"a prompt has {longest} tokens, and the model reads at most {most}; {remedy}")

    def _named(self, method: AnyMethod) -> str:
        """Which of the draft models that were named a method drafts with."""
        named = named_inputs(self._drafts)
        used = [name for kind, names in vars(named).items() if kind in method.inputs for name in names]
        return f"{method.name} drafts with {', '.join(used)}, as named" if used else ""


def _summarise(key: str, done: Sequence[Completion], plain: Sequence[Sequence[int]], prepared: str) -> LabRun:
    statistics = [c.statistics for c in done]
    accepted = [sum(passes) for passes in zip_longest(*(s.accepted_per_position for s in statistics), fillvalue=0)]
    tokens = sum(s.new_tokens for s in statistics)
    return LabRun(
        key=key,
        new_tokens=tokens,
        passes=sum(s.target_passes for s in statistics),
        drafting_passes=sum(s.drafting_passes for s in statistics),
        drafted=sum(s.drafted for s in statistics),
        accepted_per_position=tuple(accepted),
        identical=sum(tuple(c.tokens) == tuple(p) for c, p in zip(done, plain, strict=True)),
        answers=len(done),
        mean_variation=sum(s.fidelity.mean_variation * s.new_tokens for s in statistics) / tokens,
        changed_share=sum(s.fidelity.changed_share * s.new_tokens for s in statistics) / tokens,
        tokens=tuple(tuple(c.tokens) for c in done),
        prepared=prepared,
    )
