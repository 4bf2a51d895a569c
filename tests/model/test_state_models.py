"""Models with recurrent states against transformers: equal logits for chains in chunks and for trees, and exact states
whatever was drafted and abandoned.
"""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import transformers

from foretell.core.tree import tree_from_lists
from foretell.model.decoder import Decoder
from foretell.model.runner import DecoderRunner
from helpers import chain_tree, oracle_logits, random_tokens
from model.test_decoder import SIZES, random_parents, read

LINEAR = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "head_dim": 16,
}
EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextConfig", LINEAR | EXPERTS | {"mlp_only_layers": [1]}),
    "qwen3_5": ("Qwen3_5TextConfig", LINEAR),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", LINEAR | EXPERTS),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}),
}


@cache
def oracle_of(name: str) -> Any:
    """A random model of transformers whose every vector differs from its initial value."""
    kind, values = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**(SIZES | values))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 or parameter.shape[1] == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@cache
def decoder_of(name: str) -> Decoder:
    folder = Path(mkdtemp(prefix="foretell-state-"))
    oracle_of(name).save_pretrained(folder)
    return read(folder)


every_model = pytest.mark.parametrize("name", MODELS)


@every_model
def test_logits_equal_those_of_transformers(name: str) -> None:
    runner, text = DecoderRunner(decoder_of(name)), random_tokens(40, SIZES["vocab_size"])
    wanted, at = oracle_logits(oracle_of(name), text), 0
    assert wanted.std() > 0.3
    for size in (7, 1, 1, 19, 12):
        found = runner.forward([0], chain_tree(text[at : at + size])).logits
        torch.testing.assert_close(found, wanted[at : at + size], rtol=0, atol=1e-4)
        runner.commit(0, range(size))
        at += size
    tokens, parents = random_tokens(14, 61, seed=3), random_parents(14, seed=4)
    tree = tree_from_lists([tokens], [parents])
    found = runner.forward([0], tree).logits
    for node in range(14):
        path = [tokens[i] for i in tree.ancestors(0, node)]
        torch.testing.assert_close(found[node], oracle_logits(oracle_of(name), [*text, *path])[-1], rtol=0, atol=1e-4)
