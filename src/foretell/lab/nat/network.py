"""An encoder-decoder of pre-norm Transformer layers, whose decoder may be causal or not."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from pydantic import Field, model_validator
from torch import nn

from foretell.lab.nat.pairs import PAD, MarianWords, Subwords, Vocabulary
from foretell.utils.validation import FrozenModel

Kind = Literal["autoregressive", "cmlm", "glat", "fertility", "sundae"]
KeyValue = tuple[Float[torch.Tensor, "b h s e"], Float[torch.Tensor, "b h s e"]]


class NatConfig(FrozenModel):
    """Configuration of a model, stored as `config.json`; lengths in tokens."""

    kind: Kind
    source_words: tuple[str, ...] = ()
    target_words: tuple[str, ...] = ()
    source_subwords: str = ""
    """Tokenizer of the source's parts of words, as JSON, in place of its words."""
    target_subwords: str = ""
    marian: str = ""
    """Folder of a Marian checkpoint whose parts of words are used."""
    hidden: int = Field(128, ge=8)
    heads: int = Field(4, ge=1)
    layers: int = Field(2, ge=1)
    """Of the encoder, and of the decoder."""
    ffn: int = Field(512, ge=1)
    dropout: float = Field(0.1, ge=0, lt=1)
    max_source: int = Field(ge=1)
    max_target: int = Field(ge=1)
    max_fertility: int = Field(8, ge=1)
    """Most target tokens of a source token, for the kind `fertility`."""

    @model_validator(mode="after")
    def _check_heads(self) -> "NatConfig":
        if self.hidden % self.heads:
            raise ValueError(f"{self.heads} heads do not divide a width of {self.hidden}")
        return self

    @cached_property
    def source(self) -> Vocabulary:
        """Vocabulary of sources."""
        return self._side(self.source_words, self.source_subwords, False)

    @cached_property
    def target(self) -> Vocabulary:
        """Vocabulary of targets."""
        return self._side(self.target_words, self.target_subwords, True)

    def _side(self, words: tuple[str, ...], subwords: str, of_target: bool) -> Vocabulary:
        if self.marian:
            return MarianWords(self.marian, of_target)
        return Subwords(subwords) if subwords else Vocabulary(words)


class _Attention(nn.Module):
    """Multi-head attention; keys and values are computed apart, so that they can be kept."""

    def __init__(self, c: NatConfig) -> None:
        super().__init__()
        self.heads, self.dropout = c.heads, c.dropout
        self.q, self.kv = nn.Linear(c.hidden, c.hidden), nn.Linear(c.hidden, 2 * c.hidden)
        self.out = nn.Linear(c.hidden, c.hidden)

    def _split(self, x: Float[torch.Tensor, "b s d"]) -> Float[torch.Tensor, "b h s e"]:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def keys_values(self, x: Float[torch.Tensor, "b s d"]) -> KeyValue:
        k, v = self.kv(x).chunk(2, -1)
        return self._split(k), self._split(v)

    def forward(
        self, x: Float[torch.Tensor, "b t d"], kv: KeyValue, mask: Bool[torch.Tensor, "#b 1 #t s"] | None
    ) -> Float[torch.Tensor, "b t d"]:
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(self._split(self.q(x)), *kv, attn_mask=mask, dropout_p=dropout)
        mixed: torch.Tensor = self.out(out.transpose(1, 2).flatten(2))
        return mixed

    def weights(
        self, x: Float[torch.Tensor, "b t d"], kv: KeyValue, mask: Bool[torch.Tensor, "#b 1 #t s"]
    ) -> Float[torch.Tensor, "b t s"]:
        """The mean over heads of what every position attends to."""
        q = self._split(self.q(x))
        score = (q @ kv[0].transpose(-1, -2)) * q.shape[-1] ** -0.5
        return score.masked_fill(~mask, float("-inf")).softmax(-1).mean(1)


class _Layer(nn.Module):
    """A layer of the encoder, or with `cross` of the decoder."""

    def __init__(self, c: NatConfig, cross: bool) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(c.hidden), _Attention(c)
        self.cross_norm = nn.LayerNorm(c.hidden) if cross else None
        self.cross = _Attention(c) if cross else None
        self.mlp = nn.Sequential(
            nn.LayerNorm(c.hidden), nn.Linear(c.hidden, c.ffn), nn.GELU(), nn.Linear(c.ffn, c.hidden)
        )
        self.dropout = nn.Dropout(c.dropout)

    def attend(
        self, x: Float[torch.Tensor, "b t d"], mask: Bool[torch.Tensor, "#b 1 #t s"] | None, past: KeyValue | None
    ) -> tuple[Float[torch.Tensor, "b t d"], KeyValue]:
        """Self-attention over kept keys and values and the new ones; returns all of them."""
        normed = self.attention_norm(x)
        k, v = self.attention.keys_values(normed)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        return x + self.dropout(self.attention(normed, (k, v), mask)), (k, v)

    def attend_source(self, x: Float[torch.Tensor, "b t d"], memory: "Memory", i: int) -> Float[torch.Tensor, "b t d"]:
        """Attention to the source."""
        assert self.cross is not None and self.cross_norm is not None
        return x + self.dropout(self.cross(self.cross_norm(x), memory.keys_values[i], memory.mask))

    def feed_forward(self, x: Float[torch.Tensor, "b t d"]) -> Float[torch.Tensor, "b t d"]:
        out: torch.Tensor = x + self.dropout(self.mlp(x))
        return out


@dataclass(frozen=True)
class Memory:
    """What the decoder reads of encoded sources."""

    states: Float[torch.Tensor, "b s d"]
    mask: Bool[torch.Tensor, "b 1 1 s"]
    """False at padding."""
    keys_values: Sequence[KeyValue]
    """Of the attention to the source, by layer of the decoder."""
    length_logits: Float[torch.Tensor, "b l"]
    """Entry `i`: of a target of `i + 1` tokens."""

    def repeat(self, count: int) -> "Memory":
        """Every row `count` times, one after the other."""
        return self.select(torch.arange(len(self.states)).repeat_interleave(count))

    def select(self, rows: Int[torch.Tensor, " r"]) -> "Memory":
        """Some rows."""
        kv = [(k[rows], v[rows]) for k, v in self.keys_values]
        return Memory(self.states[rows], self.mask[rows], kv, self.length_logits[rows])


@dataclass(frozen=True)
class Decoded:
    """Output of the decoder."""

    logits: Float[torch.Tensor, "b t v"]
    keys_values: Sequence[KeyValue]
    """Of the self-attention, kept ones included."""


class NatModel(nn.Module):
    """Encoder and decoder of one size for every kind; the kinds differ in masks, inputs and losses.

    A learned length token comes before the source; its output predicts the target's length and is not attended to by
    the decoder (Ghazvininejad et al., arXiv 1904.09324). `fertility` has a head on the encoder's states instead (Gu et
    al., arXiv 1711.02281).
    """

    def __init__(self, config: NatConfig) -> None:
        super().__init__()
        c = self.config = config
        self.source_embedding = nn.Embedding(len(c.source), c.hidden)
        self.target_embedding = nn.Embedding(len(c.target), c.hidden)
        self.source_position = nn.Embedding(c.max_source, c.hidden)
        # One more for the begin or end token.
        self.target_position = nn.Embedding(c.max_target + 1, c.hidden)
        self.length_token = nn.Parameter(torch.randn(c.hidden) * c.hidden**-0.5)
        self.encoder = nn.ModuleList(_Layer(c, cross=False) for _ in range(c.layers))
        self.decoder = nn.ModuleList(_Layer(c, cross=True) for _ in range(c.layers))
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(c.hidden), nn.LayerNorm(c.hidden)
        self.length_head = nn.Linear(c.hidden, c.max_target)
        self.fertility_head = nn.Linear(c.hidden, c.max_fertility + 1) if c.kind == "fertility" else None
        for table in (self.source_embedding, self.target_embedding, self.source_position, self.target_position):
            nn.init.normal_(table.weight, std=c.hidden**-0.5)

    def encode(self, source: Int[torch.Tensor, "b s"]) -> Memory:
        """Encode padded sources."""
        position = self.source_position.weight[: source.shape[1]]
        x = self.source_embedding(source) + position
        x = torch.cat((self.length_token.expand(len(x), 1, -1), x), 1)
        mask = F.pad(source != PAD, (1, 0), value=True)[:, None, None]
        for layer in self.encoder:
            assert isinstance(layer, _Layer)
            x = layer.feed_forward(layer.attend(x, mask, None)[0])
        x = self.encoder_norm(x)
        states = x[:, 1:]
        kv = [layer.cross.keys_values(states) for layer in self.decoder]  # type: ignore[union-attr, operator]
        return Memory(states, mask[..., 1:], kv, self.length_head(x[:, 0]))

    def embed(self, token: Int[torch.Tensor, "b t"]) -> Float[torch.Tensor, "b t d"]:
        """Embeddings of target tokens, without positions."""
        out: torch.Tensor = self.target_embedding(token)
        return out

    def decode(
        self,
        inputs: Float[torch.Tensor, "b t d"],
        memory: Memory,
        mask: Bool[torch.Tensor, "#b 1 #t s"] | None,
        past: Sequence[KeyValue] = (),
    ) -> Decoded:
        """Decode inputs that stand after the kept ones; `mask`: which of all positions each of them attends to."""
        x, kept = self._positioned(inputs, past), list[KeyValue]()
        for i, layer in enumerate(self.decoder):
            assert isinstance(layer, _Layer)
            x, kv = layer.attend(x, mask, past[i] if past else None)
            kept.append(kv)
            x = layer.feed_forward(layer.attend_source(x, memory, i))
        return Decoded(F.linear(self.decoder_norm(x), self.target_embedding.weight), kept)

    def alignment(
        self,
        inputs: Float[torch.Tensor, "b t d"],
        memory: Memory,
        mask: Bool[torch.Tensor, "#b 1 #t s"],
    ) -> Float[torch.Tensor, "b t s"]:
        """What the last layer's attention to the source attends to, per target position."""
        x = self._positioned(inputs, ())
        for i, layer in enumerate(self.decoder):
            assert isinstance(layer, _Layer) and layer.cross is not None and layer.cross_norm is not None
            x, _ = layer.attend(x, mask, None)
            if i + 1 == len(self.decoder):
                return layer.cross.weights(layer.cross_norm(x), memory.keys_values[i], memory.mask)
            x = layer.feed_forward(layer.attend_source(x, memory, i))
        raise AssertionError("a decoder has at least one layer")

    def _positioned(self, inputs: torch.Tensor, past: Sequence[KeyValue]) -> torch.Tensor:
        begin = past[0][0].shape[2] if past else 0
        return inputs + self.target_position.weight[begin : begin + inputs.shape[1]]


def causal_mask(new: int, past: int = 0) -> Bool[torch.Tensor, "1 1 n s"]:
    """The last `new` of `past + new` positions attend to themselves and earlier ones."""
    return torch.ones(new, past + new, dtype=torch.bool).tril(past)[None, None]


def padding_mask(length: Int[torch.Tensor, " b"], width: int) -> Bool[torch.Tensor, "b 1 1 t"]:
    """All positions below the length of a row are attended to."""
    return (torch.arange(width) < length[:, None])[:, None, None]
