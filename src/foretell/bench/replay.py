"""Tokens per pass of any method on a recorded workload, through the same engine, without running the target.

Exact for greedy decoding with methods that learn from decided tokens only. Not supported: hidden states, drafters that
run parts of the target, lossy methods. Drafters that learn from the target's logits at rejected or probed nodes (token
recycling, lookahead, Jacobi) see fewer of them than in a real run, because a recording holds the logits of the answer
only. With the times of passes, the draft budget chooses as on a machine that has them and drafts in no time; without,
it chooses by the times of the replay, which are meaningless.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.api import named_inputs
from foretell.bench.competitor import MethodSpec
from foretell.bench.recording import RecordedAnswer, RecordedQuestion, RecordingSettings
from foretell.bench.schema import Answer, QuestionResult
from foretell.bench.tracing import TracingRunner
from foretell.catalogue import BuildContext, build
from foretell.core.context import ModelOutput
from foretell.core.tree import TokenTree
from foretell.engine.budget import Budget
from foretell.engine.engine import Engine
from foretell.engine.pass_times import PassTimes, load_key
from foretell.engine.request import Request
from foretell.load import load
from foretell.model.run.runner import Layers, Marks, Rows, Runner


class MachineClock:
    """The time of a machine on which passes take these times, and everything else none."""

    def __init__(self, times: PassTimes) -> None:
        self.times, self.now = times, 0.0

    def __call__(self) -> float:
        """Seconds since the begin."""
        return self.now

    def read(self, tokens: int) -> None:
        """A pass over so many tokens."""
        table = self.times.seconds(load_key(1, 0), 1)
        self.now += table[min(tokens, len(table)) - 1]


class ReplayRunner(Runner):
    """A runner that replays recorded answers, one row at a time.

    Nodes that agree with the answer get the recorded log-probabilities, and -inf for tokens outside the recorded best.
    The other nodes get no logits: greedy decoding never accepts them.
    """

    def __init__(self, vocab: int, context: int, clock: MachineClock | None = None) -> None:
        self.vocab, self.context, self._clock = vocab, context, clock
        self._length = 0

    def set_answer(self, answer: RecordedAnswer) -> None:
        """Replay this answer from now on."""
        self._sequence = np.array([*answer.prompt, *answer.tokens], np.int64)
        self._prompt_length = len(answer.prompt)
        self._top_tokens, self._top_logprobs = answer.unpack()

    def length(self, row: int) -> int:
        """How many tokens have been read and kept."""
        return self._length

    def forward(
        self, rows: Rows, tree: TokenTree, *, active: Marks = None, scored: Marks = None, hidden_layers: Layers = ()
    ) -> ModelOutput:
        """Recorded log-probabilities after every scored node that agrees with the answer.

        Raises:
            ValueError: hidden states are wanted, or more than one row.
        """
        if hidden_layers:
            raise ValueError(
                "this method drafts from the target's hidden states, which a recording does not hold: measure it with "
                "`foretell bench run`"
            )
        if len(rows) != 1:
            raise ValueError(f"a recorded answer is replayed for one row at a time, found {len(rows)} rows")
        if self._clock is not None:
            self._clock.read(tree.active_count)
        wanted = tree.active if scored is None else tree.active & scored
        positions = self._length + tree.depth[0]
        agrees = np.zeros(tree.nodes, bool)
        for node, (parent, at, token) in enumerate(
            zip(tree.parent[0].tolist(), positions.tolist(), tree.token[0].tolist(), strict=True)
        ):
            on_path = parent < 0 or agrees[parent]
            agrees[node] = on_path and at < len(self._sequence) and self._sequence[at] == token
        nodes = np.flatnonzero(agrees & wanted[0])
        index = np.full(wanted.shape, -1, np.int64)
        index[0, nodes] = np.arange(len(nodes))
        return ModelOutput(logits=self._logits(positions[nodes] + 1 - self._prompt_length), logit_index=index)

    def _logits(self, following: Int[np.ndarray, " k"]) -> Float[torch.Tensor, "k v"]:
        """Recorded log-probabilities of the answer's tokens `following`; past the end of the answer, zeros."""
        logits = torch.full((len(following), self.vocab), -torch.inf)
        for i, number in enumerate(following.tolist()):
            if 0 <= number < len(self._top_tokens):
                tokens = torch.from_numpy(self._top_tokens[number].astype(np.int64))
                logits[i, tokens] = torch.from_numpy(self._top_logprobs[number].copy())
            else:
                logits[i] = 0.0
        return logits

    def commit(self, row: int, path: Sequence[int]) -> None:
        """Count them as read."""
        self._length += len(path)

    def truncate(self, row: int, length: int) -> None:
        """Forget tokens from `length` on."""
        self._length = min(length, self._length)


class MethodReplay:
    """Replays recordings with one method, built afresh for every question from what `context` returns. `times`: of the
    passes of the machine for which the budget chooses drafts.
    """

    def __init__(
        self,
        settings: RecordingSettings,
        spec: MethodSpec,
        context: Callable[[], BuildContext],
        times: PassTimes | None = None,
    ) -> None:
        self.settings, self.spec, self._context, self._times = settings, spec, context, times
        self.seconds, self.tokens = 0.0, 0
        """On that machine: of decoding so many tokens."""
        self.name = f"{spec.label}/{settings.dtype}"
        try:
            method = self._build_engine(None)[0].method
        except ValueError as error:
            raise ValueError(f"{spec.label} cannot be replayed: {error}") from error
        self.inputs = method.inputs
        if not method.lossless:
            raise ValueError(
                f"{spec.label} cannot be replayed: it is lossy, and the target's logits after a token that it did not "
                "choose were not recorded; measure it with `foretell bench run`"
            )

    def _build_engine(self, clock: MachineClock | None) -> tuple[Engine, ReplayRunner, TracingRunner]:
        runner = ReplayRunner(self.settings.vocab, self.settings.context, clock)
        tracing, method = TracingRunner(runner), build(self.spec.method, self._context(), self.spec.config)
        if clock is None:
            return Engine(tracing, method, rows=1), runner, tracing
        return Engine(tracing, method, rows=1, clock=clock, budget=Budget(clock.times)), runner, tracing

    def replay(self, recorded: RecordedQuestion) -> QuestionResult:
        """Replay one question.

        Raises:
            ValueError: the method needs what a recording does not hold, or its answer differs from the recorded one,
                which is a bug of a lossless method.
        """
        clock = None if self._times is None else MachineClock(self._times)
        engine, replay_runner, tracing = self._build_engine(clock)
        answers = []
        for answer in recorded.answers:
            replay_runner.set_answer(answer)
            tracing.passes = []
            request = Request(answer.prompt, max_new_tokens=self.settings.max_new_tokens, eos=self.settings.eos)
            (completion,) = engine.complete([request])
            if completion.tokens != answer.tokens:
                raise ValueError(
                    f"{self.name} answered question {recorded.question} otherwise than the recorded target: this is a "
                    "bug, please report it"
                )
            statistics = completion.statistics
            self.seconds += statistics.decode_seconds
            self.tokens += statistics.decode_tokens
            tested, accepted = tracing.count_acceptance()
            answers.append(
                Answer(
                    prompt_tokens=len(answer.prompt), tokens=completion.tokens,
                    arrival_seconds=(), arrival_counts=(), retokenized_tokens=0,
                    passes=statistics.target_passes, drafted=statistics.drafted,
                    tested_per_position=tested, accepted_per_position=accepted,
                )
            )  # fmt: skip
        return QuestionResult(
            question=recorded.question,
            category=recorded.category,
            group=recorded.group,
            competitor=self.name,
            repeat=0,
            answers=tuple(answers),
        )


def method_replays(
    settings: RecordingSettings,
    methods: Sequence[str],
    draft_model: str | None = None,
    references: Sequence[Path] = (),
    times: PassTimes | None = None,
) -> list[MethodReplay]:
    """Plain decoding and these methods; models are loaded only where drafting needs them. `times`: see `MethodReplay`.

    Raises:
        ValueError: an unknown or lossy method, one that needs what is not there, or none uses the draft model or the
            references.
    """
    specs = MethodSpec.parse_all(methods)
    drafts = [load(r, settings.dtype) for r in (draft_model or "").split(",") if r]
    codec = load(settings.model, settings.dtype).codec if references or drafts else None
    texts = (
        []
        if codec is None
        else [tuple(codec.encode(p.read_text("utf-8"), add_special_tokens=False)) for p in references]
    )

    def context() -> BuildContext:
        return BuildContext(
            vocab=settings.vocab,
            network=None,
            drafts=tuple(d.runner() for d in drafts),
            references=tuple(texts),
            eos=settings.eos,
            codec=codec,
            draft_codecs=tuple(d.codec for d in drafts),
        )

    replays = [MethodReplay(settings, spec, context, times) for spec in specs]
    named_inputs(drafts, list(map(str, references))).require_used({r.spec.label: r.inputs for r in replays})
    return replays


def replay_all(
    replays: Sequence[MethodReplay], questions: Sequence[RecordedQuestion], report: Callable[[str], None]
) -> list[QuestionResult]:
    """Replay every question with every method.

    Raises:
        ValueError: as `MethodReplay.replay`.
    """
    results = []
    for replay in replays:
        for question in questions:
            results.append(replay.replay(question))
            report(f"{replay.name} {question.question}")
    return results
