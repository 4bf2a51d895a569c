"""Layers of multi-token prediction in GGUF files score as those of transformers."""

from pathlib import Path
from shutil import copy
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from gguf_models import CASES, oracle_of, write_model
from transformers.modeling_layers import MtpLayer
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.glm4_moe import modeling_glm4_moe as glm
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen_moe
from transformers.models.qwen3_next import modeling_qwen3_next as next_qwen

from foretell.core.context import StepResult
from foretell.draft import MTPDrafter
from foretell.model.kernels import available
from foretell.model.load.build import build_decoder
from foretell.model.load.gguf import GGUF
from foretell.model.load.gguf_header import GGUFHeader, check_model, gguf_config
from foretell.model.load.gguf_weights import GGUFWeights
from foretell.model.load.mtp import load_mtp
from foretell.model.load.native import load_native
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.mtp import MTPLayer
from foretell.model.run.network import Network
from foretell.speculator.formats.gguf import open_gguf
from foretell.speculator.load import is_speculator
from helpers import chain_tree, context_of, random_tokens

TEXT = random_tokens(20, 61, seed=3)
PARTS: dict[str, tuple[Any, Any]] = {
    "glm4moe": (glm.Glm4MoeDecoderLayer, glm.Glm4MoeRMSNorm),
    "deepseek2 V3": (deepseek.DeepseekV3DecoderLayer, deepseek.DeepseekV3RMSNorm),
    "deepseek2 whole": (deepseek.DeepseekV3DecoderLayer, deepseek.DeepseekV3RMSNorm),
    "qwen35": (qwen.Qwen3_5DecoderLayer, qwen.Qwen3_5RMSNorm),
    "qwen35moe": (qwen_moe.Qwen3_5MoeDecoderLayer, qwen_moe.Qwen3_5MoeRMSNorm),
    "qwen3next": (next_qwen.Qwen3NextDecoderLayer, next_qwen.Qwen3NextRMSNorm),
}
"""Classes of a layer and of its norms, by the case of the model."""
STEMS = {"mtp_block.": "", "enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm"}
"""Names of the parts in transformers, and in checkpoints."""


@torch.no_grad()
def write(path: Path, name: str) -> torch.Tensor:
    """Write a random model with its layer; the scores of the layer after the text."""
    model = oracle_of(CASES[name])
    attends = max(
        i for i, kind in enumerate(getattr(model.config, "layer_types", None) or [""] * 3) if "lin" not in kind
    )
    layer = MtpLayer(model.config, *PARTS[name], attends).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    at, tensors = f"model.layers.{model.config.num_hidden_layers}.", dict[str, torch.Tensor]()
    for part, tensor in layer.state_dict().items():
        stem = next(stem for stem in STEMS if part.startswith(stem))
        tensors[at + part.replace(stem, STEMS[stem], 1)] = tensor
    write_model(path, CASES[name], model, prediction=tensors)
    states = model.model(torch.tensor([TEXT])).last_hidden_state[:, :-1]
    count = states.shape[1]
    position, mask = torch.arange(count)[None], torch.full((count, count), float("-inf")).triu(1)[None, None]
    embedded = model.model.embed_tokens(torch.tensor([TEXT[1:]]))
    out = layer(embedded, states, model.model.rotary_emb(embedded, position), mask, position, None)
    scores: torch.Tensor = model.lm_head(out)[0, -1]
    return scores


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=pytest.mark.skipif(not available(), reason="-"))])
@pytest.mark.parametrize("name", PARTS)
def test_a_layer_of_a_file_scores_as_that_of_transformers(name: str, kernels: bool, tmp_path: Path) -> None:
    wanted = write(tmp_path / "m.gguf", name)
    file = GGUF(tmp_path / "m.gguf")
    config = gguf_config(file)
    weights = GGUFWeights(file, config)
    cpu = torch.device("cpu")
    network = load_native(config, weights, "float32") if kernels else build_decoder(config, weights, torch.float32, cpu)
    torch.testing.assert_close(
        scores(network, load_mtp(config, weights, network)), wanted, rtol=0, atol=1e-5 * float(wanted.abs().max())
    )


def scores(network: Network, layer: MTPLayer) -> torch.Tensor:
    """The scores of a layer after the text."""
    tree = chain_tree(TEXT[:-1])
    drafter, output = MTPDrafter(layer), DecoderRunner(network).forward([0], tree, hidden_layers=layer.hidden_layers)
    drafter.observe(StepResult(context_of(TEXT), tree, output, (tuple(range(tree.nodes)),), ((TEXT[-1],),), (0,)))
    logits, at = drafter.expand(chain_tree([TEXT[-1]]), np.array([[0]]), context_of(TEXT))
    last: torch.Tensor = logits[at[0, -1]]
    return last


def split(path: Path, name: str) -> tuple[Path, torch.Tensor]:
    """Write a model and its layer as llama.cpp's converter does with --no-mtp and --mtp; the scores of the layer."""
    path.mkdir(exist_ok=True)
    wanted, layers = write(path / "both", name), oracle_of(CASES[name]).config.num_hidden_layers
    reader = GGUFReader(path / "both")
    for file, own in (("m.gguf", False), ("mtp-m.gguf", True)):
        writer = GGUFWriter(path / file, reader.fields["general.architecture"].contents())
        for key, field in reader.fields.items():
            if not key.startswith(("GGUF.", "general.architecture")):
                writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
        for tensor in reader.tensors:
            if not tensor.name.startswith("blk.") or tensor.name.startswith(f"blk.{layers}.") is own:
                writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return path / "m.gguf", wanted


@pytest.mark.parametrize("named", [False, True])
def test_the_layer_of_a_file_beside_the_model_scores_the_same(named: bool, tmp_path: Path) -> None:
    model, wanted = split(tmp_path, "glm4moe")
    file = tmp_path / "mtp-m.gguf"
    if named:
        file = file.rename(tmp_path / "other.gguf")
    assert is_speculator(file) and not is_speculator(model)
    config = gguf_config(GGUF(model))
    weights = GGUFWeights(GGUF(model), config)
    network = build_decoder(config, weights, torch.float32, torch.device("cpu"))
    own = scores(network, load_mtp(config, weights, network, file if named else None))
    torch.testing.assert_close(own, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


def test_files_with_the_layer_alone_are_refused_in_a_sentence(tmp_path: Path) -> None:
    model, _ = split(tmp_path, "glm4moe")
    split(tmp_path / "other", "deepseek2 V3")
    config = gguf_config(GGUF(model))
    weights = GGUFWeights(GGUF(model), config)
    network = build_decoder(config, weights, torch.float32, torch.device("cpu"))
    alone = tmp_path / "mtp-m.gguf"
    for call, words in (
        (lambda: GGUFWeights(GGUF(alone), config), "alone; name the model's file with --model"),
        (lambda: check_model(GGUFHeader(alone)), "alone; name the model's file with --model"),
        (lambda: open_gguf(alone), "with which --method mtp drafts alone"),
        (lambda: load_mtp(config, weights, network, model), "this file is of another kind"),
        (lambda: load_mtp(config, weights, network, tmp_path / "other/mtp-m.gguf"), "of another model: the arch"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    copy(alone, tmp_path / "mtp-n.gguf")
    with pytest.raises(ValueError, match="2 files with a layer of multi-token prediction beside it"):
        load_mtp(config, weights, network)
    for file in tmp_path.glob("mtp-*"):
        file.unlink()
    with pytest.raises(ValueError, match="without its multi-token prediction layer"):
        load_mtp(config, weights, network)
