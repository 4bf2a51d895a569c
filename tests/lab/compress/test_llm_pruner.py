"""LLM-Pruner: importance against transformers' gradients, and the smaller model against the masked whole one."""

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from command import run_foretell, save_tiny_model
from foretell.lab.compress.llm_pruner import (
    Groups,
    choose,
    group_sums,
    importance,
    narrow_block,
    narrow_config,
    removals,
)
from foretell.lab.quantize.base import linears
from foretell.lab.quantize.job import Source
from foretell.lab.quantize.layout import shapes_of
from foretell.load import load
from foretell.model.block.decoder import Decoder
from foretell.model.block.layer import DecoderBlock
from foretell.model.load.build import build_decoder
from foretell.model.training.full_forward import full_forward
from helpers import chain_tree, random_tokens

transformers = pytest.importorskip("transformers")
LAYERS, HEADS, KV_HEADS, SIZE, FFN = 3, 6, 3, 8, 96


@cache
def model() -> Path:
    """A Qwen 2 model, which has biases: 3 key-value heads with 2 query heads each, and 96 channels."""
    tokenizer, path = save_tiny_model(Path(mkdtemp()) / "tokenizer"), Path(mkdtemp()) / "model"
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=257, hidden_size=HEADS * SIZE, intermediate_size=FFN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=512, initializer_range=0.2,
        tie_word_embeddings=False, eos_token_id=256,
    )  # fmt: skip
    made = transformers.Qwen2ForCausalLM(config)
    for name, tensor in made.named_parameters():
        if name.endswith("bias"):
            tensor.data.normal_()
    made.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, path / name)
    return path


def opened() -> Source:
    return Source.open("tiny", model())


def tokens() -> torch.Tensor:
    return torch.tensor([random_tokens(40, 257), random_tokens(40, 250)])


def test_importance_is_the_sum_of_weights_times_gradients_of_the_loss() -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model(), dtype=torch.float32)
    theirs(tokens(), labels=tokens()).loss.backward()
    found = importance(opened(), tokens(), lambda done: None)
    assert found.heads.shape == (LAYERS, KV_HEADS) and found.channels.shape == (LAYERS, FFN)
    for i, layer in enumerate(theirs.model.layers):
        score = {
            name: (p * p.grad).abs().detach() for name, p in layer.named_parameters() if name.endswith("_proj.weight")
        }
        q, k, v, o = (score[f"self_attn.{name}_proj.weight"] for name in "qkvo")
        for g in range(KV_HEADS):
            queries, keys = slice(2 * g * SIZE, 2 * (g + 1) * SIZE), slice(g * SIZE, (g + 1) * SIZE)
            wanted = q[queries].sum() + k[keys].sum() + v[keys].sum() + o[:, queries].sum()
            assert float(found.heads[i, g]) == pytest.approx(float(wanted), rel=1e-3)
        gate, up, down = (score[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        torch.testing.assert_close(found.channels[i], gate.sum(1) + up.sum(1) + down.sum(0), rtol=1e-3, atol=1e-5)


def test_every_weight_is_in_one_group() -> None:
    config = opened().config
    ones = {role: torch.ones(shape) for role, shape in shapes_of(config).items()}
    sums = group_sums(config, ones)
    assert float(sums.heads.sum() + sums.channels.sum()) == sum(score.numel() for score in ones.values())
    assert (sums.heads == sums.heads[0]).all() and (sums.channels == sums.channels[0]).all()


def kept_groups(share: float) -> Groups:
    random = torch.Generator().manual_seed(1)
    scores = Groups(torch.rand(LAYERS, KV_HEADS, generator=random), torch.rand(LAYERS, FFN, generator=random))
    return choose(scores, removals(opened().config, share))


def decoder() -> Decoder:
    source = opened()
    return build_decoder(source.config, source.weights, torch.float32, torch.device("cpu"))


def logits(network: Decoder) -> torch.Tensor:
    x = network.embed(tokens().flatten()).view(*tokens().shape, -1)
    out: torch.Tensor = network.logits(network.final_norm(full_forward(network, x)).flatten(0, 1))
    return out


@pytest.mark.parametrize("share", [0.3, 0.5])
def test_the_smaller_model_is_the_whole_one_with_its_groups_masked(share: float) -> None:
    kept, masked, narrow = kept_groups(share), decoder(), decoder()
    config = masked.config
    assert kept.heads.shape[1] < KV_HEADS or kept.channels.shape[1] < FFN
    for i in range(LAYERS):
        dense, block = masked.blocks[i], narrow.blocks[i]
        assert isinstance(dense, DecoderBlock) and isinstance(block, DecoderBlock)
        whole = linears(dense)
        for g in set(range(KV_HEADS)) - set(kept.heads[i].tolist()):
            whole["output"].weight.data[:, 2 * g * SIZE : 2 * (g + 1) * SIZE] = 0
        for k in set(range(FFN)) - set(kept.channels[i].tolist()):
            whole["down"].weight.data[:, k] = 0
        narrow_block(config, i, block, kept)
    narrow.config = narrow_config(config, kept)
    assert (narrow.config.heads, narrow.config.kv_heads) == (2 * kept.heads.shape[1], kept.heads.shape[1])
    torch.testing.assert_close(logits(narrow), logits(masked), rtol=1e-5, atol=1e-5)


def test_the_least_important_groups_go_and_their_numbers_are_the_share() -> None:
    config = opened().config
    scores = Groups(torch.full((LAYERS, KV_HEADS), 1e6), torch.arange(LAYERS * FFN).view(LAYERS, FFN).flip(1) * 1.0)
    kept = choose(scores, removals(config, 0.25))
    assert kept.heads.shape[1] == KV_HEADS and kept.channels[0].tolist() == list(range(kept.channels.shape[1]))
    scores = Groups(torch.tensor([[5.0, 0.1, 7.0]] * LAYERS), torch.full((LAYERS, FFN), 100.0))
    kept = choose(scores, removals(config, 0.13))
    assert kept.heads.tolist() == [[0, 2]] * LAYERS and kept.channels.shape[1] == FFN
    numbers = sum(outputs * inputs for outputs, inputs in shapes_of(config).values())
    left = sum(outputs * inputs for outputs, inputs in shapes_of(narrow_config(config, kept)).values())
    assert 1 - left / numbers == pytest.approx(0.13, abs=0.05)
    # Of 20,736 numbers a head is 2,304, and a step of 32 channels 4,608; 2 heads and 2 steps can go.
    with pytest.raises(
        ValueError, match=r"--sparsity 0\.999: llm_pruner removes heads .* a share from 0\.11 to 0\.67$"
    ):
        removals(config, 0.999)
    for share in (0.11, 0.67):
        assert removals(config, share)


def test_the_command_writes_an_ordinary_model_that_loads_everywhere(tmp_path: Path) -> None:
    text, out = tmp_path / "text.jsonl", tmp_path / "out"
    text.write_text("\n".join(json.dumps({"text": "abcdefgh " * 60 + str(k)}) for k in range(12)))
    given = ("compress", model(), "--out", out, "--method", "llm_pruner", "--sparsity", "0.4", "--text", text)
    sizes = ("--calibration-tokens", "1024", "--held-back-tokens", "512")
    result = run_foretell(*given, *sizes, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    card = json.loads(result.stdout)
    said = json.loads((out / "config.json").read_text())
    kept = f"{said['num_key_value_heads']} of 3 key-value heads and {said['intermediate_size']} of 96 channels"
    assert card["amount"] == f"{kept} in every block" and said["model_type"] == "qwen2"
    assert said["num_attention_heads"] == 2 * said["num_key_value_heads"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    prompt = random_tokens(20, 257)
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt])).logits[0]
    ours = load(str(out), "float32").runner().forward([0], chain_tree(prompt)).logits
    torch.testing.assert_close(ours.reshape(20, -1), expected, rtol=1e-3, atol=1e-3)
