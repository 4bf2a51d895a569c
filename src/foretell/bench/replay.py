"""Replay any method: its tokens per pass on a recorded workload, through the same engine, without running the target.

Exact for greedy decoding with methods that learn from decided tokens only. Limits: no hidden states, no parts of the
target as drafter, lossless methods only. Drafters that learn from the target's scores at rejected or probed nodes
(token recycling, lookahead, Jacobi) see fewer of them than in a real run, because nobody recorded what the target would
have said there; methods that learn from the clock (hybrid) decide otherwise than on a real target. Times are of the
replay and mean nothing.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from foretell.bench.contender import PLAIN, Spec, Watched
from foretell.bench.schema import Frozen, Record, Settings, Turn
from foretell.bench.scripted import Recording, RecordingSettings, ScriptedRunner
from foretell.catalogue import BuildContext, build
from foretell.engine.engine import Engine, Request
from foretell.load import load as load_model
from foretell.model.runner import Runner
from foretell.utils.store import read_records, read_settings
from foretell.utils.validation import validate_json


def load(folder: Path) -> tuple[RecordingSettings, list[Recording]]:
    """A complete recording.

    Raises:
        ValueError: there is none here, it is damaged, or it was interrupted.
    """
    setting = read_settings(folder, RecordingSettings)
    recordings = list(read_records(folder, Recording))
    if len(recordings) < setting.questions:
        raise ValueError(
            f"{folder}: the recording was interrupted, it holds {len(recordings)} of {setting.questions} questions; "
            "run `foretell bench record` with the same settings and --out to finish it"
        )
    return setting, recordings


class Cast:
    """Makes a fresh method for every question. `context` makes what it is built from."""

    def __init__(self, setting: RecordingSettings, spec: Spec, context: Callable[[], BuildContext]) -> None:
        self.setting, self.spec, self._context = setting, spec, context
        self.name = f"{spec.text}/{setting.dtype}"
        if not self.engine(ScriptedRunner(setting.vocab, setting.context)).method.lossless:
            raise ValueError(
                "it is lossy, and what the target says after a token it did not choose was not recorded; measure it "
                "with `foretell bench run`"
            )

    def engine(self, runner: Runner) -> Engine:
        """An engine with a method that remembers nothing."""
        return Engine(Watched(runner), build(self.spec.method, self._context(), self.spec.config), rows=1)

    def play(self, recording: Recording) -> Record:
        """The method's passes over one question.

        Raises:
            ValueError: the method needs what a recording does not hold.
        """
        scripted = ScriptedRunner(self.setting.vocab, self.setting.context)
        engine = self.engine(scripted)
        watched = engine.runner
        assert isinstance(watched, Watched)
        turns = []
        for script in recording.turns:
            scripted.play(script)
            watched.passes = []
            request = Request(script.prompt, max_new_tokens=self.setting.max_new_tokens, eos=self.setting.eos)
            (done,) = engine.complete([request])
            stats = done.statistics
            tested, accepted = watched.acceptance()
            turns.append(
                Turn(
                    prompt_tokens=len(script.prompt), tokens=done.tokens, at=(), count=(), retokenized=0,
                    passes=stats.target_passes, drafted=stats.drafted, tested=tested, accepted=accepted,
                )
            )  # fmt: skip
        return Record(
            question=recording.question,
            category=recording.category,
            group=recording.group,
            contender=self.name,
            repeat=0,
            turns=tuple(turns),
        )


def casts(
    setting: RecordingSettings, methods: Sequence[str], draft_model: str | None = None, references: Sequence[Path] = ()
) -> list[Cast]:
    """Plain decoding and these methods, ready to play; models are loaded only where drafting needs them.

    Raises:
        ValueError: an unknown or lossy method, or one that needs what is not there.
    """
    specs = {s.text: s for s in map(Spec.parse, [PLAIN, *methods])}
    drafts = [load_model(r, setting.dtype) for r in (draft_model or "").split(",") if r]
    codec = load_model(setting.model, setting.dtype).codec if references or drafts else None
    texts = (
        []
        if codec is None
        else [tuple(codec.encode(p.read_text("utf-8"), add_special_tokens=False)) for p in references]
    )

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

    return [_cast(setting, spec, context) for spec in specs.values()]


def _cast(setting: RecordingSettings, spec: Spec, context: Callable[[], BuildContext]) -> Cast:
    try:
        return Cast(setting, spec, context)
    except ValueError as error:
        raise ValueError(f"{spec.text} cannot be replayed: {error}") from error


def replay(recordings: Sequence[Recording], casts: Sequence[Cast], tick: Callable[[str], None]) -> list[Record]:
    """Every method over every question.

    Raises:
        ValueError: an answer came out otherwise than recorded, which no lossless method may do.
    """
    records = []
    for cast in casts:
        for recording in recordings:
            record = cast.play(recording)
            if [t.tokens for t in record.turns] != [s.tokens for s in recording.turns]:
                raise ValueError(
                    f"{cast.name} answered question {recording.question} otherwise than the recorded target: this is a "
                    f"bug, please report it"
                )
            records.append(record)
            tick(f"{cast.name} {recording.question}")
    return records


def as_settings(setting: RecordingSettings) -> Settings:
    """The header of results that come from a replay."""
    return Settings(
        model=setting.model, tasks=setting.tasks, digest=setting.digest, max_new_tokens=setting.max_new_tokens,
        temperature=0.0, seed=0,
        threads=1, dtypes=(setting.dtype,),
    )  # fmt: skip


class Baseline(Frozen):
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
    def of(records: Sequence[Record]) -> "Baseline":
        """Counts of a replay or a run; plain decoding left out, whose every pass gives one token."""
        found: dict[str, dict[str, tuple[int, int]]] = {}
        for r in records:
            if r.repeat == 0 and not r.contender.startswith(f"{PLAIN}/"):
                sums = sum(len(t.tokens) for t in r.turns), sum(t.passes for t in r.turns)
                found.setdefault(r.contender, {})[r.question] = sums
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
