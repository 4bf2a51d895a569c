"""Hugging Face transformers as a peer, with weights taken from the same checkpoint file as ours."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from foretell.bench.peers.base import LOOKUP_NGRAM, LOOKUP_TOKENS, ForwardBackend, Peer
from foretell.bench.timestamps import TokenTimer, TokenTimestamps
from foretell.model.load.gguf import GGUF
from foretell.model.load.gguf_header import gguf_config
from foretell.model.load.gguf_weights import GGUFWeights
from foretell.model.load.reference import resolve_reference
from foretell.model.load.transformers import cache_argument, import_transformers, load_error
from foretell.speculator.hf_writer import llama_config

Mode = Literal["plain", "lookup", "assisted"]
PURPOSE = "the peer transformers is this library"


def load(reference: str, dtype: torch.dtype) -> Any:
    """Load a transformers causal LM with this checkpoint's weights; it has no end-of-sequence token.

    Raises:
        ValueError: transformers is missing or cannot load the model, or the GGUF file's architecture is not mapped
            here.
    """
    package, path = import_transformers(PURPOSE), resolve_reference(reference)
    if path.is_dir():
        try:
            model = package.AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                attn_implementation="sdpa",  # its default; a configuration could name one that is downloaded code
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
            )
        except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
            raise load_error(path, error) from error
    else:
        model = _from_gguf(package, path, dtype)
    model.generation_config = package.GenerationConfig(do_sample=False, pad_token_id=0)
    return model.eval()


def _from_gguf(package: Any, path: Path, dtype: torch.dtype) -> Any:
    """Build it with our own GGUF reader, which is many times as fast as that of transformers."""
    file = GGUF(path)
    config = gguf_config(file)
    if config.architecture != "llama" or config.rope is None or config.rope.kind != "default":
        raise ValueError(
            f"{path.name}: for the peer transformers only GGUF files of plain Llama models are converted, this one is "
            f"{config.architecture}; "
            "give a directory with config.json and safetensors"
        )
    weights = GGUFWeights(file, config)
    tied = "output.weight" not in file.tensors
    with torch.device("meta"):
        model = package.LlamaForCausalLM(package.LlamaConfig.from_dict(llama_config(replace(config, tied=tied), dtype)))
    state = {
        n: weights.require(n, *t.shape).to(dtype)
        for n, t in model.state_dict().items()
        if not (tied and n == "lm_head.weight")
    }
    model.load_state_dict(state, strict=not tied, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model


class _TimingStreamer:
    """A streamer of `generate` that times tokens; the first tensor that it receives is the prompt."""

    def __init__(self) -> None:
        self.timer, self._expects_prompt = TokenTimer(), True

    def put(self, value: torch.Tensor) -> None:
        if self._expects_prompt:
            self._expects_prompt = False
            return
        self.timer.add(value.flatten().tolist())

    def end(self) -> None:
        return


class TransformersPeer(Peer):
    """`generate` of transformers: plain, with prompt lookup, or with an assistant model."""

    def __init__(self, model: Any, mode: Mode = "plain", assistant: Any = None, name: str = "transformers") -> None:
        if mode == "assisted" and assistant is None:
            raise ValueError("the peer transformers-assisted needs a draft model: name one with --draft-model")
        self.name, self._model = name, model
        modes: dict[Mode, dict[str, Any]] = {
            "plain": {},
            "lookup": {"prompt_lookup_num_tokens": LOOKUP_TOKENS, "max_matching_ngram_size": LOOKUP_NGRAM},
            "assisted": {"assistant_model": assistant},
        }
        self._options = modes[mode]

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], count: int) -> TokenTimestamps:
        """Generate exactly `count` tokens."""
        ids = torch.tensor([list(prompt)])
        streamer = _TimingStreamer()
        self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, streamer=streamer, **self._options
        )
        return streamer.timer.timestamps(count)


class TransformersForwardBackend(ForwardBackend):
    """The eager forward pass with a dynamic cache."""

    def __init__(self, model: Any, name: str = "transformers eager") -> None:
        self.name, self._model = name, model
        self._cache: Any = None
        self._added = 0

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int]) -> None:
        """Read the prefix."""
        self._cache = import_transformers(PURPOSE).DynamicCache(config=self._model.config)
        self._added = 0
        self._run(tokens, logits_to_keep=1)

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int]) -> None:
        """One pass over new tokens."""
        self._run(tokens)
        self._added += len(tokens)

    def rollback(self) -> None:
        """Crop the cache to the prefix."""
        if self._added:
            self._cache.crop(-self._added)
        self._added = 0

    def _run(self, tokens: Sequence[int], **options: Any) -> None:
        cache = {cache_argument(self._model): self._cache}
        self._model(torch.tensor([list(tokens)]), use_cache=True, **cache, **options)
