"""From names to a session: models loaded, methods and peers ready."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foretell.api import Model
from foretell.bench.competitor import (
    PLAIN,
    Competitor,
    GenerationSettings,
    MethodCompetitor,
    MethodSpec,
    PeerCompetitor,
    conversation,
)
from foretell.bench.memory import MemoryTask, measure_peak_memory
from foretell.bench.peers import registry as choose
from foretell.bench.questions import Question
from foretell.bench.run import BenchRun
from foretell.bench.schema import BenchSettings
from foretell.load import load, load_draft


@dataclass(frozen=True)
class BenchPlan:
    """Who takes part, under which settings. Names are checked before anything is loaded."""

    settings: BenchSettings
    methods: tuple[MethodSpec, ...]
    peers: tuple[str, ...]
    folder: Path
    """Where GGUF files for llama.cpp go."""

    @staticmethod
    def from_settings(
        settings: BenchSettings, methods: Sequence[str], peers: Sequence[str], folder: Path
    ) -> "BenchPlan":
        """Plain decoding is always in it, and first.

        Raises:
            ValueError: an unknown method or peer, a peer that is not installed, or peers at a temperature above 0.
        """
        specs = {s.label: s for s in map(MethodSpec.parse, [PLAIN, *methods])}
        names = choose.expand_names(peers, settings.dtypes[0], settings.draft_model is not None)
        if names and settings.temperature > 0:
            raise ValueError("peers are measured at temperature 0 only: leave out --peers, or the temperature")
        choose.require_installed(names)
        return BenchPlan(settings, tuple(specs.values()), tuple(names), folder)

    def load_models(self) -> dict[str, Model]:
        """The target at every precision; changed copies of it, which some methods draft with, are read once."""
        found = {d: load(self.settings.model, d, self.settings.device) for d in self.settings.dtypes}
        for model in found.values():
            model.remember_copies()
        return found

    def create_run(self, models: dict[str, Model], repeats: int) -> BenchRun:
        """Everyone, ready to answer."""
        s = self.settings
        limits = GenerationSettings(s.max_new_tokens, s.temperature, s.seed, s.remember)
        references = [Path(r).read_text("utf-8") for r in s.references]
        competitors: list[Competitor] = []
        for precision, model in models.items():
            drafts = [load_draft(r, precision, s.device) for r in (s.draft_model or "").split(",") if r]
            competitors += [MethodCompetitor(model, spec, limits, drafts, references) for spec in self.methods]
        first = next(iter(models.values()))
        peers = choose.load_peers(self.peers, self._setting(first))
        competitors += [PeerCompetitor(p, first) for p in peers.values()]
        return BenchRun(competitors, models, repeats)

    def _setting(self, model: Model) -> choose.PeerSettings:
        s = self.settings
        return choose.PeerSettings(
            s.model, s.draft_model, model.precision, min(model.config.context, 4096), s.threads, self.folder
        )

    def measure_memory(self, session: BenchRun, questions: Sequence[Question]) -> dict[str, int]:
        """Peak memory by competitor, measured in processes of their own, on the question with the longest first turn."""
        model = next(iter(session.models.values()))
        longest = max((q.turns[0] for q in questions), key=len)
        prompt = tuple(conversation(model, [{"role": "user", "content": longest}]))
        s = self.settings
        found = {
            c.name: measure_peak_memory(
                MemoryTask(
                    competitor=c.name,
                    model=s.model,
                    draft_model=s.draft_model,
                    references=tuple(Path(r).read_text("utf-8") for r in s.references),
                    threads=s.threads,
                    device=s.device,
                    context=self._setting(model).context,
                    folder=str(self.folder),
                    prompt=prompt,
                    max_new_tokens=s.max_new_tokens,
                )
            )
            for c in session.competitors
        }
        return {name: value for name, value in found.items() if value is not None}
