"""Mixtures of experts and latent attention on the CPU kernels: batch-invariant, equal to torch up to rounding, and no
expert is read that has no token.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretell.core.tree import tree_from_lists
from foretell.model import kernels as native
from foretell.model.block.decoder import BlockRange
from foretell.model.block.layer import DecoderBlock
from foretell.model.cache.layout import Layout
from foretell.model.config.model import MLAConfig, ModelConfig, MoEConfig, RopeConfig
from foretell.model.kernels import structures
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.kernels.structures import PRECISIONS, Precision
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.testing import TINY, tiny_decoder
from helpers import VOCAB, chain_tree, random_tokens

pytestmark = pytest.mark.skipif(not native.available(), reason=native.unavailable_reason() or "available")
every_precision = pytest.mark.parametrize("precision", PRECISIONS)
WIDE = replace(TINY, vocab=VOCAB, hidden=72, heads=4, kv_heads=2, head_dim=16, ffn=40, layers=2)


def mixture(architecture: str, more: dict[str, object] | None = None, **experts: object) -> ModelConfig:
    """A model with experts in every layer."""
    values = {"count": 6, "active": 2, "ffn": 40, "layers": tuple(range(WIDE.layers)), **experts}
    return replace(WIDE, architecture=architecture, experts=MoEConfig(**values), **(more or {}))  # type: ignore[arg-type]


def latent(config: ModelConfig, heads: int, q_rank: int) -> ModelConfig:
    """The model with latent attention."""
    sizes = MLAConfig(q_rank, kv_rank=40, nope_dim=20, rope_dim=8, value_dim=12)
    return replace(
        config, latent=sizes, heads=heads, kv_heads=heads, head_dim=28, rope=RopeConfig(fraction=8 / 28),
        attention_scale=0.3,
    )  # fmt: skip


GPT_OSS = {"sink_layers": (0, 1), "qkv_bias": True, "output_bias": True, "activation": "clamped_swiglu", "window": 5,
           "window_layers": (0,)}  # fmt: skip
CONFIGS = {
    "mixtral": mixture("mixtral"),
    "qwen2_moe": mixture("qwen2_moe", {"qkv_bias": True}, shared_ffn=56, shared_gate=True, renormalize=False),
    "qwen3_moe": mixture("qwen3_moe", {"qk_norm": True}, count=32, active=4, layers=(1,)),
    "gpt_oss": mixture("gpt_oss", GPT_OSS, router_bias=True, bias=True),
    "groups": mixture(
        "deepseek_v3", count=16, active=3, scoring="sigmoid", selection_bias=True, groups=4, active_groups=2,
        ranked_by=2, scale=2.5, shared_ffn=40,
    ),
    "glm4_moe": mixture(
        "glm4_moe", {"qkv_bias": True, "qk_norm": True, "rope": RopeConfig(fraction=0.5)}, scoring="sigmoid",
        selection_bias=True, ranked_by=2, shared_ffn=40, layers=(1,),
    ),
    "granite": mixture("granitemoeshared", {"residual_scale": 0.6, "logit_scale": 0.5}, shared_ffn=24),
    "latent": latent(mixture("deepseek_v3", shared_ffn=40, layers=(1,)), heads=4, q_rank=24),
    "latent groups": latent(replace(WIDE, architecture="deepseek_v2"), heads=20, q_rank=0),
    "biased": replace(WIDE, mlp_bias=True),
}  # fmt: skip
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def run(config: ModelConfig, precision: Precision, seed: int = 0) -> DecoderRunner:
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    return DecoderRunner(NativeDecoder(tiny_decoder(config, seed, dtype), precision))


def pass_over(runner: DecoderRunner, x: Tensor, row: int = 0, cached: int = 0) -> Tensor:
    """The residual stream after all blocks for a chain of tokens."""
    tree = chain_tree([0] * len(x))
    layout, _ = Layout.from_tree(tree, [row], torch.tensor([cached]).numpy(), tree.active)
    runner.cache.reserve([row], [cached + len(x)])
    output = runner.network.run(x, layout, runner.cache, BlockRange(0, runner.network.config.layers))
    last: Tensor = output.hidden_states[-1]
    return last


@every_config
def test_the_kernels_equal_torch_up_to_rounding(config: ModelConfig) -> None:
    plain, fast = DecoderRunner(tiny_decoder(config, dtype=torch.float32)), run(config, "float32")
    for size, seed in ((20, 0), (1, 1), (3, 2)):
        tokens = random_tokens(size, VOCAB, seed)
        mine, theirs = (runner.forward([0], chain_tree(tokens)) for runner in (fast, plain))
        torch.testing.assert_close(mine.logits, theirs.logits, rtol=0, atol=1e-4)
        assert mine.experts == theirs.experts
        for runner in (fast, plain):
            runner.commit(0, range(size))


@pytest.mark.covering(1)
@every_config
@every_precision
@pytest.mark.parametrize("threads", [1, 3])
def test_a_token_has_the_same_bits_alone_and_in_a_batch(
    config: ModelConfig, precision: Precision, threads: int
) -> None:
    whole = random_tokens(23, VOCAB)
    runner, other = run(config, precision), run(config, precision)
    wanted = runner.forward([0], chain_tree(whole)).logits
    at = 0
    torch.set_num_threads(threads)
    try:
        for size in (1, 5, 2, 1, 14):
            found = other.forward([0], chain_tree(whole[at : at + size])).logits
            assert torch.equal(found, wanted[at : at + size])
            other.commit(0, range(size))
            at += size
    finally:
        torch.set_num_threads(1)


@every_config
def test_tree_logits_are_path_logits(config: ModelConfig) -> None:
    text, tokens, parents = random_tokens(11, VOCAB), random_tokens(6, VOCAB, seed=1), [-1, 0, 0, 1, 1, 2]
    runner = run(config, "bfloat16")
    runner.forward([0], chain_tree(text))
    runner.commit(0, range(len(text)))
    tree = tree_from_lists([tokens], [parents])
    found = runner.forward([0], tree).logits
    alone = run(config, "bfloat16")
    for node in range(6):
        path = [tokens[i] for i in tree.ancestors(0, node)]
        assert torch.equal(found[node], alone.forward([0], chain_tree([*text, *path])).logits[-1])


def test_permuting_tokens_permutes_outputs() -> None:
    config = CONFIGS["qwen2_moe"]
    runner = run(config, "bfloat16")
    rows = torch.tensor([4, 0, 3, 1, 2])
    tokens = random_tokens(5, VOCAB)
    wanted = runner.forward(range(5), tree_from_lists([[t] for t in tokens], [[-1]] * 5)).logits
    again = run(config, "bfloat16")
    found = again.forward(range(5), tree_from_lists([[tokens[i]] for i in rows], [[-1]] * 5)).logits
    assert torch.equal(found, wanted[rows])


def test_an_expert_without_tokens_is_not_read() -> None:
    of_mixtral = CONFIGS["mixtral"].experts
    assert of_mixtral is not None
    runner = run(replace(CONFIGS["mixtral"], layers=1, experts=replace(of_mixtral, layers=(0,))), "float32")
    assert isinstance(runner.network, NativeDecoder)
    experts = structures.Experts.from_address(runner.network.stack.layers[0].experts)
    gate_up = (structures.Weight * 6).from_address(experts.gate_up)
    assert runner.forward([0], chain_tree([3])).experts == (2,)
    wanted, tried = runner.forward([0], chain_tree([3])).logits, 0
    for i in range(of_mixtral.count):
        kept = gate_up[i].words
        gate_up[i].words = gate_up[(i + 1) % 6].words
        tried += torch.equal(runner.forward([0], chain_tree([3])).logits, wanted)
        gate_up[i].words = kept
    assert tried == 4


def test_sinks_of_minus_infinity_are_an_ordinary_softmax() -> None:
    decoder = tiny_decoder(CONFIGS["gpt_oss"], dtype=torch.float32)
    for block in decoder.blocks:
        assert isinstance(block, DecoderBlock) and block.sinks is not None
        block.sinks.fill_(float("-inf"))
    plain = tiny_decoder(replace(CONFIGS["gpt_oss"], sink_layers=()), dtype=torch.float32)
    text = random_tokens(9, VOCAB)
    for make in (lambda d: d, lambda d: NativeDecoder(d, "float32")):
        found, wanted = (DecoderRunner(make(d)).forward([0], chain_tree(text)).logits for d in (decoder, plain))
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
