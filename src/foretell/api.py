"""The Python interface: a model that generates with any method, and its answers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from foretell.catalogue import BuildContext, build
from foretell.catalogue.config import SpeculativeConfig
from foretell.catalogue.inputs import NamedInputs
from foretell.catalogue.speculators import read_speculator, trained_speculator
from foretell.core.parameters import PARAMETERS
from foretell.core.sampling import SamplingParams
from foretell.core.token_rules import TokenConstraint
from foretell.engine.budget import Budget
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod
from foretell.engine.pass_times import PassTimes
from foretell.engine.request import Completion, Request, Update, describe_error
from foretell.model.block.backend import Backend
from foretell.model.cache.policy import CachePolicy
from foretell.model.config.model import ModelConfig
from foretell.model.kernels.expert_cache import ExpertReads
from foretell.model.load.checkpoint import CachedCheckpoint, Checkpoint
from foretell.model.load.expert_offload import ExpertOffloadedDecoder
from foretell.model.load.images import ImagePrompt, ReadImage, VisionLanguage
from foretell.model.run.adapting_runner import AdaptingRunner
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.evicting_runner import EvictingRunner
from foretell.model.run.network import Network
from foretell.model.run.runner import Runner
from foretell.model.run.vocabulary import ResizedVocabulary
from foretell.plan import Plan, PlanEngine, PlanReport, PlanRun, PlanTask, parse_plan, question_of
from foretell.speculator.network import NETWORKS
from foretell.speculator.network.base import Speculator
from foretell.structured.compiler import ConstraintCompiler
from foretell.structured.outputs import StructuredOutputs
from foretell.tokenizer.codec import Message, TextCodec
from foretell.utils.names import unknown


@dataclass(frozen=True, kw_only=True)
class Answer(Completion):
    """A generated text with its tokens and statistics, and what generated it.

    `plan`: how the answer of a plan came about; its `tokens` are those of all requests of the plan.
    """

    method: str
    drafter: str
    """What drafted, in a few words."""
    lossless: bool
    """Whether the method keeps the target's distribution; a plan does not."""
    backend: Backend
    """Implementation and precision of the target's passes."""
    error: str = ""  # type: ignore[assignment]
    """The error message, where `finish_reason` is `error`."""
    plan: PlanReport | None = None

    @staticmethod
    def from_completion(
        completion: Completion, engine: Engine, method: AnyMethod | None = None, plan: PlanReport | None = None
    ) -> "Answer":
        """The answer of a request that an engine has completed; `method`: the request's own, if it named one; `plan`:
        the report of the plan that wrote it.
        """
        method = method or engine.method
        own: dict[str, Any] = {
            "method": method.name,
            "drafter": method.drafter_label or method.draft.label,
            "lossless": method.lossless and plan is None and not engine.runner.backend.lossy,
            "backend": engine.runner.backend,
            "error": "" if completion.error is None else describe_error(completion.error),
            "plan": plan,
        }
        return Answer(**vars(completion) | own)

    @property
    def exact(self) -> bool:
        """Whether the output is bit for bit the same without drafts, in any batch and with any prompt chunks.

        False for a lossless method where a pass over several tokens rounds differently from a pass over one: the
        distribution is then equal up to rounding, and a tie between two tokens may be decided differently.
        """
        return self.lossless and self.backend.batch_invariant


class Model:
    """A loaded language model with its tokenizer; `foretell.load` makes it.

    `network`: the model's weights on the own decoder, or a function that makes a runner of another kind.
    `cache_policy`: which keys and values of long texts it keeps, which is lossy; None: all. `vision`: what reads images
    for it; None: it reads text only. `adapted`: the network
    with each of the adapters that requests may name.
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
        self.name, self.config, self.codec = name, config, codec
        self._network = network if isinstance(network, Network) else None
        self._runner = partial(DecoderRunner, network) if isinstance(network, Network) else network
        self.adapters = tuple(adapted)
        """Names of the adapters that requests choose among."""
        if adapted:
            self._runner = partial(AdaptingRunner, self.network, adapted)
        if cache_policy is not None:
            self._runner = partial(EvictingRunner, self.network, cache_policy)
        self.precision, self.eos, self._checkpoint = precision, eos, checkpoint
        self.vision = vision
        self._images: ImagePrompt | None = None
        self._speculators: dict[object, Speculator] = {}
        self.pass_times = PassTimes()
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

    def with_images(self, images: Sequence[Path], prompt: str, raw: bool = False) -> "Model":
        """This model behind one prompt with images: whatever it is asked, it reads the images and then this text.

        `raw`: the text itself names the places of the images, and the chat template is not applied.

        Raises:
            ValueError: it reads text only, or cannot read these images or this prompt.
        """
        vision = self.vision
        if vision is None:
            raise ValueError(
                f"{self.name} reads text only: leave out the image, or give a model of the kind of SmolVLM, Idefics 3 "
                "or Llava, in one process"
            )
        read = list[ReadImage]()
        for path in images:
            data = path.read_bytes()
            try:
                read.append(vision.read(data))
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
        codec, model = self.codec, copy(self)
        if raw:
            tokens = codec.encode(prompt)
        elif codec.chat_template is None:
            tokens = codec.encode(f"{codec.decode([vision.image_token], False) * len(images)}\n{prompt}")
        else:
            content = [*({"type": "image"} for _ in images), {"type": "text", "text": prompt}]
            tokens = codec.chat([{"role": "user", "content": content}])
        model._images = vision.place(tokens, read)
        return model

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
        return method

    def speculator(self, reference: str | Path) -> Speculator:
        """A trained speculator for this model, by its directory or by the kind of an installed one.

        Raises:
            ValueError: there is none, it is damaged, or it is for another model.
        """
        context = replace(self._build_context(), known_speculators={})  # a copy of its own, which may be trained
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

    def tokens(
        self, prompt: str | Sequence[Message], raw: bool = False, *, allow_special_tokens: bool = False
    ) -> list[int]:
        """Token ids of a prompt: a conversation, or text, which is one user message unless `raw` or the model has no
        chat template.

        The text of a special token inside a message is encoded as ordinary text unless `allow_special_tokens`. Raw text
        is encoded without the chat template, special tokens as such.

        Raises:
            ValueError: a message without role or content, a lone surrogate, or the chat template refuses the
                conversation.
        """
        if self._images is not None:
            return list(self._images.tokens)
        if isinstance(prompt, str) and (raw or self.codec.chat_template is None):
            return self.codec.encode(prompt)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self.codec.chat(messages, allow_special_tokens)

    def constraint(self, outputs: StructuredOutputs, cache_salt: str = "") -> TokenConstraint:
        """The constraint that makes an answer of this model match `outputs`; equal ones are compiled once per salt.

        Raises:
            ValueError: the extra `structured` is not installed, or the schema or grammar is invalid or too large.
        """
        return self._constraints.compile(outputs, cache_salt)

    @cached_property
    def _constraints(self) -> ConstraintCompiler:
        return ConstraintCompiler(self.codec, self.eos)

    def prediction(self, text: str) -> list[int]:
        """The tokens of a predicted output, at most as many as the model reads."""
        return self.codec.encode(text, add_special_tokens=False)[: self.config.context]

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences of these words, at the beginning of a text and after a blank.

        Raises:
            ValueError: a word is empty.
        """
        if not all(words):
            raise ValueError("bad_words has an empty word: leave it out")
        texts = (text for word in words for text in (word.strip() or word, " " + (word.strip() or word)))
        return tuple(dict.fromkeys(tuple(self.codec.encode(text, add_special_tokens=False)) for text in texts))

    def request(
        self,
        prompt: str | Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        raw: bool = False,
        logprobs: bool | int | None = False,
        prompt_logprobs: int | None = None,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        bad_words: str | Sequence[str] = (),
        structured_outputs: StructuredOutputs | None = None,
        prediction: str | None = None,
        allow_special_tokens: bool = False,
        method: AnyMethod | None = None,
        max_drafts: int | None = None,
        adapter: str = "",
    ) -> Request:
        """A request for an engine; for `raw` and `allow_special_tokens` see `tokens`, for the others `Request`.

        `stop`: one stop string, or several. `bad_words`: words that do not occur in the answer, as the tokenizer writes
        them. `structured_outputs`: what the answer must match (extra `structured`). `prediction`: a text that the
        answer is expected to resemble.

        Raises:
            ValueError: the prompt is empty or cannot be encoded, a stop string is no string, a bad word is empty, or
                the structured outputs are invalid.
        """
        if not prompt or (isinstance(prompt, str) and not prompt.strip()):
            raise ValueError("the prompt is empty: write what the model should answer")
        stop_strings, bad_words = PARAMETERS["stop"].read(stop), PARAMETERS["bad_words"].read(bad_words)
        sampling = sampling or SamplingParams()
        if bad_words:
            sampling = replace(sampling, bad_words=(*sampling.bad_words, *self.bad_words(bad_words)))
        return Request(
            self.tokens(prompt, raw, allow_special_tokens=allow_special_tokens),
            sampling,
            max_new_tokens,
            stop_strings,
            self.eos,
            logprobs,
            prompt_logprobs=prompt_logprobs,
            stop_token_ids=tuple(stop_token_ids),
            ignore_eos=ignore_eos,
            include_stop_str_in_output=include_stop_str_in_output,
            skip_special_tokens=skip_special_tokens,
            constraint=None if structured_outputs is None else self.constraint(structured_outputs),
            prediction=None if prediction is None else self.prediction(prediction),
            method=method,
            max_drafts=max_drafts,
            adapter=adapter,
            images=None if self._images is None else self._images.images,
        )

    def plan_run(
        self,
        prompt: str | Sequence[Message],
        plan: Plan | str | Mapping[str, object],
        sampling: SamplingParams | None = None,
        **options: Any,
    ) -> PlanRun:
        """A run of a plan for a `PlanEngine`: `skeleton`, or an object with its type and options. `options`: those of
        `request`.

        Raises:
            ValueError: there is no such plan, the request is invalid or asks for something that a plan cannot give, or
                the model has no chat template.
        """
        if self._images is not None:
            raise ValueError("a plan writes its own prompts, which have no images: leave out the plan, or the image")
        if options.get("raw") or self.codec.chat_template is None:
            raise ValueError("a plan asks the model in a conversation: leave out raw, and take a model with a template")
        messages: Sequence[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        special = bool(options.get("allow_special_tokens"))

        def encode(turns: Sequence[Message], continued: bool) -> list[int]:
            return self.codec.chat([*messages[:-1], *turns], special, continue_final_message=continued)

        request = self.request(prompt, sampling, **options)
        return parse_plan(plan).run(PlanTask(question_of(messages), request, self.codec, encode, self.config.context))

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
