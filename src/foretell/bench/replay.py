"""Replay any method: its tokens per pass on a recorded workload, through the same engine, without running the target.

Exact for greedy decoding with methods that learn from decided tokens only. Limits: no hidden states, no parts of the
target as drafter, lossless methods only. Drafters that learn from the target's scores at rejected or probed nodes
(token recycling, lookahead, Jacobi) see fewer of them than in a real run, because nobody recorded what the target would
have said there; methods that learn from the clock (hybrid) decide otherwise than on a real target. Times are of the
replay and mean nothing.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from foretell.bench.competitor import PLAIN, MethodSpec, TracingRunner
from foretell.bench.recording import RecordedQuestion, RecordingSettings, ReplayRunner
from foretell.bench.schema import Answer, BenchSettings, FrozenModel, QuestionResult
from foretell.catalogue import BuildContext, build
from foretell.engine.engine import Engine, Request
from foretell.load import load as load_model
from foretell.model.runner import Runner
from foretell.utils.store import read, settings
from foretell.utils.validation import validate_json


def load_recording(folder: Path) -> tuple[RecordingSettings, list[RecordedQuestion]]:
    """A complete recording.

    Raises:
        ValueError: there is none here, it is damaged, or it was interrupted.
    """
    setting = settings(folder, RecordingSettings)
    recordings = list(read(folder, RecordedQuestion))
    if len(recordings) < setting.questions:
        raise ValueError(
            f"{folder}: the recording was interrupted, it holds {len(recordings)} of {setting.questions} questions; "
            "run `foretell bench record` with the same settings and --out to finish it"
        )
    return setting, recordings


class MethodReplay:
    """Makes a fresh method for every question. `context` makes what it is built from."""

    def __init__(self, setting: RecordingSettings, spec: MethodSpec, context: Callable[[], BuildContext]) -> None:
        self.setting, self.spec, self._context = setting, spec, context
        self.name = f"{spec.label}/{setting.dtype}"
        if not self.engine(ReplayRunner(setting.vocab, setting.context)).method.lossless:
            raise ValueError(
                "it is lossy, and what the target says after a token it did not choose was not recorded; measure it "
                "with `foretell bench run`"
            )

    def engine(self, runner: Runner) -> Engine:
        """An engine with a method that remembers nothing."""
        return Engine(TracingRunner(runner), build(self.spec.method, self._context(), self.spec.config), rows=1)

    def replay(self, recording: RecordedQuestion) -> QuestionResult:
        """The method's passes over one question.

        Raises:
            ValueError: the method needs what a recording does not hold.
        """
        scripted = ReplayRunner(self.setting.vocab, self.setting.context)
        engine = self.engine(scripted)
        watched = engine.runner
        assert isinstance(watched, TracingRunner)
        turns = []
        for script in recording.answers:
            scripted.set_answer(script)
            watched.passes = []
            request = Request(script.prompt, max_new_tokens=self.setting.max_new_tokens, eos=self.setting.eos)
            (done,) = engine.complete([request])
            stats = done.statistics
            tested, accepted = watched.count_acceptance()
            turns.append(
                Answer(
                    prompt_tokens=len(script.prompt), tokens=done.tokens, arrival_seconds=(), arrival_counts=(), retokenized_tokens=0,
                    passes=stats.target_passes, drafted=stats.drafted, tested_per_position=tested, accepted_per_position=accepted,
                )
            )  # fmt: skip
        return QuestionResult(
            question=recording.question,
            category=recording.category,
            group=recording.group,
            competitor=self.name,
            repeat=0,
            answers=tuple(turns),
        )


def method_replays(
    setting: RecordingSettings, methods: Sequence[str], draft_model: str | None = None, references: Sequence[Path] = ()
) -> list[MethodReplay]:
    """Plain decoding and these methods, ready to play; models are loaded only where drafting needs them.

    Raises:
        ValueError: an unknown or lossy method, or one that needs what is not there.
    """
    specs = {s.label: s for s in map(MethodSpec.parse, [PLAIN, *methods])}
    drafts = [load_model(r, setting.dtype) for r in (draft_model or "").split(",") if r]
    codec = load_model(setting.model, setting.dtype).codec if references or drafts else None
    texts = [] if codec is None else [tuple(codec.encode(p.read_text("utf-8"), special=False)) for p in references]

    def context() -> BuildContext:
        return BuildContext(
            vocab=setting.vocab,
            network=None,
            drafts=tuple(d.runner() for d in drafts),
            references=tuple(texts),
            eos=setting.eos,
            codec=codec,
            draft_codecs=tuple(d.codec for d in drafts),
        )

    return [_method_replay(setting, spec, context) for spec in specs.values()]


def _method_replay(setting: RecordingSettings, spec: MethodSpec, context: Callable[[], BuildContext]) -> MethodReplay:
    try:
        return MethodReplay(setting, spec, context)
    except ValueError as error:
        raise ValueError(f"{spec.label} cannot be replayed: {error}") from error


def replay_all(
    recordings: Sequence[RecordedQuestion], casts: Sequence[MethodReplay], tick: Callable[[str], None]
) -> list[QuestionResult]:
    """Every method over every question.

    Raises:
        ValueError: an answer came out otherwise than recorded, which no lossless method may do.
    """
    records = []
    for cast in casts:
        for recording in recordings:
            record = cast.replay(recording)
            if [t.tokens for t in record.answers] != [s.tokens for s in recording.answers]:
                raise ValueError(
                    f"{cast.name} answered question {recording.question} otherwise than the recorded target: this is a "
                    f"bug, please report it"
                )
            records.append(record)
            tick(f"{cast.name} {recording.question}")
    return records


def bench_settings(setting: RecordingSettings) -> BenchSettings:
    """The header of results that come from a replay."""
    return BenchSettings(
        model=setting.model, tasks=setting.tasks, digest=setting.digest, max_new_tokens=setting.max_new_tokens,
        temperature=0.0, seed=0,
        threads=1, dtypes=(setting.dtype,),
    )  # fmt: skip


class Baseline(FrozenModel):
    """Pinned counts: tokens and passes by method and question."""

    format: str = "foretell baseline 1"
    counts: dict[str, dict[str, tuple[int, int]]]

    @property
    def methods(self) -> list[str]:
        """As users name them."""
        return [name.split("/")[0] for name in self.counts]

    @staticmethod
    def read(path: Path) -> "Baseline":
        """A pinned file.

        Raises:
            ValueError: it is not one.
        """
        return validate_json(
            Baseline, path.read_bytes(), f"{path}: not a baseline that `foretell bench replay --pin` wrote"
        )

    @staticmethod
    def from_results(records: Sequence[QuestionResult]) -> "Baseline":
        """Counts of a replay or a run; plain decoding left out, whose every pass gives one token."""
        found: dict[str, dict[str, tuple[int, int]]] = {}
        for r in records:
            if r.repeat == 0 and not r.competitor.startswith(f"{PLAIN}/"):
                sums = sum(len(t.tokens) for t in r.answers), sum(t.passes for t in r.answers)
                found.setdefault(r.competitor, {})[r.question] = sums
        return Baseline(counts=found)

    def differences(self, now: "Baseline") -> list[str]:
        """Sentences about everything that is not as pinned."""
        out = []
        for method, questions in self.counts.items():
            for question, (tokens, passes) in questions.items():
                found = now.counts.get(method, {}).get(question)
                if found is None:
                    out.append(f"{method}, question {question}: pinned, but not measured now")
                elif found != (tokens, passes):
                    better = "fewer" if found[1] * tokens < passes * found[0] else "more"
                    out.append(
                        f"{method}, question {question}: {found[0]} tokens in {found[1]} passes, pinned {tokens} in "
                        f"{passes} ({better} per token)"
                    )
        return out
