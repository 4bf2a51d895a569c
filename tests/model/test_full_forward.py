"""The forward pass over whole sequences equals passes with a cache, and is differentiable."""

from dataclasses import replace

import pytest
import torch

from foretell.model.block.decoder import Decoder
from foretell.model.config.model import ModelConfig, RopeConfig
from foretell.model.config.readers.hf import from_hf
from foretell.model.training import chunked_attention
from foretell.model.training.full_forward import CausalAttention, full_forward, inputs_of_layers
from foretell.testing import TINY, tiny_decoder, tiny_deepseek, tiny_gpt_oss, tiny_moe
from helpers import all_logits, random_tokens

GEMMA = replace(
    TINY,
    architecture="gemma3_text",
    norm_offset=1.0,
    post_norms=True,
    qk_norm=True,
    activation="gelu_tanh",
    window=3,
    window_layers=(0,),
    local_rope=RopeConfig(theta=100.0),
    attention_softcap=5.0,
)
SLIDING = replace(TINY, architecture="mistral", window=4, window_layers=(0, 1), qkv_bias=True)
GEMMA4 = from_hf({
    "model_type": "gemma4_text", "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "global_head_dim": 8, "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 40, "num_kv_shared_layers": 2, "max_position_embeddings": 64,
})  # fmt: skip
FAMILIES = [
    TINY,
    replace(TINY, architecture="qwen3", qk_norm=True),
    SLIDING,
    GEMMA,
    tiny_moe(),
    tiny_gpt_oss(),
    tiny_deepseek(),
    GEMMA4,
]


def logits_of(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    x = decoder.embed(tokens.flatten()).view(*tokens.shape, -1)
    out = full_forward(decoder, x, inputs=inputs_of_layers(decoder, tokens)).flatten(0, 1)
    logits: torch.Tensor = decoder.logits(decoder.final_norm(out))
    return logits.view(*tokens.shape, -1)


@pytest.mark.parametrize("config", FAMILIES, ids=lambda c: c.architecture)
def test_a_sequence_gives_the_logits_of_a_pass_with_a_cache(config: ModelConfig) -> None:
    decoder = tiny_decoder(config)
    sequences = [random_tokens(11, config.vocab, seed=i) for i in range(2)]
    found = logits_of(decoder, torch.tensor(sequences)).detach().numpy()
    for sequence, ours in zip(sequences, found, strict=True):
        assert abs(ours - all_logits(decoder, sequence)).max() < 1e-9


def test_chunks_of_queries_change_neither_logits_nor_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, sequence = tiny_decoder().requires_grad_(True), random_tokens(11, TINY.vocab)
    found = []
    for chunk in (128, 4):
        monkeypatch.setattr(chunked_attention, "_CPU_CHUNK", chunk)
        decoder.zero_grad()
        logits = logits_of(decoder, torch.tensor([sequence]))
        logits.square().sum().backward()  # type: ignore[no-untyped-call]
        assert abs(logits[0].detach().numpy() - all_logits(decoder, sequence)).max() < 1e-9
        found.append([p.grad for p in decoder.blocks.parameters()])
    for whole, cut in zip(*found, strict=True):
        assert whole is not cut
        torch.testing.assert_close(whole, cut)


def test_padding_at_the_end_changes_nothing_before_it() -> None:
    decoder, sequence = tiny_decoder(), torch.tensor([random_tokens(9, 7)])
    padded = torch.cat([sequence, torch.zeros(1, 4, dtype=torch.int64)], 1)
    torch.testing.assert_close(logits_of(decoder, padded)[:, :9], logits_of(decoder, sequence))


def test_a_range_of_blocks_continues_where_another_ended() -> None:
    decoder = tiny_decoder()
    x = decoder.embed(torch.tensor(random_tokens(6, 7)))[None]
    torch.testing.assert_close(full_forward(decoder, full_forward(decoder, x, 0, 1), 1, 2), full_forward(decoder, x))


def test_shared_keys_and_inputs_of_layers_continue_too() -> None:
    decoder, token = tiny_decoder(GEMMA4), torch.tensor([random_tokens(9, GEMMA4.vocab)])
    x, attention = decoder.embed(token[0])[None], CausalAttention(GEMMA4)
    parts, inputs = x, inputs_of_layers(decoder, token)
    for first, last in ((0, 2), (2, 3), (3, 4)):
        parts = full_forward(decoder, parts, first, last, attention, inputs)
    torch.testing.assert_close(parts, full_forward(decoder, x, inputs=inputs))
    with pytest.raises(ValueError, match="per-layer inputs are not supported in this training"):
        full_forward(decoder, x)
    with pytest.raises(ValueError, match="share keys and values are not supported in this training"):
        full_forward(decoder, x, 2, 3, inputs=inputs)


def test_every_weight_of_a_block_gets_a_gradient() -> None:
    decoder = tiny_decoder(replace(TINY, architecture="qwen3", qk_norm=True)).requires_grad_(True)
    torch.autograd.backward(logits_of(decoder, torch.tensor([random_tokens(8, 7)])).square().sum())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in decoder.blocks.parameters())
