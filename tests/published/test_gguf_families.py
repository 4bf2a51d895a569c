"""GGUF files and directories of families of models give the logits of transformers."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_models import CASES, oracle_of, write_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from foretell.model.config.model import with_context, with_rope_scaling
from foretell.model.config.readers.hf import from_hf
from foretell.model.kernels import available
from foretell.model.load.build import build_decoder
from foretell.model.load.gguf import GGUF
from foretell.model.load.gguf_header import gguf_config, unread_tensors
from foretell.model.load.gguf_weights import GGUFWeights
from foretell.model.load.native import load_native
from foretell.model.load.weights import SafetensorsWeights
from foretell.model.run.network import Network
from helpers import all_logits, random_tokens

TEXT = random_tokens(29, 61)


def check(network: Network, model: object, tolerance: float) -> None:
    with torch.no_grad():
        wanted = model(torch.tensor([TEXT])).logits[0].numpy()  # type: ignore[operator]
    np.testing.assert_allclose(all_logits(network, TEXT), wanted, rtol=0, atol=tolerance * np.abs(wanted).max())


@pytest.mark.parametrize("name", CASES)
def test_a_gguf_file_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    model = oracle_of(CASES[name])
    with torch.no_grad():
        write_model(tmp_path / "m.gguf", CASES[name], model)
    file = GGUF(tmp_path / "m.gguf")
    config = gguf_config(file)
    assert unread_tensors(file, config) == []
    file.tensors = {**file.tensors, "blk.0.stranger.weight": file.tensors["token_embd.weight"]}
    assert unread_tensors(file, config) == ["blk.0.stranger.weight"]
    del file.tensors["blk.0.stranger.weight"]
    check(build_decoder(config, GGUFWeights(file, config), torch.float32, torch.device("cpu")), model, 1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_a_directory_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    model = oracle_of(CASES[name])
    model.save_pretrained(tmp_path)
    check(build_directory(tmp_path), model, 1e-5)


@pytest.mark.exhaustive
@pytest.mark.skipif(not available(), reason="the kernels are not available here")
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0])
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_read_quantised_files(name: str, kind: Kind, tmp_path: Path) -> None:
    model = oracle_of(CASES[name])
    with torch.no_grad():
        write_model(tmp_path / "m.gguf", CASES[name], model, kind)
    file = GGUF(tmp_path / "m.gguf")
    config = gguf_config(file)
    check(load_native(config, GGUFWeights(file, config), "float32"), model, 2e-5)


def build_gguf(file: GGUF) -> None:
    config = gguf_config(file)
    build_decoder(config, GGUFWeights(file, config), torch.float32, torch.device("cpu"))


def build_directory(path: Path) -> Network:
    config, weights = from_hf(json.loads((path / "config.json").read_text())), SafetensorsWeights(path)
    weights.check_layers(config.layers)
    weights.check_tensors(config)
    return build_decoder(weights.settle_head(config), weights, torch.float32, torch.device("cpu"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_a_file_without_a_tensor_is_refused(name: str, tmp_path: Path) -> None:
    """Or with one more. Without its output matrix, a file has tied embeddings."""
    model = oracle_of(CASES[name])
    with torch.no_grad():
        write_model(tmp_path / "m.gguf", CASES[name], model)
    file = GGUF(tmp_path / "m.gguf")
    last = f"blk.{model.config.num_hidden_layers - 1}."
    optional = ("rope_", "output.weight")
    names = [each for each in file.tensors if each.startswith(last) or not each.startswith(("blk.", *optional))]
    names = [each for each in names if ".indexer." not in each]
    whole = dict(file.tensors)
    for one in names:
        file.tensors = {each: place for each, place in whole.items() if each != one}
        with pytest.raises(ValueError, match=r"is it complete\?|does not read|the configuration has no"):
            build_gguf(file)
    file.tensors = {**whole, f"{last}other.weight": whole["token_embd.weight"]}
    with pytest.raises(ValueError, match=rf"a tensor {last}other\.weight, which the decoder of .* does not read"):
        build_gguf(file)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_a_directory_with_other_tensors_is_refused_or_read(name: str, tmp_path: Path) -> None:
    """Refused: one is missing, one has another shape, there is one more. Read: names without `model.`, and a head with
    other numbers than the tied embedding.
    """
    model = oracle_of(CASES[name])
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)

    def changed(change: Mapping[str, torch.Tensor]) -> None:
        save_file(dict(change), path, {"format": "pt"})

    last = f"layers.{model.config.num_hidden_layers - 1}."
    for one in [each for each in tensors if (last in each and ".indexer." not in each) or ".layers." not in each]:
        changed({each: tensor for each, tensor in tensors.items() if each != one})
        with pytest.raises(ValueError, match=r"is it complete\?"):
            build_directory(tmp_path)
        changed({**tensors, one: torch.cat([tensors[one].flatten(), torch.ones(1)])})
        with pytest.raises(ValueError, match="shape"):
            build_directory(tmp_path)
    changed({**tensors, f"model.{last}other.weight": torch.ones(1)})
    with pytest.raises(ValueError, match="does not read"):
        build_directory(tmp_path)
    changed({each.removeprefix("model."): tensor for each, tensor in tensors.items()})
    check(build_directory(tmp_path), model, 1e-5)
    if model.config.tie_word_embeddings:
        table = next(
            tensor for each, tensor in tensors.items() if each.endswith(("tokens.weight", "embeddings.weight"))
        )
        changed({**tensors, "lm_head.weight": table.flip(0).contiguous()})
        untied = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
        check(build_directory(tmp_path), untied, 1e-5)


@pytest.mark.parametrize(("name", "kind"), [("glm-dsa", "glm_moe_dsa"), ("deepseek32", "deepseek_v32")])
def test_a_model_that_chooses_tokens_is_read_for_texts_in_which_it_attends_to_all(
    name: str, kind: str, tmp_path: Path
) -> None:
    model = oracle_of(CASES[name])
    with torch.no_grad():
        write_model(tmp_path / "m.gguf", CASES[name], model)
    model.save_pretrained(tmp_path)
    yarn = {"rope_type": "yarn", "factor": 4.0}
    for config in (gguf_config(GGUF(tmp_path / "m.gguf")), from_hf(json.loads((tmp_path / "config.json").read_text()))):
        assert config.context == 32 and with_context(config, 20).context == 20
        with pytest.raises(ValueError, match=f"{kind} is read for texts of up to 32 tokens"):
            with_context(config, 33)
        with pytest.raises(ValueError, match=f"{kind} is read for texts of up to 32 tokens"):
            with_rope_scaling(config, yarn)
