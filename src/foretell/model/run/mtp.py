"""The multi-token prediction layer of a checkpoint (DeepSeek-V3, arXiv 2412.19437): a decoder layer that predicts the
token after the next one.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.model.block.decoder import BlockRange
from foretell.model.block.layer import RMSNorm
from foretell.model.cache.kv_cache import KVCache
from foretell.model.cache.layout import Layout
from foretell.model.kernels import NativeEagle
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.run.network import Network
from foretell.model.run.topk import top_probabilities

_BLOCK = BlockRange(0, 1)


class MTPLayer:
    """Reads position `j` from the target's hidden state there, after its final norm, and the embedding of token
    `j + 1`: both normed and concatenated, through one matrix (`combine`), and a decoder layer. The target's head
    predicts token `j + 2` from the layer's output. Positions that the target has not read use that output in place of
    the hidden state.

    `network`: the layer as a network of one block, with the norm before the head, and the target's embedding and head.
    `norms_states`: whether what the next position reads is the output after that norm.
    """

    token_of: torch.Tensor | None = None
    """None: it predicts all tokens of the target."""
    native: NativeEagle | None = None

    def __init__(
        self,
        network: Network,
        combine: Callable[[torch.Tensor], torch.Tensor],
        embedding_norm: RMSNorm,
        hidden_norm: RMSNorm,
        target_layers: int,
        norms_states: bool,
    ) -> None:
        self._network, self._combine, self._norms_states = network, combine, norms_states
        self._embedding_norm, self._hidden_norm = embedding_norm, hidden_norm
        self.hidden_layers = (target_layers + 1,)
        self.hidden, self.outputs = network.config.hidden, network.config.vocab
        self.context = network.config.context - 1
        """Longest sequence that it reads, in tokens."""

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self._network.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its outputs."""
        return self._embedding_norm.weight.dtype

    def new_cache(self, device: torch.device) -> KVCache:
        """An empty cache."""
        cache = self._network.new_cache()
        assert isinstance(cache, KVCache)
        return cache

    def forward_features(
        self,
        token: Int[torch.Tensor, " t"],
        features: Float[torch.Tensor, "n d"],
        parent: Int[torch.Tensor, " t"],
        layout: Layout,
        cache: KVCache,
    ) -> Float[torch.Tensor, "t d"]:
        """Outputs for tokens over a cache, which takes the new keys and values; token `i` follows row `parent[i]` of
        the hidden states.
        """
        embedded = self._embedding_norm(self._network.embed(token))
        hidden = self._hidden_norm(features[parent.to(features.device)].to(embedded.device, embedded.dtype))
        x = self._combine(torch.cat((embedded, hidden), -1)).to(embedded.dtype)
        out = self._network.run(x, layout, cache, _BLOCK).hidden_states[-1]
        return self._network.final_norm(out) if self._norms_states else out

    def forward_target_states(
        self,
        token: Int[torch.Tensor, " t"],
        states: Sequence[Float[torch.Tensor, "n d"]],
        place: Int[np.ndarray, " t"],
        layout: Layout,
        cache: KVCache,
    ) -> Float[torch.Tensor, "t d"]:
        """The same from the target's hidden states: token `i` follows row `place[i]`."""
        return self.forward_features(token, states[0], torch.from_numpy(place), layout, cache)

    def head_input(self, out: Float[torch.Tensor, "t d"]) -> Float[torch.Tensor, "t d"]:
        """The input of the head, from the outputs."""
        return out if self._norms_states else self._network.final_norm(out)

    def compute_logits(self, x: Float[torch.Tensor, "t d"]) -> Float[torch.Tensor, "t v"]:
        """Logits from inputs of the head."""
        return self._network.logits(x)

    def to_target_vocab(self, logits: Float[torch.Tensor, "t v"]) -> Float[torch.Tensor, "t v"]:
        """The logits themselves."""
        return logits

    def top_tokens(
        self, x: Float[torch.Tensor, "k d"], count: int
    ) -> tuple[Float[torch.Tensor, "k c"], Int[torch.Tensor, "k c"]]:
        """Probabilities of the `count` most probable tokens and these tokens, best first, from inputs of the head."""
        c = self._network.config
        if isinstance(self._network, NativeDecoder) and not c.logit_softcap and c.logit_scale == 1:
            return self._network.head.topk_softmax(x, count)
        return top_probabilities(self._network.logits(x), count)
