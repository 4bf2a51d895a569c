"""Hugging Face transformers as a peer, with weights taken from the same checkpoint file as ours."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from foretell.bench.arrivals import Arrivals, Clock
from foretell.bench.peers.base import Peer, Stepper
from foretell.load import resolve_reference
from foretell.model.config import ModelConfig
from foretell.model.load.gguf import GGUF
from foretell.model.load.transformers import cannot_load
from foretell.model.load.weights import GGUFWeights, gguf_config

Mode = Literal["plain", "lookup", "assisted"]


def transformers() -> Any:
    """The package.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import transformers as package
    except ImportError as error:
        raise ValueError("the peer transformers is not installed; run: pip install 'foretell[peers]'") from error
    return package


def load(reference: str, dtype: torch.dtype) -> Any:
    """A transformers causal LM with this checkpoint's weights, ready to generate without an end of sequence.

    Raises:
        ValueError: transformers is missing or cannot load the model, or the GGUF file's architecture is not mapped
            here.
    """
    package, path = transformers(), resolve_reference(reference)
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
            raise cannot_load(path, error) from error
    else:
        model = _from_gguf(package, path, dtype)
    model.generation_config = package.GenerationConfig(do_sample=False, pad_token_id=0)
    return model.eval()


def _from_gguf(package: Any, path: Path, dtype: torch.dtype) -> Any:
    """Built from our own reading of the file: transformers' own takes many times as long."""
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
        model = package.LlamaForCausalLM(_llama_config(package, config, tied))
    state = {
        n: weights.need(n, *t.shape).to(dtype)
        for n, t in model.state_dict().items()
        if not (tied and n == "lm_head.weight")
    }
    model.load_state_dict(state, strict=not tied, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model


def _llama_config(package: Any, c: ModelConfig, tied: bool) -> Any:
    assert c.rope is not None
    return package.LlamaConfig(
        vocab_size=c.vocab,
        hidden_size=c.hidden,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        intermediate_size=c.ffn,
        max_position_embeddings=c.context,
        rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
        tie_word_embeddings=tied,
        attention_bias=c.qkv_bias,
    )


class _Stream:
    """Tells the clock about every token that `generate` streams; the first thing it streams is the prompt."""

    def __init__(self) -> None:
        self.clock, self._prompt = Clock(), True

    def put(self, value: torch.Tensor) -> None:
        if self._prompt:
            self._prompt = False
            return
        self.clock.note(value.flatten().tolist())

    def end(self) -> None:
        return


class Transformers(Peer):
    """`generate` of transformers: plain, with prompt lookup (n-grams up to 3, 10 tokens), or with an assistant
    model.
    """

    def __init__(self, model: Any, mode: Mode = "plain", assistant: Any = None, name: str = "transformers") -> None:
        if mode == "assisted" and assistant is None:
            raise ValueError("the peer transformers-assisted needs a draft model: name one with --draft-model")
        self.name, self._model = name, model
        modes: dict[Mode, dict[str, Any]] = {
            "plain": {},
            "lookup": {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3},
            "assisted": {"assistant_model": assistant},
        }
        self._options = modes[mode]

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], count: int) -> Arrivals:
        """Exactly `count` tokens after the prompt."""
        ids = torch.tensor([list(prompt)])
        stream = _Stream()
        self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, streamer=stream, **self._options
        )
        return stream.clock.stop(count)


class TransformersStepper(Stepper):
    """The eager forward pass with a dynamic cache, cropped after every pass."""

    def __init__(self, model: Any, name: str = "transformers eager") -> None:
        self.name, self._model = name, model
        self._cache: Any = None
        self._added = 0

    @torch.inference_mode()
    def hold(self, text: Sequence[int]) -> None:
        """Read the text that every pass continues."""
        self._cache = transformers().DynamicCache(config=self._model.config)
        self._added = 0
        self._model(torch.tensor([list(text)]), past_key_values=self._cache, use_cache=True, logits_to_keep=1)

    @torch.inference_mode()
    def read(self, tokens: Sequence[int]) -> None:
        """One pass over new tokens."""
        self._model(torch.tensor([list(tokens)]), past_key_values=self._cache, use_cache=True)
        self._added += len(tokens)

    def forget(self) -> None:
        """Drop what the last pass added."""
        if self._added:
            self._cache.crop(-self._added)
        self._added = 0
