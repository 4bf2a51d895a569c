"""From settings and names to a run: loads models, methods and peers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foretell.api import Model
from foretell.bench.competitor import (
    Competitor,
    Conversation,
    GenerationSettings,
    MethodCompetitor,
    MethodSpec,
    PeerCompetitor,
    load_drafts,
    use_of_inputs,
)
from foretell.bench.memory import MemoryTask, measure_peak_memory
from foretell.bench.peers import registry
from foretell.bench.questions import Question
from foretell.bench.run import BenchRun
from foretell.bench.schema import BenchSettings
from foretell.catalogue import DEFAULT_METHOD
from foretell.core.target_options import PLAIN_TARGET
from foretell.load import load_target
from foretell.model.load.native import finish_writing

_PEER_CONTEXT = 4096
"""Longest sequence of a peer, in tokens: its cache is allocated at once."""


@dataclass(frozen=True)
class BenchPlan:
    """Competitors and settings of a run. Names are checked before anything is loaded."""

    settings: BenchSettings
    methods: tuple[MethodSpec, ...]
    peers: tuple[str, ...]
    folder: Path
    """Where GGUF files for llama.cpp go."""
    optional: frozenset[str] = frozenset()
    """Labels of methods that are left out, with a note, where a model cannot run them; of others this is an error."""

    @staticmethod
    def from_settings(
        settings: BenchSettings,
        methods: Sequence[str],
        peers: Sequence[str],
        folder: Path,
        optional: Sequence[str] = (),
    ) -> "BenchPlan":
        """Resolve names; plain decoding is always included, and first. `methods`: see `MethodSpec.parse`; `optional`:
        further ones, which are left out where a model cannot run them.

        Raises:
            ValueError: an unknown method or peer, a peer that is not installed, peers at a temperature or batch
                above 0 or 1, or beside a target with options.
        """
        required = {s.label for s in MethodSpec.parse_all(methods)}
        specs = MethodSpec.parse_all([*methods, *optional])
        names = registry.expand_names(peers, settings.dtypes[0], settings.draft_model is not None)
        if names and settings.temperature > 0:
            raise ValueError("peers are measured at temperature 0 only: leave out --peers, or the temperature")
        if names and settings.batch > 1:
            raise ValueError("peers answer one question at a time: leave out --peers, or --batch")
        if names and settings.target != PLAIN_TARGET:
            raise ValueError(
                "peers run the model as it is: leave out --peers, or --max-model-len, --rope-scaling, "
                "--kv-cache-dtype, --kv-cache-policy, --sparsity and --lora"
            )
        registry.require_installed(names)
        return BenchPlan(settings, tuple(specs), tuple(names), folder, frozenset(s.label for s in specs) - required)

    def load_models(self) -> dict[str, Model]:
        """The target by precision. Modified copies of it, which some methods draft with, are loaded once."""
        s = self.settings
        models = {d: load_target(s.target, s.model, d, s.device, s.memory_limit) for d in s.dtypes}
        for model in models.values():
            model.cache_checkpoint()
        finish_writing()
        return models

    def create_run(self, models: dict[str, Model], repeats: int) -> BenchRun:
        """Build all competitors.

        Raises:
            ValueError: a method that is not optional cannot be built, or none uses the draft model or the references.
        """
        s = self.settings
        generation = GenerationSettings(s.max_new_tokens, s.temperature, s.seed, s.remember, s.batch)
        references = [Path(r).read_text("utf-8") for r in s.references]
        methods, notes = list[MethodCompetitor](), list[str]()
        for precision, model in models.items():
            for spec in self.methods:
                own = spec.config.model
                drafts = load_drafts(own or s.draft_model, precision, s.device)
                try:
                    methods.append(MethodCompetitor(model, spec, generation, drafts, references, own_drafts=bool(own)))
                    if spec.method == DEFAULT_METHOD:
                        notes.append(f"{spec.label} drafts with {methods[-1].drafter}")
                except ValueError as error:
                    if spec.label not in self.optional:
                        raise
                    notes.append(f"{spec.label} is left out: {error}")
        first = next(iter(models.values()))
        peers = registry.load_peers(self.peers, self._peer_settings(first))
        assisted = [name for name in self.peers if registry.drafts_with_model(name)]
        competitors: list[Competitor] = [*methods, *(PeerCompetitor(p, first) for p in peers.values())]
        notes += use_of_inputs(methods, assisted)
        return BenchRun(competitors, models, repeats, s.batch, tuple(dict.fromkeys(notes)))

    def _peer_settings(self, model: Model) -> registry.PeerSettings:
        s, context = self.settings, min(model.config.context, _PEER_CONTEXT)
        return registry.PeerSettings(s.model, s.draft_model, model.precision, context, s.threads, self.folder)

    def measure_memory(self, run: BenchRun, questions: Sequence[Question]) -> dict[str, int]:
        """Peak memory in bytes by competitor, each in a process of its own, on the longest first turn."""
        model = next(iter(run.models.values()))
        prompt = tuple(Conversation(model).add_user(max((q.turns[0] for q in questions), key=len)))
        context = self._peer_settings(model).context
        sources = {spec.label: spec.source for spec in self.methods}
        peaks = dict[str, int | None]()
        for name in (c.name for c in run.competitors):
            task = MemoryTask(
                competitor=name, method=sources.get(name.split("/")[0]), settings=self.settings, context=context,
                folder=str(self.folder), prompt=prompt,
            )  # fmt: skip
            peaks[name] = measure_peak_memory(task)
        return {name: peak for name, peak in peaks.items() if peak is not None}
