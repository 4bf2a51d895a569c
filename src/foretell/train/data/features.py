"""Hidden states of the target for training: computed batch by batch, or cached on disk."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.model.block.decoder import Decoder
from foretell.model.config.model import ModelConfig
from foretell.model.training.full_forward import CausalAttention, full_forward, inputs_of_layers
from foretell.train.data.hidden_state_cache import HiddenStateCache

_WIDTH_MULTIPLE = 16
"""Widths of batches are rounded up to a multiple of this, so that kernels see few shapes."""


@dataclass(frozen=True)
class DocumentChunk:
    """Tokens `begin .. end-1` of a document."""

    dataset: int
    document: int
    tokens: Int[np.ndarray, " t"]
    """Of the whole document."""
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


def parse_hidden_layers(text: str, highest: int, option: str) -> tuple[int, ...]:
    """Parse a list of hidden layers such as `2,15,27`.

    Raises:
        ValueError: not a list of numbers, or a layer that the target does not have.
    """
    try:
        hidden_layers = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        hidden_layers = (-1,)
    if not all(0 <= hidden_layer <= highest for hidden_layer in hidden_layers):
        raise ValueError(
            f"{option}={text}: layers of the target by number, 0 to {highest}, with commas between, were expected"
        )
    return hidden_layers


@torch.no_grad()
def compute_hidden_states(
    decoder: Decoder,
    token: Int[torch.Tensor, "b s"],
    hidden_layers: Sequence[int],
    attention: CausalAttention | None = None,
) -> tuple[Float[torch.Tensor, "b s d"], ...]:
    """Hidden states of the target for whole sequences, padded at the end, in the dtype of its weights, without a KV
    cache.

    Layers are numbered as in `Runner.forward`.
    """
    layers, done, attention = decoder.config.layers, 0, attention or CausalAttention(decoder.config)
    x, states = decoder.embed(token.reshape(-1)).view(*token.shape, -1), dict[int, torch.Tensor]()
    inputs = inputs_of_layers(decoder, token)
    for stop in sorted({min(t, layers) for t in hidden_layers}):
        x = full_forward(decoder, x, done, stop, attention, inputs)
        states[stop], done = x, stop
    if layers + 1 in hidden_layers:
        states[layers + 1] = decoder.final_norm(x)
    return tuple(states[t].to(decoder.embedding.dtype) for t in hidden_layers)


def padded_width(longest: int) -> int:
    """Width of a batch whose longest sequence has `longest` tokens."""
    return -(-longest // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE


def pad_sequences(sequences: Sequence[Int[np.ndarray, " _"]], width: int) -> Int[torch.Tensor, "b s"]:
    """Sequences as rows of a tensor, padded with zeros at the end."""
    out = torch.zeros(len(sequences), width, dtype=torch.int64)
    for i, sequence in enumerate(sequences):
        out[i, : len(sequence)] = torch.from_numpy(sequence.astype(np.int64))
    return out


class FeatureSource(ABC):
    """Gives the target's hidden states of batches."""

    hidden_layers: tuple[int, ...]

    @abstractmethod
    def get(self, chunks: Sequence[DocumentChunk], width: int) -> tuple[Float[torch.Tensor, "b s d"], ...]:
        """Hidden states of chunks, one tensor per layer; values at padding are finite and have no meaning."""


class StreamedFeatures(FeatureSource):
    """Computes the hidden states of every batch; each chunk is read as if its document began there.

    `decoder` returns the target; it is called at the first batch.
    """

    def __init__(self, decoder: Callable[[], Decoder], hidden_layers: tuple[int, ...]) -> None:
        self._decoder, self.hidden_layers = decoder, hidden_layers

    def get(self, chunks: Sequence[DocumentChunk], width: int) -> tuple[Float[torch.Tensor, "b s d"], ...]:
        """Compute the hidden states of chunks."""
        return self.compute([c.tokens[c.begin : c.end] for c in chunks], width)

    def compute(
        self, sequences: Sequence[Int[np.ndarray, " _"]], width: int
    ) -> tuple[Float[torch.Tensor, "b s d"], ...]:
        """Compute the hidden states of sequences."""
        if not self.hidden_layers:
            return ()
        decoder = self._decoder()
        return compute_hidden_states(decoder, pad_sequences(sequences, width).to(decoder.device), self.hidden_layers)


class CachedFeatures(FeatureSource):
    """Computes the hidden states of every document once and stores them beside the data set.

    Trainings that read the same layers share them. Documents that do not fit into the cache, or into the target's
    context, are computed again for every batch, as `StreamedFeatures` does.

    `caches`: one per data set. `config` and `dtype` are the target's.
    """

    def __init__(
        self,
        streamed: StreamedFeatures,
        caches: Sequence[HiddenStateCache],
        config: ModelConfig,
        dtype: torch.dtype,
    ) -> None:
        self.hidden_layers, self._streamed, self._caches = streamed.hidden_layers, streamed, tuple(caches)
        self._config, self._dtype = config, dtype

    def get(self, chunks: Sequence[DocumentChunk], width: int) -> tuple[Float[torch.Tensor, "b s d"], ...]:
        """Load the hidden states of chunks; missing ones are computed and stored first."""
        cacheable = [i for i, c in enumerate(chunks) if self._is_cacheable(c)]
        others = sorted(set(range(len(chunks))) - set(cacheable))
        self._compute_missing([chunks[i] for i in cacheable])
        shape = (len(chunks), width, self._config.hidden)
        out = [torch.zeros(shape, dtype=torch.bfloat16) for _ in self.hidden_layers]
        for i in cacheable:
            c = chunks[i]
            for to, states in zip(out, self._caches[c.dataset].load(c.document, c.begin, c.end), strict=True):
                to[i, : len(c)] = states
        if others:
            for to, states in zip(out, self._streamed.get([chunks[i] for i in others], width), strict=True):
                to[others] = states.to("cpu", torch.bfloat16)
        return tuple(t.to(self._dtype) for t in out)

    def _is_cacheable(self, chunk: DocumentChunk) -> bool:
        return len(chunk.tokens) <= self._config.context and self._caches[chunk.dataset].fits(chunk.document)

    def _compute_missing(self, chunks: Sequence[DocumentChunk]) -> None:
        # A batch may hold several chunks of a document.
        documents = {
            (c.dataset, c.document): c for c in chunks if not self._caches[c.dataset].contains(c.document, c.tokens)
        }
        if not documents:
            return
        longest = max(len(c.tokens) for c in documents.values())
        states = self._streamed.compute([c.tokens for c in documents.values()], padded_width(longest))
        for i, c in enumerate(documents.values()):
            rows = [state[i, : len(c.tokens)].to("cpu", torch.bfloat16) for state in states]
            self._caches[c.dataset].store(c.document, c.tokens, rows)
