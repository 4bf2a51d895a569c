"""Sequences without a cache give what the decoder gives with one, and can be differentiated."""

from dataclasses import replace

import pytest
import torch

from foretell.model.config import ModelConfig, RopeConfig
from foretell.model.decoder import Decoder
from foretell.model.training import chunked_attention as strips
from foretell.model.training.full_forward import full_forward
from foretell.testing import TINY, tiny_decoder, tiny_moe
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
FAMILIES = [TINY, replace(TINY, architecture="qwen3", qk_norm=True), SLIDING, GEMMA, tiny_moe()]


def logits_of(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    x = decoder.embed(tokens.flatten()).view(*tokens.shape, -1)
    out = full_forward(decoder, x).flatten(0, 1)
    logits: torch.Tensor = decoder.logits(decoder.final(out))
    return logits.view(*tokens.shape, -1)


@pytest.mark.parametrize("config", FAMILIES, ids=lambda c: c.architecture)
def test_a_sequence_gives_the_logits_of_a_pass_with_a_cache(config: ModelConfig) -> None:
    decoder = tiny_decoder(config)
    texts = [random_tokens(11, config.vocab, seed=i) for i in range(2)]
    found = logits_of(decoder, torch.tensor(texts)).detach().numpy()
    for text, ours in zip(texts, found, strict=True):
        assert abs(ours - all_logits(decoder, text)).max() < 1e-9


def test_strips_of_queries_change_neither_logits_nor_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, text = tiny_decoder().requires_grad_(True), random_tokens(11, TINY.vocab)
    found = []
    for strip in (128, 4):
        monkeypatch.setattr(strips, "_STRIP", strip)
        decoder.zero_grad()
        logits = logits_of(decoder, torch.tensor([text]))
        logits.square().sum().backward()  # type: ignore[no-untyped-call]
        assert abs(logits[0].detach().numpy() - all_logits(decoder, text)).max() < 1e-9
        found.append([p.grad for p in decoder.blocks.parameters()])
    for whole, cut in zip(*found, strict=True):
        assert whole is not cut
        torch.testing.assert_close(whole, cut)


def test_padding_at_the_end_changes_nothing_before_it() -> None:
    decoder, text = tiny_decoder(), torch.tensor([random_tokens(9, 7)])
    padded = torch.cat([text, torch.zeros(1, 4, dtype=torch.int64)], 1)
    torch.testing.assert_close(logits_of(decoder, padded)[:, :9], logits_of(decoder, text))


def test_a_range_of_blocks_continues_where_another_ended() -> None:
    decoder = tiny_decoder()
    x = decoder.embed(torch.tensor(random_tokens(6, 7)))[None]
    torch.testing.assert_close(full_forward(decoder, full_forward(decoder, x, 0, 1), 1, 2), full_forward(decoder, x))


def test_every_weight_of_a_block_gets_a_gradient() -> None:
    decoder = tiny_decoder(replace(TINY, architecture="qwen3", qk_norm=True)).requires_grad_(True)
    torch.autograd.backward(logits_of(decoder, torch.tensor([random_tokens(8, 7)])).square().sum())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in decoder.blocks.parameters())
