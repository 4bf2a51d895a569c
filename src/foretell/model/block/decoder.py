"""The decoder of the Llama family in plain torch: Llama, Mistral, Qwen, Gemma, gpt-oss and Mixtral by configuration."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import nn

from foretell.model.block.attention_kinds import attention_kind, cached_attention, new_store
from foretell.model.block.backend import Backend
from foretell.model.block.cached_attention import CachedAttention, PlacedLayout
from foretell.model.block.layer import DecoderBlock, RMSNorm, Stream, StreamAndRoutes, centered
from foretell.model.block.layer_inputs import LayerInputs
from foretell.model.block.linear import Int8Linear, Linear, widen
from foretell.model.block.rope import RopeTables, rope_angles, rope_tables
from foretell.model.cache.base import Cache
from foretell.model.cache.layout import Layout
from foretell.model.cache.pages import page_policy
from foretell.model.cache.state_store import StateStore, build_cache
from foretell.model.config.model import ModelConfig
from foretell.model.triton import batch_invariant, has_triton
from foretell.utils.transfer import to_device


class BlockRange(NamedTuple):
    """Blocks `first .. last-1` of a network, and those of them, ascending, whose input is recorded."""

    first: int
    last: int
    hidden_layers: tuple[int, ...] = ()


class BlockOutput(NamedTuple):
    """Output of a range of blocks."""

    hidden_states: tuple[Float[torch.Tensor, "t d"], ...]
    """The residual stream before every recorded layer, and after the last block."""
    routes: tuple[Int[torch.Tensor, "t k"], ...] = ()
    """Experts of every token in each mixture-of-experts layer."""

    @property
    def expert_counts(self) -> tuple[int, ...]:
        """Number of distinct experts that each mixture-of-experts layer read."""
        return tuple(len(part.unique()) for part in self.routes)


B = TypeVar("B")
BlockForward = Callable[[B, int, Float[torch.Tensor, "t d"]], StreamAndRoutes]
"""`(block, i, x)` to the residual stream after block `i`, and every token's experts (None: dense)."""


def run_blocks(
    x: Float[torch.Tensor, "t d"], blocks: BlockRange, fetch: Callable[[int], B], forward: BlockForward[B]
) -> BlockOutput:
    """Run a range of blocks; `fetch(i)` returns block `i`."""
    states, routes = list[torch.Tensor](), list[Int[torch.Tensor, "t k"]]()
    for i in range(blocks.first, blocks.last):
        if i in blocks.hidden_layers:
            states.append(x)
        x, own = forward(fetch(i), i, x)
        routes += [] if own is None else [own]
    return BlockOutput((*states, x), tuple(routes))


@dataclass(frozen=True)
class SkipSet:
    """Sub-layers that a forward pass skips, by layer index."""

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()


def decoder_rope_tables(config: ModelConfig) -> tuple[RopeTables, RopeTables]:
    """Rotary tables of full-attention layers and of sliding-window layers; one object where these are the same.

    Raises:
        ValueError: the configuration has no rotary positions.
    """
    if config.rope is None:
        raise ValueError(f"{config.architecture}: the decoder needs rotary positions")
    full, local_dim = rope_tables(config.rope, config.head_dim, config.context), config.local_head_dim
    local = config.local_rope
    return full, rope_tables(local, local_dim or config.head_dim, config.context) if local else full


def bound_logits(config: ModelConfig, out: Float[torch.Tensor, "k v"]) -> Float[torch.Tensor, "k v"]:
    """Logits from the output of the head: with the architecture's factor and bound."""
    if config.logit_scale != 1:
        out = out * config.logit_scale
    cap = config.logit_softcap
    return torch.tanh(out / cap) * cap if cap else out


class Decoder(nn.Module):
    """A decoder in torch: embedding, blocks, final norm and head. Implements `Network` on any device."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Float[torch.Tensor, "v d"],
        blocks: list[DecoderBlock],
        norm: RMSNorm,
        head: Linear | Int8Linear | None = None,
        skip: SkipSet = SkipSet(),
        layer_inputs: LayerInputs | None = None,
    ) -> None:
        super().__init__()
        self.config, self.layer_inputs = config, layer_inputs
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.head = Linear(self.embedding.data) if head is None else head
        self.sparsity = ""
        """How tokens choose their neurons; see `Backend.sparsity`."""
        self.skip = SkipSet(skip.attention.union(config.attention_free_layers), skip.mlp.union(config.mlp_free_layers))
        full, local = decoder_rope_tables(config)
        self.rope_tables = full[0].to(self.device), full[1].to(self.device)
        self.local_rope_tables = local[0].to(self.device), local[1].to(self.device)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.embedding.device

    @property
    def backend(self) -> Backend:
        """Torch in the dtype of the weights."""
        precision = "int8" if isinstance(self.head, Int8Linear) else str(self.embedding.dtype).removeprefix("torch.")
        return Backend(
            "torch",
            self.device.type,
            precision,
            batch_invariant=self._batch_invariant,
            cache_dtype=self.config.cache_dtype,
            cache_policy=page_policy(self.config),
            sparsity=self.sparsity,
            attention=self.attention_kind.name,
        )

    @property
    def _batch_invariant(self) -> bool:
        """Whether it consists of kernels that give a token the same bits in every pass."""
        if not (batch_invariant() and has_triton(self.device) and self.attention_kind.name == "triton"):
            return False
        leaves = (module for module in self.modules() if not any(module.children()))
        c, mixers = self.config, any(block.mixer for block in self._block_list())
        return not (c.experts or c.centered or self.layer_inputs or mixers) and all(
            isinstance(leaf, Linear | RMSNorm | nn.Identity) for leaf in leaves
        )

    def first_layers(self, layers: int) -> "Decoder":
        """The first `layers` blocks with the same norm and head, sharing all weights (LayerSkip, arXiv 2404.16710)."""
        if not 1 <= layers <= self.config.layers:
            raise ValueError(f"cannot cut after {layers} layers: the model has {self.config.layers}")
        return self._sharing(self.config.of_layers(range(layers)), self._block_list()[:layers], SkipSet())

    def followed_by(self, layers: int, blocks: Sequence[DecoderBlock]) -> "Decoder":
        """The first `layers` blocks, and after them others of the same sizes."""
        config = replace(self.config.of_layers(range(layers)), layers=layers + len(blocks))
        return self._sharing(config, [*self._block_list()[:layers], *blocks], SkipSet())

    def with_blocks(self, blocks: list[DecoderBlock]) -> "Decoder":
        """The network with other blocks of the same sizes."""
        return self._sharing(self.config, blocks, self.skip)

    def without_sublayers(self, skip: SkipSet) -> "Decoder":
        """The network without some sub-layers, sharing all weights (Draft & Verify, arXiv 2309.08168)."""
        return self._sharing(self.config, self._block_list(), skip)

    def without_blocks(self, config: ModelConfig, skip: SkipSet) -> "Decoder":
        """The same embedding, norm and head without blocks; see `BlocklessNetwork`."""
        return self._sharing(config, [], skip)

    def _sharing(self, config: ModelConfig, blocks: list[DecoderBlock], skip: SkipSet) -> "Decoder":
        return Decoder(config, self.embedding, blocks, self.norm, self.head, skip, self.layer_inputs)

    def _block_list(self) -> list[DecoderBlock]:
        return [b for b in self.blocks if isinstance(b, DecoderBlock)]

    def new_cache(self) -> Cache:
        """An empty cache for this network."""
        c, dtype, device = self.config, self.embedding.dtype, self.device
        return build_cache(
            c,
            lambda layers, s: new_store(c, layers, s, dtype, device),
            lambda layers, shape: StateStore(layers, shape, torch.promote_types(dtype, torch.float32), device),
        )

    def embed(self, token: Int[torch.Tensor, " t"]) -> Float[torch.Tensor, "t d"]:
        """Input of the first block, float32 or wider: the residual stream is not rounded to the weights' dtype."""
        x = widen(F.embedding(to_device(token, self.device), self.embedding))
        scale = self.config.embedding_scale
        x = centered(x) if self.config.centered else x
        return x if scale == 1 else x * torch.tensor(scale, dtype=x.dtype)

    def run(self, x: Float[torch.Tensor, "t d"], layout: Layout, cache: Cache, blocks: BlockRange) -> BlockOutput:
        """Run a range of blocks; new keys and values are written to `cache`."""
        return run_blocks(x, blocks, self.block, self.block_forward(layout, cache))

    def block(self, i: int) -> DecoderBlock:
        """Block `i`."""
        block = self.blocks[i]
        assert isinstance(block, DecoderBlock)
        return block

    def write_keys(self, x: Float[torch.Tensor, "t d"], layout: Layout, cache: Cache, blocks: BlockRange) -> None:
        """Write the keys and values of blocks whose input is `x`, all of them; see `Network.write_keys`."""
        c, attention = self.config, cached_attention(cache, layout, self.config, self.device)
        full = rope_angles(self.rope_tables, attention.position)
        local = rope_angles(self.local_rope_tables, attention.position) if c.window_layers else full
        for i in range(blocks.first, blocks.last):
            if i not in self.skip.attention:
                block = self.block(i)
                angles = None if i in c.unrotated_layers else local if c.window_of(i) else full
                _, k, v = block.project(block.attention_norm(x), c.sizes_of(i), angles)
                attention.write(i, k, v)

    @property
    def attention_kind(self) -> type[CachedAttention]:
        """What attends to the cache of its passes."""
        return attention_kind(self.config, self.embedding.dtype, self.device)

    def run_placed(
        self, x: Float[torch.Tensor, "t d"], placed: PlacedLayout, cache: Cache, blocks: BlockRange
    ) -> BlockOutput:
        """Run a range of blocks; all shapes depend on the shapes of the arguments alone, as CUDA graphs need."""
        attention = self.attention_kind(cache, placed, self.config)
        return run_blocks(x, blocks, self.block, self._block_forward(attention))

    def block_forward(self, layout: Layout, cache: Cache) -> BlockForward[DecoderBlock]:
        """The forward pass of a block over this layout and cache."""
        return self._block_forward(cached_attention(cache, layout, self.config, self.device))

    def _block_forward(self, attention: CachedAttention) -> BlockForward[DecoderBlock]:
        c = self.config
        full = rope_angles(self.rope_tables, attention.position)
        local = rope_angles(self.local_rope_tables, attention.position) if c.window_layers else full
        inputs = None
        if self.layer_inputs is not None:
            inputs = self.layer_inputs(attention.token, self.embed(attention.token))

        def forward(block: DecoderBlock, i: int, x: Float[torch.Tensor, "t d"]) -> StreamAndRoutes:
            before = x
            if i not in self.skip.attention:
                angles = None if i in c.unrotated_layers else local if c.window_of(i) else full
                x = block.add_attention(x, block.attention_input(x), c.sizes_of(i), angles, i, attention)
            else:
                x = block.shortcut_attention(x)
            x, experts = (block.shortcut_mlp(x), None) if i in self.skip.mlp else block.add_mlp(x, before)
            return block.finish(x, None if inputs is None else inputs[:, i]), experts

        return forward

    def final_norm(self, x: Stream) -> Stream:
        """The final norm, from the last block's output to the input of the head."""
        return self.norm(x)

    def logits(self, x: Float[torch.Tensor, "k d"]) -> Float[torch.Tensor, "k v"]:
        """Logits of the next token in float32 or wider, from the output of `final_norm`."""
        return bound_logits(self.config, widen(self.head(x)))
