"""The multi-token prediction layers of a checkpoint (DeepSeek-V3, arXiv 2412.19437): decoder layers of which the first
predicts the token after the next one, and each further one the token after that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class MTPModule:
    """What a layer has beside its block: the norms of its two inputs, the matrix that combines them, and the norm of
    its output.
    """

    combine: Callable[[torch.Tensor], torch.Tensor]
    norm: RMSNorm
    embedding_norm: RMSNorm
    hidden_norm: RMSNorm


class MTPLayer:
    """Reads position `j` from the target's hidden state there, after its final norm (MiMo's: before it), and the
    embedding of token `j + 1`: both normed and concatenated, through one matrix, a decoder layer and a norm. The
    target's head predicts token `j + 2` from that output. A single layer reads positions that the target has not read
    with its output in place of the hidden state. Of several, layer `k` reads at position `j` the output there of the
    layer before, and the embedding of token `j + k + 1` (transformers' `MtpModel`).

    `network`: the layers as the blocks of a network, with the target's embedding and head. `hidden_layer`: the target's
    that is read.
    """

    token_of: torch.Tensor | None = None
    """None: it predicts all tokens of the target."""
    native: NativeEagle | None = None

    def __init__(
        self,
        network: Network,
        modules: Sequence[MTPModule],
        hidden_layer: int,
    ) -> None:
        self._network, self.modules = network, tuple(modules)
        self.hidden_layers = (hidden_layer,)
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
        return self.modules[0].norm.weight.dtype

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
        return self.forward_module(0, token, features[parent.to(features.device)], layout, cache)

    def forward_module(
        self,
        index: int,
        token: Int[torch.Tensor, " t"],
        hidden: Float[torch.Tensor, "t d"],
        layout: Layout,
        cache: KVCache,
    ) -> Float[torch.Tensor, "t d"]:
        """Outputs of one of the layers for tokens, each with its own hidden state."""
        module = self.modules[index]
        embedded = module.embedding_norm(self._network.embed(token))
        hidden = module.hidden_norm(hidden.to(embedded.device, embedded.dtype))
        x = module.combine(torch.cat((embedded, hidden), -1)).to(embedded.dtype)
        out: torch.Tensor = module.norm(
            self._network.run(x, layout, cache, BlockRange(index, index + 1)).hidden_states[-1]
        )
        return out

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
        """The input of the head: the outputs themselves."""
        return out

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
