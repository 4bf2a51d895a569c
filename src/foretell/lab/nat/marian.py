"""Published Marian checkpoints (Junczys-Dowmunt et al., arXiv 1804.00344; Helsinki-NLP's opus-mt) as autoregressive
models: teachers, and verifiers of drafts. Transformers runs encoder and decoder.
"""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import nn

from foretell.lab.nat.network import Decoded, KeyValue, Memory, NatConfig, NatModel
from foretell.lab.nat.pairs import BEGIN, MASK, PAD, MarianWords
from foretell.model.load.transformers import quiet


class MarianModel(NatModel):
    """A Marian checkpoint behind the interface of a model that decodes from left to right.

    Raises:
        ValueError: transformers is missing, or cannot read the folder.
    """

    def __init__(self, folder: Path) -> None:
        nn.Module.__init__(self)
        try:
            import transformers

            with quiet(transformers):
                self._network: Any = transformers.MarianMTModel.from_pretrained(folder, dtype=torch.float32).eval()
        except (ImportError, OSError, ValueError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"{folder}: transformers cannot read this Marian checkpoint: {reason}") from error
        c, self._transformers = self._network.config, transformers
        self.config = NatConfig(
            kind="autoregressive", marian=str(folder), hidden=c.d_model, heads=c.decoder_attention_heads,
            layers=c.decoder_layers, ffn=c.decoder_ffn_dim, max_source=c.max_position_embeddings,
            max_target=c.max_position_embeddings - 1,
        )  # fmt: skip
        assert isinstance(self.config.target, MarianWords)
        self._ids = torch.tensor(self.config.target.ids)
        decoder = self._network.get_decoder()
        known = inspect.signature(type(decoder).forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"

    def encode(self, source: Int[torch.Tensor, "b s"]) -> Memory:
        """Encode padded sources; lengths are not predicted."""
        real = source != PAD
        states = self._network.get_encoder()(self._ids[source], attention_mask=real.long()).last_hidden_state
        attention = [layer.encoder_attn for layer in self._network.get_decoder().layers]
        kept = [
            tuple(part(states).unflatten(-1, (a.num_heads, -1)).transpose(1, 2) for part in (a.k_proj, a.v_proj))
            for a in attention
        ]
        return Memory(states, real[:, None, None], kept, torch.zeros(len(source), 1))

    def embed(self, token: Int[torch.Tensor, "b t"]) -> Float[torch.Tensor, "b t d"]:
        """Embeddings of target tokens, without positions."""
        out: torch.Tensor = self._network.get_decoder().embed_tokens(self._ids[token])
        return out

    def decode(
        self,
        inputs: Float[torch.Tensor, "b t d"],
        memory: Memory,
        mask: Bool[torch.Tensor, "#b 1 #t s"] | None,
        past: Sequence[KeyValue] = (),
    ) -> Decoded:
        """Decode inputs that stand after the kept ones, each from those before it, whatever the mask."""
        kept, source = (self._transformers.DynamicCache(kv or None) for kv in (past, memory.keys_values))
        cache = self._transformers.EncoderDecoderCache(kept, source)
        out = self._network.get_decoder()(
            inputs_embeds=inputs, encoder_hidden_states=memory.states,
            encoder_attention_mask=memory.mask[:, 0, 0].long(), use_cache=True, **{self._cache_name: cache},
        )  # fmt: skip
        logits = self._network.lm_head(out.last_hidden_state) + self._network.final_logits_bias
        logits = logits[..., self._ids]
        logits[..., [PAD, BEGIN, MASK]] = -torch.inf
        return Decoded(logits, [(layer.keys, layer.values) for layer in cache.self_attention_cache.layers])
