"""Where a model came from: its checkpoint, which can be read again for changed copies, shared ends and a
fingerprint.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

import torch

from foretell.model.compress import DecoderTransform
from foretell.model.config import ModelConfig
from foretell.model.decoder import Decoder
from foretell.model.embedding_and_head import EmbeddingAndHead
from foretell.model.load.weights import Weights, build_block, build_decoder, build_without_blocks
from foretell.model.runner import Network


def embedding_and_head_of(decoder: Decoder) -> EmbeddingAndHead:
    """Embedding and head of a decoder, sharing its weights."""
    c = decoder.config
    return EmbeddingAndHead(
        decoder.embedding.detach(), decoder.head.weight.detach(), c.embedding_scale, c.logit_softcap
    )


class Checkpoint(ABC):
    """A checkpoint on the own decoder. `weights` are read again by every call."""

    def __init__(self, config: ModelConfig, weights: Weights, device: torch.device) -> None:
        self.config, self._weights, self._device = config, weights, device

    @abstractmethod
    def load_network(self, change: DecoderTransform, dtype: str | None = None) -> Network:
        """The network after a change, in a dtype (None: the model's own), run as fast as this machine can."""

    @property
    def dtype(self) -> torch.dtype:
        """What the model runs in, quantisation of its matrices apart."""
        return torch.bfloat16

    def decoder(self, dtype: torch.dtype, blocks: Sequence[int] | None = None) -> Decoder:
        """The network in plain torch, which training can differentiate through, with all of its blocks or some."""
        if blocks is None:
            return build_decoder(self.config, self._weights, dtype, self._device)
        shell = build_without_blocks(self.config, self._weights, dtype, self._device)
        chosen = [build_block(self.config, i, self._weights, dtype, self._device) for i in blocks]
        return Decoder(self.config, shell.embedding.data, chosen, shell.norm, shell.head)

    def embedding_and_head(self, dtype: torch.dtype = torch.bfloat16) -> EmbeddingAndHead:
        """Embedding and head."""
        return embedding_and_head_of(build_without_blocks(self.config, self._weights, dtype, self._device))

    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that tell models apart, and are the same for every quantisation of one: a hash of
        its norms.
        """
        c, h = self.config, hashlib.sha256()
        h.update(repr((c.architecture, c.vocab, c.hidden, c.layers, c.heads, c.kv_heads, c.ffn)).encode())
        names = [
            f"model.layers.{i}.{n}.weight"
            for i in range(c.layers)
            for n in ("input_layernorm", "post_attention_layernorm")
        ]
        for name in [*names, "model.norm.weight"]:
            h.update(self._weights.require(name, c.hidden).to(torch.bfloat16).view(torch.int16).numpy().tobytes())
        return h.hexdigest()[:16]


class CachedCheckpoint(Checkpoint):
    """A source that gives the same copy to whoever asks for the same change again, and the same ends."""

    def __init__(self, source: Checkpoint) -> None:
        super().__init__(source.config, source._weights, source._device)
        self._source = source
        self._known: dict[object, Network] = {}
        self._ends: dict[torch.dtype, EmbeddingAndHead] = {}

    def embedding_and_head(self, dtype: torch.dtype = torch.bfloat16) -> EmbeddingAndHead:
        """Embedding and head, read at most once."""
        if dtype not in self._ends:
            self._ends[dtype] = self._source.embedding_and_head(dtype)
        return self._ends[dtype]

    @property
    def dtype(self) -> torch.dtype:
        """What the model runs in."""
        return self._source.dtype

    def load_network(self, change: DecoderTransform, dtype: str | None = None) -> Network:
        """The network after a change, read at most once."""
        key: object = (change, dtype)
        if isinstance(change, partial):
            key = (change.func, change.args, tuple(sorted(change.keywords.items())), dtype)
        if key not in self._known:
            self._known[key] = self._source.load_network(change, dtype)
        return self._known[key]
