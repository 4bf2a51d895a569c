"""Requests for a model: the tokens of prompts, behind images or not, and what answers must match."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from foretell.core.parameters import PARAMETERS
from foretell.core.sampling import SamplingParams
from foretell.core.token_rules import TokenConstraint
from foretell.engine.method import AnyMethod
from foretell.engine.request import Request
from foretell.model.config.model import ModelConfig
from foretell.model.load.images import UNREAD, ImagePrompt, ReadImage, VisionLanguage
from foretell.plan import Plan, PlanRun, PlanTask, parse_plan, question_of
from foretell.structured.compiler import ConstraintCompiler
from foretell.structured.outputs import StructuredOutputs
from foretell.tokenizer.codec import Message, TextCodec


class ModelRequests:
    """A model as far as its requests depend on it: name, configuration, tokenizer, the tokens that end an answer, and
    what reads images for it; None: it reads text only.
    """

    def __init__(
        self, name: str, config: ModelConfig, codec: TextCodec, eos: tuple[int, ...], vision: VisionLanguage | None
    ) -> None:
        self.name, self.config, self.codec, self.eos, self.vision = name, config, codec, eos, vision
        self._images: ImagePrompt | None = None

    def with_images(self, images: Sequence[Path], prompt: str, raw: bool = False) -> Self:
        """This model behind one prompt with images: whatever it is asked, it reads the images and then this text.

        `raw`: the text itself names the places of the images, and the chat template is not applied.

        Raises:
            ValueError: it reads text only, or cannot read these images or this prompt.
        """
        vision = self.vision
        if vision is None:
            raise ValueError(
                f"{self.name} reads text only: leave out the image, or give a model of the kind of SmolVLM, Idefics 3, "
                f"Llava or Qwen2.5-VL, in one process; {UNREAD}"
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
