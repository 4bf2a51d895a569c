"""GGUF files of families of models give the logits of transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_models import CASES, oracle_of, write_model

from foretell.model.kernels import available
from foretell.model.load.build import build_decoder
from foretell.model.load.gguf import GGUF
from foretell.model.load.gguf_header import gguf_config, unread_tensors
from foretell.model.load.gguf_weights import GGUFWeights
from foretell.model.load.native import load_native
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
