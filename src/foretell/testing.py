"""Small random models for tests: decoders of any architecture, built in milliseconds without a file."""

from dataclasses import replace

import torch
from jaxtyping import Float
from tokenizers import Tokenizer, decoders, models

from foretell.model.block.decoder import Decoder
from foretell.model.config.families import KINDS
from foretell.model.config.model import MLAConfig, ModelConfig, MoEConfig, RopeConfig
from foretell.model.load.build import build_decoder
from foretell.model.load.weights import Weights
from foretell.tokenizer.codec import TextCodec

TINY = ModelConfig(
    architecture="llama", vocab=7, hidden=16, layers=2, heads=4, kv_heads=2, head_dim=4, ffn=24, context=256
)


class RandomWeights(Weights):
    """Gaussian matrices (scaled by their input width) and norms near one; equal seeds and names give equal weights."""

    source = "random weights"

    def __init__(self, seed: int = 0, sharpness: float = 2.0) -> None:
        self._seed, self._sharpness = seed, sharpness

    def get(self, name: str) -> Float[torch.Tensor, "*shape"] | None:
        """None: shapes are known to `need` only."""
        return None

    def require(self, name: str, *shape: int) -> Float[torch.Tensor, "*shape"]:
        """A random tensor of this shape for the seed and the name."""
        generator = torch.Generator().manual_seed(hash_name(name) + self._seed)
        noise = torch.randn(*shape, generator=generator, dtype=torch.float64)
        if len(shape) == 1:
            return (1 + 0.1 * noise if "norm" in name else 0.1 * noise).float()
        scale = self._sharpness if "embed" in name else shape[-1] ** -0.5
        return (noise * scale).float()


def hash_name(name: str) -> int:
    """A hash of the string that is the same in every process (Python's own hash is not)."""
    value = 0
    for letter in name:
        value = (value * 131 + ord(letter)) % (1 << 31)
    return value


def tiny_decoder(
    config: ModelConfig = TINY,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    sharpness: float = 1.0,
    device: str = "cpu",
) -> Decoder:
    """A random decoder; float64 by default, so that the argmax does not depend on the order of additions."""
    return build_decoder(config, RandomWeights(seed, sharpness), dtype, torch.device(device))


def letter_codec(vocab: int, first: int = 0) -> TextCodec:
    """A tokenizer of the letters from `a` on. Token 0 is letter number `first`, so that different values of `first`
    give different tokenizers of the same text.
    """
    order = {chr(ord("a") + (i + first) % vocab): i for i in range(vocab)}
    tokenizer = Tokenizer(models.BPE(vocab=order, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return TextCodec(tokenizer)


def tiny_gpt_oss(config: ModelConfig = TINY) -> ModelConfig:
    """The gpt-oss configuration of these sizes: biases, a window in every other layer, four experts."""
    experts = replace(_experts(config), router_bias=True, bias=True)
    return replace(
        config,
        architecture="gpt_oss",
        experts=experts,
        **KINDS["gpt_oss"].settings,
        qkv_bias=True,
        output_bias=True,
        activation="clamped_swiglu",
        window=4,
        window_layers=tuple(range(0, config.layers, 2)),
    )


def tiny_deepseek(config: ModelConfig = TINY) -> ModelConfig:
    """The DeepSeek-V3 configuration of these sizes: latent attention, one dense layer, four experts in two groups."""
    experts = replace(
        _experts(config),
        layers=tuple(range(1, config.layers)),
        scoring="sigmoid",
        selection_bias=True,
        groups=2,
        active_groups=1,
        ranked_by=2,
        scale=2.5,
        shared_ffn=config.ffn,
    )
    latent = MLAConfig(q_rank=6, kv_rank=8, nope_dim=6, rope_dim=4, value_dim=5)
    rope = RopeConfig(fraction=latent.rope_dim / (latent.nope_dim + latent.rope_dim))
    return replace(
        config,
        architecture="deepseek_v3",
        experts=experts,
        latent=latent,
        rope=rope,
        kv_heads=config.heads,
        head_dim=latent.nope_dim + latent.rope_dim,
    )


def _experts(config: ModelConfig) -> MoEConfig:
    return MoEConfig(count=4, active=2, ffn=config.ffn, layers=tuple(range(config.layers)))


def tiny_moe(config: ModelConfig = TINY) -> ModelConfig:
    """The Mixtral configuration of these sizes: four experts, two per token."""
    return replace(config, architecture="mixtral", experts=_experts(config))
