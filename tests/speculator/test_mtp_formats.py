"""Layers of multi-token prediction that were trained apart: the `speculators` library's own module, and the names of
the checkpoints of their targets.
"""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from command import tiny_tokenizer
from foretell.load import load
from foretell.model.block.modules import to_weights
from foretell.model.block.weights import tensors_of
from foretell.model.config.readers.hf import from_hf
from foretell.model.load.build import build_block
from foretell.model.load.weights import SafetensorsWeights
from foretell.speculator.export import export
from foretell.speculator.formats.base import Verifier
from foretell.speculator.load import load_speculator
from foretell.speculator.network.base import TargetInfo
from foretell.speculator.network.mtp import MTPNetwork
from foretell.train.recipe.base import RecipeSetup
from foretell.train.recipe.mtp import MTPRecipe
from helpers import random_tokens

VOCAB, LAYERS = 260, 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "initializer_range": 0.15, "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip
STATES: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
MIXTURE: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "qwen3": transformers.Qwen3Config(**SIZES),
    "gemma2": transformers.Gemma2Config(**SIZES),
    "qwen3_5_text": transformers.Qwen3_5TextConfig(**SIZES, **STATES),
    "qwen3_next": transformers.Qwen3NextConfig(**SIZES, **STATES, **MIXTURE),
}
TEXT = random_tokens(20, VOCAB, seed=2)


@cache
def folder_of(kind: str) -> Path:
    """A random model of transformers."""
    torch.manual_seed(0)
    folder = Path(mkdtemp(prefix="foretell-mtp-"))
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    tiny_tokenizer(VOCAB).save(str(folder / "tokenizer.json"))
    return folder


@cache
def trained(kind: str, layers: int = 1) -> tuple[MTPNetwork, Verifier, RecipeSetup]:
    """Layers as a training begins with, and random numbers added."""
    target = load(str(folder_of(kind)), "float32")
    c, checkpoint = target.config, target.checkpoint
    assert checkpoint is not None
    about = TargetInfo(name="tiny", hidden=c.hidden, vocab=c.vocab, layers=c.layers)
    setup = RecipeSetup(about, c, checkpoint.embedding_and_head(torch.float32), checkpoint,
                        options={"layers": str(layers)})  # fmt: skip
    network = MTPRecipe.build(setup).network
    assert isinstance(network, MTPNetwork)
    torch.manual_seed(1)
    for parameter in network.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    return network, Verifier("target", c), setup


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_block_is_written_as_transformers_wrote_it(kind: str) -> None:
    config, weights = (
        from_hf(json.loads((folder_of(kind) / "config.json").read_text())),
        SafetensorsWeights(folder_of(kind)),
    )
    published = load_file(folder_of(kind) / "model.safetensors")
    for i in (0, LAYERS - 1):
        block = build_block(config, i, weights, torch.float32, torch.device("cpu"))
        ours = tensors_of(config, i, to_weights(block))
        theirs = {name: t for name, t in published.items() if name.startswith(f"model.layers.{i}.")}
        stacked = f"model.layers.{i}.mlp.experts."
        if f"{stacked}gate_up_proj" in theirs:
            both = theirs.pop(f"{stacked}gate_up_proj").chunk(2, 1)
            for name, t in (("gate", both[0]), ("up", both[1]), ("down", theirs.pop(f"{stacked}down_proj"))):
                theirs |= {f"{stacked}{j}.{name}_proj.weight": own for j, own in enumerate(t)}
        assert sorted(ours) == sorted(theirs)
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-6)


def unrolled(network: MTPNetwork, steps: int) -> list[torch.Tensor]:
    """Logits of every step where all steps have them, from random hidden states."""
    kept = torch.arange(len(TEXT) - 1)[None] < len(TEXT) - 1 - steps
    states = network(torch.tensor([TEXT]), states_before(), [kept] * steps)
    return [network.compute_logits(state).detach() for state in states]


def states_before() -> torch.Tensor:
    return torch.randn(1, len(TEXT), SIZES["hidden_size"], generator=torch.Generator().manual_seed(3))


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_the_library_reads_what_is_written_and_gives_the_same_logits(tmp_path: Path) -> None:
    """FastMTP's three steps of one layer on its own outputs."""
    network, verifier, setup = trained("qwen3")
    export(network, verifier, "speculators", tmp_path / "out")
    again = load_speculator(tmp_path / "out", setup.card, setup.embedding_and_head)
    assert isinstance(again, MTPNetwork)
    for ours, theirs in zip(unrolled(again, 3), unrolled(network, 3), strict=True):
        assert torch.equal(ours, theirs)
    core = pytest.importorskip("speculators.models.mtp.core", exc_type=ImportError)
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    about = core.MTPSpeculatorConfig.from_dict(raw)
    about.transformer_layer_config._attn_implementation = "eager"
    peer = core.MTPDraftModel(about).eval()
    lent = setup.embedding_and_head
    shared = {"embed_tokens.weight": lent.embedding, "lm_head.weight": lent.head}
    unused = peer.load_state_dict(load_file(tmp_path / "out" / "model.safetensors") | shared, strict=False)
    assert not unused.unexpected_keys and all("verifier" in key for key in unused.missing_keys), unused
    with torch.no_grad():
        logits, *_ = peer(input_ids=torch.tensor([TEXT]), hidden_states=states_before())
    for ours, theirs in zip(unrolled(network, 3), logits, strict=True):
        torch.testing.assert_close(ours, theirs[0, : len(ours)], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next"])
def test_a_target_with_the_written_layer_drafts_like_the_trained_one(kind: str, tmp_path: Path) -> None:
    network, verifier, _ = trained(kind)
    export(network, verifier, "hf", tmp_path / "out")
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder_of(kind) / name).read_bytes())
    both = [load_file(path) for path in (tmp_path / "model.safetensors", tmp_path / "out" / "mtp.safetensors")]
    save_file(both[0] | both[1], tmp_path / "model.safetensors", metadata={"format": "pt"})
    target = load(str(tmp_path), "float32")
    assert target.checkpoint is not None
    [layer] = target.checkpoint.prediction_layers()
    torch.testing.assert_close(layer.combine, network.parts[0].combine.weight.data)
    for name, tensor in network.blocks[0].state_dict().items():
        torch.testing.assert_close(layer.block.state_dict()[name], tensor, rtol=0, atol=1e-6)
    torch.testing.assert_close(layer.norm, network.parts[0].norm.weight.data, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "layers", "format_name", "words"),
    [
        (
            "gemma2",
            1,
            "hf",
            "checkpoints of gemma2 have no names for layers of multi-token prediction such as these; those of",
        ),
        (
            "qwen3_5_text",
            2,
            "hf",
            "checkpoints of qwen3_5_text have one layer of multi-token prediction, and here are 2",
        ),
        (
            "qwen3_5_text",
            1,
            "speculators",
            "for one layer of multi-token prediction of qwen3, and here are 1 of qwen3_5",
        ),
        ("qwen3", 2, "speculators", "for one layer of multi-token prediction of qwen3, and here are 2 of qwen3"),
    ],
)
def test_what_has_no_place_in_a_format_is_one_sentence(
    kind: str, layers: int, format_name: str, words: str, tmp_path: Path
) -> None:
    network, verifier, _ = trained(kind, layers)
    with pytest.raises(ValueError, match=words) as error:
        export(network, verifier, format_name, tmp_path / "out")
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", ["count", "key", "tensor", "missing"])
def test_a_library_checkpoint_with_something_else_is_refused(damage: str, tmp_path: Path) -> None:
    network, verifier, setup = trained("qwen3")
    export(network, verifier, "speculators", tmp_path / "out")
    config, file = tmp_path / "out" / "config.json", tmp_path / "out" / "model.safetensors"
    raw, tensors = json.loads(config.read_text()), load_file(file)
    if damage == "count":
        raw["num_nextn_predict_layers"] = 2
    elif damage == "key":
        raw["num_centroids"] = 8
    elif damage == "tensor":
        tensors["masked_embedding.centroids.weight"] = torch.zeros(2, 2)
    else:
        del tensors["mtp_layers.0.self_attn.q_proj.weight"]
    config.write_text(json.dumps(raw))
    save_file(tensors, file)
    words = {
        "count": "num_nextn_predict_layers should be 1, as the library has it, found 2",
        "key": "num_centroids should be left out: this key is not known here",
        "tensor": "it holds masked_embedding.centroids.weight, which a checkpoint of this configuration does not have",
        "missing": "mtp_layers.0.self_attn.q_proj.weight",
    }
    with pytest.raises(ValueError, match=words[damage]) as error:
        load_speculator(tmp_path / "out", setup.card, setup.embedding_and_head)
    assert "\n" not in str(error.value)
