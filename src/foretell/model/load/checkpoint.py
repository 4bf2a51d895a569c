"""The checkpoint of a loaded model: source of changed copies, shared embedding and head, and fingerprint."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path

import torch

from foretell.model.block.decoder import Decoder
from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.block.sparsity import NeuronRule, sparse_decoder
from foretell.model.block.updates import updated_decoder
from foretell.model.block.weights import names_of
from foretell.model.config.families import family_of
from foretell.model.config.model import ModelConfig
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.load.adapter import read_updates
from foretell.model.load.build import build_block, build_decoder, build_without_blocks
from foretell.model.load.mtp import PublishedLayer, load_mtp, read_layers
from foretell.model.load.native import packable_block
from foretell.model.load.transforms import DecoderTransform
from foretell.model.load.weights import Weights
from foretell.model.run.mtp import MTPLayer
from foretell.model.run.network import Network


def embedding_and_head_of(decoder: Decoder) -> EmbeddingAndHead:
    """Embedding and head of a decoder, sharing its weights."""
    c = decoder.config
    return EmbeddingAndHead(
        decoder.embedding.detach(), decoder.head.weight.detach(), c.embedding_scale, c.logit_softcap
    )


class Checkpoint(ABC):
    """A checkpoint that foretell's decoder runs; every call reads the weights again, the fingerprint once."""

    def __init__(self, config: ModelConfig, weights: Weights, device: torch.device) -> None:
        self.config, self._weights, self._device = config, weights, device

    @abstractmethod
    def load_network(self, change: DecoderTransform, dtype: str | None = None) -> Network:
        """Load the network in a dtype (None: the model's own), changed, for the fastest backend of this machine."""

    @property
    def folder(self) -> Path | None:
        """The directory of its files; None: its weights are made up."""
        return self._weights.files[0].parent if self._weights.files else None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the model runs in, apart from quantised matrices."""
        return torch.bfloat16

    def sparse_network(self, network: Network, rules: Sequence[NeuronRule], label: str = "") -> Network:
        """`network`, the model itself, with a rule per layer by which tokens choose neurons; see
        `foretell.model.block.sparsity`. It shares what it can with `network`.

        Raises:
            ValueError: neither the kernels nor torch run it so.
        """
        if isinstance(network, NativeDecoder):
            return network.with_rules(
                rules, lambda i: packable_block(self.config, i, self._weights, network.precision), label
            )
        if isinstance(network, Decoder):
            return sparse_decoder(network, rules, label)
        raise ValueError(
            f"sparse feed-forward networks run on the CPU kernels and in torch, with all weights in memory, and this "
            f"model runs on {type(network).__name__}; run it dense"
        )

    def adapted(self, network: Network, reference: str) -> Network | None:
        """`network`, the model itself, with a LoRA adapter beside its weights; None: the adapter changes more than
        linear layers, or the network is neither on the kernels nor in torch with all its weights in memory.

        Raises:
            ValueError: see `foretell.model.load.adapter`.
        """
        if not isinstance(network, NativeDecoder | Decoder):
            return None
        updates = read_updates(self.config, self._weights, reference)
        if updates is None:
            return None
        return updated_decoder(network, updates) if isinstance(network, Decoder) else network.with_updates(updates)

    def mtp_layer(self, network: Network, file: Path | None = None) -> MTPLayer:
        """Load the multi-token prediction layer, of this checkpoint or of a GGUF file that has it alone; embedding and
        head are those of `network`, the model itself.

        Raises:
            ValueError: there is none.
        """
        return load_mtp(self.config, self._weights, network, file)

    def prediction_layers(self) -> list[PublishedLayer]:
        """The layers of multi-token prediction, to train them on; empty: there are none."""
        names = family_of(self.config.architecture).prediction(self.config.architecture, self.config.layers)
        return read_layers(self.config, self._weights, None if names is None else self._weights.prediction_names(names))

    def decoder(self, dtype: torch.dtype, blocks: Sequence[int] | None = None) -> Decoder:
        """Load the network in plain torch, which is differentiable, with all of its blocks or some."""
        if blocks is None:
            return build_decoder(self.config, self._weights, dtype, self._device)
        outer = build_without_blocks(self.config, self._weights, dtype, self._device)
        chosen = [build_block(self.config, i, self._weights, dtype, self._device) for i in blocks]
        return Decoder(self.config, outer.embedding.data, chosen, outer.norm, outer.head)

    def embedding_and_head(self, dtype: torch.dtype = torch.bfloat16) -> EmbeddingAndHead:
        """Load embedding and head."""
        return embedding_and_head_of(build_without_blocks(self.config, self._weights, dtype, self._device))

    def fingerprint(self) -> str:
        """See `model_fingerprint`; with an adapter it is another one."""
        base, adapter = self.base_fingerprint, self._weights.adapter
        return hashlib.sha256(f"{base} {adapter}".encode()).hexdigest()[:16] if adapter else base

    @cached_property
    def base_fingerprint(self) -> str:
        """The fingerprint of the model without its adapter, for which speculators are trained and installed."""
        return model_fingerprint(self.config, self._weights.unadapted)


def model_fingerprint(config: ModelConfig, weights: Weights) -> str:
    """Sixteen hexadecimal digits that identify a model: a hash of its sizes and norms, the same for every quantisation
    of it.
    """
    c, h = config, hashlib.sha256()
    h.update(repr((c.architecture, c.vocab, c.hidden, c.layers, c.heads, c.kv_heads, c.ffn)).encode())
    family = family_of(c.architecture)
    own = [family.name(f"{name}.weight") for name in ("input_layernorm", "post_attention_layernorm")]
    norms = [f"model.layers.{i}.{name}" for i in range(c.layers) for name in own if name in names_of(c, i)]
    for name in (*norms, f"{family.final_norm}.weight"):
        h.update(weights.require(name, c.hidden).to(torch.bfloat16).view(torch.int16).numpy().tobytes())
    return h.hexdigest()[:16]


class CachedCheckpoint(Checkpoint):
    """A checkpoint that loads every changed copy, and embedding and head, at most once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.config, checkpoint._weights, checkpoint._device)
        self._checkpoint = checkpoint
        self._networks: dict[object, Network] = {}
        self._embedding_and_head: dict[torch.dtype, EmbeddingAndHead] = {}

    def embedding_and_head(self, dtype: torch.dtype = torch.bfloat16) -> EmbeddingAndHead:
        """Load embedding and head, at most once per dtype."""
        if dtype not in self._embedding_and_head:
            self._embedding_and_head[dtype] = self._checkpoint.embedding_and_head(dtype)
        return self._embedding_and_head[dtype]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the model runs in."""
        return self._checkpoint.dtype

    def load_network(self, change: DecoderTransform, dtype: str | None = None) -> Network:
        """Load a changed network, at most once per change and dtype."""
        key: object = (change, dtype)
        if isinstance(change, partial):
            key = (change.func, change.args, tuple(sorted(change.keywords.items())), dtype)
        if key not in self._networks:
            self._networks[key] = self._checkpoint.load_network(change, dtype)
        return self._networks[key]
