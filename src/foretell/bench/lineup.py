"""From names to a session: models loaded, methods and peers ready."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foretell.api import Model
from foretell.bench.contender import PLAIN, Contender, Limits, OwnContender, PeerContender, Spec, conversation
from foretell.bench.memory import Task, peak
from foretell.bench.peers import choose
from foretell.bench.schema import Settings
from foretell.bench.session import Session
from foretell.bench.tasks import Question
from foretell.load import load, load_draft


@dataclass(frozen=True)
class Lineup:
    """Who takes part, under which settings. Names are checked before anything is loaded."""

    settings: Settings
    methods: tuple[Spec, ...]
    peers: tuple[str, ...]
    folder: Path
    """Where GGUF files for llama.cpp go."""

    @staticmethod
    def of(settings: Settings, methods: Sequence[str], peers: Sequence[str], folder: Path) -> "Lineup":
        """Plain decoding is always in it, and first.

        Raises:
            ValueError: an unknown method or peer, a peer that is not installed, or peers at a temperature above 0.
        """
        specs = {s.text: s for s in map(Spec.parse, [PLAIN, *methods])}
        names = choose.expand(peers, settings.dtypes[0], settings.draft_model is not None)
        if names and settings.temperature > 0:
            raise ValueError("peers are measured at temperature 0 only: leave out --peers, or the temperature")
        choose.check(names)
        return Lineup(settings, tuple(specs.values()), tuple(names), folder)

    def models(self) -> dict[str, Model]:
        """The target at every precision; changed copies of it, which some methods draft with, are read once."""
        found = {d: load(self.settings.model, d, self.settings.device) for d in self.settings.dtypes}
        for model in found.values():
            model.cache_checkpoint()
        return found

    def session(self, models: dict[str, Model], repeats: int) -> Session:
        """Everyone, ready to answer."""
        s = self.settings
        limits = Limits(s.max_new_tokens, s.temperature, s.seed, s.remember)
        references = [Path(r).read_text("utf-8") for r in s.references]
        contenders: list[Contender] = []
        for precision, model in models.items():
            drafts = [load_draft(r, precision, s.device) for r in (s.draft_model or "").split(",") if r]
            contenders += [OwnContender(model, spec, limits, drafts, references) for spec in self.methods]
        first = next(iter(models.values()))
        peers = choose.peers(self.peers, self._setting(first))
        contenders += [PeerContender(p, first) for p in peers.values()]
        return Session(contenders, models, repeats)

    def _setting(self, model: Model) -> choose.Setting:
        s = self.settings
        return choose.Setting(
            s.model, s.draft_model, model.precision, min(model.config.context, 4096), s.threads, self.folder
        )

    def memory(self, session: Session, questions: Sequence[Question]) -> dict[str, int]:
        """Peak memory by contender, measured in processes of their own, on the question with the longest first turn."""
        model = next(iter(session.models.values()))
        longest = max((q.turns[0] for q in questions), key=len)
        prompt = tuple(conversation(model, [{"role": "user", "content": longest}]))
        s = self.settings
        found = {
            c.name: peak(
                Task(
                    contender=c.name,
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
            for c in session.contenders
        }
        return {name: value for name, value in found.items() if value is not None}
