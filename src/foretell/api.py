"""What users hold: a model that generates with any method, and what it generated."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from foretell.catalogue import Parts, build
from foretell.catalogue.trained import read, trained
from foretell.config import SpeculativeConfig
from foretell.draft.network import NETWORKS
from foretell.draft.network.base import Speculator
from foretell.engine import Completion, Engine, Request, Update, describe
from foretell.method import AnyMethod
from foretell.model.config import ModelConfig
from foretell.model.runner import DecoderRunner, Network, Runner
from foretell.model.source import Remembered, Source
from foretell.names import unknown
from foretell.sampling import Sampling
from foretell.statistics import Statistics
from foretell.text import Message, TextCodec


@dataclass(frozen=True)
class Answer:
    """One generated text, with what it cost."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    method: str
    lossless: bool
    statistics: Statistics
    logprobs: tuple[float, ...] = ()
    error: str = ""
    """What ended it, where `finish_reason` is `error`."""

    @staticmethod
    def of(completion: Completion, method: AnyMethod) -> "Answer":
        """What a request got from a method."""
        return Answer(
            text=completion.text,
            tokens=completion.tokens,
            finish_reason=completion.finish_reason,
            method=method.name,
            lossless=method.lossless,
            statistics=completion.statistics,
            logprobs=completion.logprobs,
            error="" if completion.error is None else describe(completion.error),
        )


class Model:
    """A language model ready to generate: weights, tokenizer, and the methods that decode it.

    Made by `foretell.load`. `network`: its weights on the own decoder, or what makes a runner of any other kind.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        codec: TextCodec,
        network: Network | Callable[[], Runner],
        precision: str,
        eos: tuple[int, ...],
        source: Source | None = None,
    ) -> None:
        self.name, self.config, self.codec = name, config, codec
        self._network = network if isinstance(network, Network) else None
        self._runner = partial(DecoderRunner, network) if isinstance(network, Network) else network
        self.precision, self.eos, self._source = precision, eos, source

    @property
    def network(self) -> Network:
        """The model's weights on the own decoder.

        Raises:
            ValueError: transformers runs this model.
        """
        if self._network is None:
            raise self._foreign()
        return self._network

    @property
    def source(self) -> Source:
        """The checkpoint that the model came from.

        Raises:
            ValueError: transformers runs this model.
        """
        if self._source is None:
            raise self._foreign()
        return self._source

    def _foreign(self) -> ValueError:
        return ValueError(
            f"{self.name}: this needs a model of the own decoder, and transformers runs {self.config.architecture!r}"
        )

    def remember_copies(self) -> None:
        """Read changed copies of the weights once, however many methods draft with them."""
        self._source = None if self._source is None else Remembered(self._source)

    def runner(self) -> Runner:
        """The model bound to a fresh cache."""
        return self._runner()

    def method(
        self,
        name: str = "autoregressive",
        config: SpeculativeConfig | None = None,
        *,
        drafts: "Sequence[Model | Path]" = (),
        references: Sequence[str] = (),
    ) -> AnyMethod:
        """A method of the catalogue for this model, with fresh memory.

        `drafts`: draft models, and directories of trained speculators; methods that need one of these take what ships for this model where none is
        named. `references`: texts that may be copied from.

        Raises:
            ValueError: unknown name, or a part that the method needs is missing or does not fit.
        """
        return build(name, self._parts(drafts, references), config)

    def speculator(self, what: str | Path) -> Speculator:
        """A trained speculator for this model: the directory it lies in, or the kind of one that ships.

        Raises:
            ValueError: there is none, it is damaged, or it is for another model.
        """
        parts = self._parts()
        if Path(what).is_dir():
            return read(parts, Path(what))
        if what not in NETWORKS:
            raise unknown("speculator", str(what), NETWORKS)
        return trained(parts, str(what))

    def _parts(self, drafts: "Sequence[Model | Path]" = (), references: Sequence[str] = ()) -> Parts:
        models = [d for d in drafts if isinstance(d, Model)]
        return Parts(
            vocab=self.config.vocab,
            network=self._network,
            drafts=tuple(d.runner() for d in models),
            references=tuple(tuple(self.codec.encode(r, special=False)) for r in references),
            eos=self.eos,
            codec=self.codec,
            draft_codecs=tuple(d.codec for d in models),
            source=self._source,
            speculators=tuple(d for d in drafts if isinstance(d, Path)),
        )

    def engine(
        self, method: AnyMethod | str = "autoregressive", rows: int = 16, prefix_caching: bool = False
    ) -> Engine:
        """An engine that serves this model with one method; see `Engine`."""
        method = self.method(method) if isinstance(method, str) else method
        return Engine(
            self.runner(), method, rows=rows, detokenizer=self.codec.detokenizer, prefix_caching=prefix_caching
        )

    def tokens(self, prompt: str | Sequence[Message], raw: bool = False) -> list[int]:
        """Token ids of a prompt: a conversation, or text (wrapped in the chat template as the user's turn unless `raw`)."""
        if not isinstance(prompt, str):
            return self.codec.chat(prompt)
        if raw or self.codec.chat_template is None:
            return self.codec.encode(prompt)
        return self.codec.chat([{"role": "user", "content": prompt}])

    def request(
        self,
        prompt: str | Sequence[Message],
        sampling: Sampling | None = None,
        *,
        max_new_tokens: int = 256,
        stop: Sequence[str] = (),
        raw: bool = False,
        logprobs: bool = False,
    ) -> Request:
        """A prompt as the engine takes it."""
        if not prompt or (isinstance(prompt, str) and not prompt.strip()):
            raise ValueError("the prompt is empty: write what the model shall answer")
        return Request(
            self.tokens(prompt, raw), sampling or Sampling(), max_new_tokens, tuple(stop), self.eos, logprobs
        )

    def stream(
        self,
        prompt: str | Sequence[Message],
        method: AnyMethod | str = "autoregressive",
        sampling: Sampling | None = None,
        *,
        max_new_tokens: int = 256,
        stop: Sequence[str] = (),
        raw: bool = False,
    ) -> Iterator[Update]:
        """Generate one text, step by step."""
        engine = self.engine(method, rows=1)
        engine.submit(self.request(prompt, sampling, max_new_tokens=max_new_tokens, stop=stop, raw=raw))
        yield from engine.run()

    def generate(
        self,
        prompts: str | Sequence[str],
        method: AnyMethod | str = "autoregressive",
        sampling: Sampling | None = None,
        *,
        max_new_tokens: int = 256,
        stop: Sequence[str] = (),
        raw: bool = False,
        logprobs: bool = False,
        rows: int = 16,
    ) -> list[Answer]:
        """Generate texts for one prompt or several, decoded together `rows` at a time; answers in the order of the prompts.

        A text that cannot be gone on with ends with `finish_reason` `error`; the others go on.
        """
        prompts = [prompts] if isinstance(prompts, str) else prompts
        engine = self.engine(method, rows=rows)
        requests = [
            self.request(p, sampling, max_new_tokens=max_new_tokens, stop=stop, raw=raw, logprobs=logprobs)
            for p in prompts
        ]
        return [Answer.of(c, engine.method) for c in engine.complete(requests, raise_errors=False)]
