"""A model that generates with any method."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from foretell.api.answer import Answer
from foretell.api.requests import ModelRequests
from foretell.catalogue import BuildContext, build
from foretell.catalogue.config import SpeculativeConfig
from foretell.catalogue.inputs import NamedInputs
from foretell.catalogue.speculators import read_speculator, speculator_key, trained_speculator
from foretell.core.sampling import SamplingParams
from foretell.engine.budget import Budget
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod
from foretell.engine.pass_times import PassTimes
from foretell.engine.request import Update
from foretell.engine.tuning import PRIOR_PASSES
from foretell.model.cache.policy import CachePolicy
from foretell.model.config.model import ModelConfig
from foretell.model.kernels.expert_cache import ExpertReads
from foretell.model.load.checkpoint import CachedCheckpoint, Checkpoint
from foretell.model.load.expert_offload import ExpertOffloadedDecoder
from foretell.model.load.images import VisionLanguage
from foretell.model.run.adapting_runner import AdaptingRunner
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.evicting_runner import EvictingRunner
from foretell.model.run.network import Network
from foretell.model.run.runner import Runner
from foretell.model.run.vocabulary import ResizedVocabulary
from foretell.plan import Plan, PlanEngine
from foretell.speculator.network import NETWORKS
from foretell.speculator.network.base import Speculator
from foretell.tokenizer.codec import Message, TextCodec
from foretell.utils.names import unknown


class Model(ModelRequests):
    """A loaded language model with its tokenizer; `foretell.load` makes it.

    `network`: the model's weights on the own decoder, or a function that makes a runner of another kind.
    `cache_policy`: which keys and values of long texts it keeps, which is lossy; None: all. `vision`: what reads images
    for it; None: it reads text only. `adapted`: the network with each of the adapters that requests may name.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        codec: TextCodec,
        network: Network | Callable[[], Runner],
        precision: str,
        eos: tuple[int, ...],
        checkpoint: Checkpoint | None = None,
        cache_policy: CachePolicy | None = None,
        vision: VisionLanguage | None = None,
        adapted: Mapping[str, Network] = MappingProxyType({}),
    ) -> None:
        super().__init__(name, config, codec, eos, vision)
        self._network = network if isinstance(network, Network) else None
        self._runner = partial(DecoderRunner, network) if isinstance(network, Network) else network
        self.adapters = tuple(adapted)
        """Names of the adapters that requests choose among."""
        if adapted:
            self._runner = partial(AdaptingRunner, self.network, adapted)
        if cache_policy is not None:
            self._runner = partial(EvictingRunner, self.network, cache_policy)
        self.precision, self._checkpoint = precision, checkpoint
        self._speculators: dict[object, Speculator] = {}
        self.pass_times = PassTimes(expected=self.usual_passes)
        """Seconds of the passes of its engines, which they learn together."""

    @property
    def network(self) -> Network:
        """The model's weights on the own decoder.

        Raises:
            ValueError: transformers runs this model.
        """
        if self._network is None:
            raise self._unsupported_error()
        return self._network

    @property
    def usual_passes(self) -> Mapping[int, float] | None:
        """Times of passes over that of one token by their tokens, of the kernels that run the model; None: unknown."""
        return None if self._network is None else PRIOR_PASSES.get(self._network.backend.instructions)

    @property
    def expert_reads(self) -> ExpertReads | None:
        """Which experts were in memory, read ahead or waited for since the model was loaded; None: its experts are not
        read one by one.
        """
        return self._network.reads if isinstance(self._network, ExpertOffloadedDecoder) else None

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that the model came from.

        Raises:
            ValueError: transformers runs this model.
        """
        if self._checkpoint is None:
            raise self._unsupported_error()
        return self._checkpoint

    def _unsupported_error(self) -> ValueError:
        return ValueError(
            f"{self.name}: this needs a model of the own decoder, and transformers runs {self.config.architecture!r}"
        )

    def cache_checkpoint(self) -> None:
        """Keep changed copies of the weights in memory, so that several methods that draft with them read them once."""
        self._checkpoint = None if self._checkpoint is None else CachedCheckpoint(self._checkpoint)

    def runner(self) -> Runner:
        """A runner of the model with an empty cache."""
        return self._runner()

    def method(
        self,
        name: str = "autoregressive",
        config: SpeculativeConfig | Mapping[str, object] | None = None,
        *,
        drafts: "Sequence[Model | Path]" = (),
        references: Sequence[str] = (),
        shared: bool = False,
    ) -> AnyMethod:
        """Build a method of the catalogue for this model, with its initial state.

        `config`: the method's options by name; `foretell methods NAME` lists them. `drafts`: draft models, and
        directories of trained speculators; where none is named, methods use the one installed for this model.
        `references`: documents to draft from. `shared`: they are for several methods, of which this one uses what it
        can (`Method.inputs` says what that was).

        Raises:
            ValueError: unknown name, an option that the method does not have, something that it needs is missing or
                does not fit, or drafts or references that are not shared and that it does not use.
        """
        method = build(name, self._build_context(drafts, references), config)
        if not shared:
            named_inputs(drafts, references).require_used({method.name: method.inputs})
        return replace(method, drafter_key=_drafter_key(drafts, method.inputs, config))

    def speculator(self, reference: str | Path) -> Speculator:
        """A trained speculator for this model, by its directory or by the kind of an installed one.

        Raises:
            ValueError: there is none, it is damaged, or it is for another model.
        """
        context = self._build_context().with_copies()
        if Path(reference).exists():
            return read_speculator(context, Path(reference))
        if reference not in NETWORKS:
            raise unknown("speculator", str(reference), NETWORKS)
        return trained_speculator(context, str(reference))

    def _build_context(self, drafts: "Sequence[Model | Path]" = (), references: Sequence[str] = ()) -> BuildContext:
        models = [d for d in drafts if isinstance(d, Model)]
        return BuildContext(
            vocab=self.config.vocab,
            network=self._network,
            drafts=tuple(map(self._draft_runner, models)),
            references=tuple(tuple(self.codec.encode(r, add_special_tokens=False)) for r in references),
            eos=self.eos,
            codec=self.codec,
            draft_codecs=tuple(d.codec for d in models),
            draft_folders=tuple(None if d._checkpoint is None else d._checkpoint.folder for d in models),
            checkpoint=self._checkpoint,
            known_speculators=self._speculators,
            speculators=tuple(d for d in drafts if isinstance(d, Path)),
        )

    def _draft_runner(self, draft: "Model") -> Runner:
        """A runner of a draft model; with this model's number of tokens, where one tokenizer is padded to two sizes."""
        runner, vocab = draft.runner(), self.config.vocab
        padded = runner.vocab != vocab and draft.codec.has_same_tokens(self.codec)
        if padded and type(runner) is DecoderRunner:
            return DecoderRunner(ResizedVocabulary(runner.network, vocab))
        return runner

    def engine(
        self,
        method: AnyMethod | str = "autoregressive",
        rows: int = 16,
        prefix_caching: bool = False,
        *,
        every_method: bool = False,
        disable_by_batch_size: int | None = None,
        itl_target: float | None = None,
        cache_bytes: int | None = None,
    ) -> Engine:
        """An engine that serves this model, at most `rows` requests at a time. `method` decodes the requests that
        name no method; `every_method` and `disable_by_batch_size` are its `Budget`'s; for the others see `Engine`.
        """
        return Engine(
            self.runner(),
            self.method(method) if isinstance(method, str) else method,
            rows=rows,
            detokenizer=self.codec.detokenizer,
            prefix_caching=prefix_caching,
            budget=Budget(self.pass_times, every_method=every_method, disable_by_batch_size=disable_by_batch_size),
            itl_target=itl_target,
            cache_bytes=cache_bytes,
        )

    def plan_engine(self, method: AnyMethod | str = "autoregressive", rows: int = 16, **options: Any) -> PlanEngine:
        """An engine for plans; `options`: those of `engine`."""
        return PlanEngine(self.engine(method, rows, prefix_caching=True, **options))

    def stream(
        self,
        prompt: str | Sequence[Message],
        method: AnyMethod | str = "autoregressive",
        sampling: SamplingParams | None = None,
        *,
        plan: Plan | str | Mapping[str, object] | None = None,
        **options: Any,
    ) -> Iterator[Update]:
        """Generate one answer and yield its updates, one per step. `plan`, `options`: see `generate`."""
        if plan is not None:
            planned = self.plan_engine(method)
            planned.submit(self.plan_run(prompt, plan, sampling, **options))
            yield from planned.run()
            return
        engine = self.engine(method, rows=1)
        engine.submit(self.request(prompt, sampling, **options))
        yield from engine.run()

    def generate(
        self,
        prompts: str | Sequence[str],
        method: AnyMethod | str = "autoregressive",
        sampling: SamplingParams | None = None,
        *,
        rows: int = 16,
        plan: Plan | str | Mapping[str, object] | None = None,
        **options: Any,
    ) -> list[Answer]:
        """Answer one prompt or several, at most `rows` at a time; answers come in the order of the prompts. `options`:
        those of `request`. `plan`: how the answers are put together from several requests, which is lossy; see
        `plan_run`.

        A request that fails ends with `finish_reason` `error`; the others continue.
        """
        prompts = [prompts] if isinstance(prompts, str) else prompts
        if plan is not None:
            planned, runs = (
                self.plan_engine(method, rows),
                [self.plan_run(p, plan, sampling, **options) for p in prompts],
            )
            pairs = zip(planned.complete(runs), runs, strict=True)
            return [Answer.from_completion(c, planned.engine, plan=run.report) for c, run in pairs]
        engine = self.engine(method, rows=rows)
        completions = engine.complete([self.request(p, sampling, **options) for p in prompts], raise_errors=False)
        return [Answer.from_completion(c, engine) for c in completions]


def named_inputs(drafts: Sequence[Model | Path], references: Sequence[str] = ()) -> NamedInputs:
    """What was named for methods to draft with, as error messages call it."""
    return NamedInputs(
        [d.name for d in drafts if isinstance(d, Model)],
        [str(d) for d in drafts if isinstance(d, Path)],
        [f"of {len(text):,} characters" for text in references],
    )


def _drafter_key(
    drafts: Sequence[Model | Path], inputs: frozenset[str], config: SpeculativeConfig | Mapping[str, object] | None
) -> str:
    """Identifies what a method with these inputs and options drafts with, of `drafts` the draft models by sizes and
    precision, on which their times depend. Empty: neither options nor any of them.
    """
    models = [f"{d.config} {d.precision}" for d in drafts if isinstance(d, Model) and "drafts" in inputs]
    folders = [str(speculator_key(d)) for d in drafts if isinstance(d, Path) and "speculators" in inputs]
    options = sorted((config.options if isinstance(config, SpeculativeConfig) else config or {}).items())
    used = "\n".join([*models, *folders, *map(str, options)])
    return hashlib.sha256(used.encode()).hexdigest()[:8] if used else ""
