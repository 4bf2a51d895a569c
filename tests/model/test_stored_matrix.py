"""Matrices as their files store them."""

import numpy as np
import pytest
import torch

from foretell.model.load.gguf import GGUF
from foretell.model.load.gguf_header import gguf_config
from foretell.model.load.gguf_weights import GGUFWeights
from foretell.model.load.reference import DEFAULT_MODEL, resolve_reference
from foretell.model.matrices.stored import StoredMatrix


def test_matrices_of_a_gguf_file_widen_to_its_tensors() -> None:
    file = GGUF(resolve_reference(DEFAULT_MODEL))
    weights = GGUFWeights(file, gguf_config(file))
    found = {
        name: weights.matrix(f"model.{name}.weight", *shape)
        for name, shape in {
            "embed_tokens": (49152, 576),
            "layers.3.self_attn.q_proj": (576, 576),
            "layers.3.self_attn.v_proj": (192, 576),
            "layers.3.mlp.down_proj": (576, 1536),
        }.items()
    }
    assert [m.kind for m in found.values()] == ["Q8_0", "Q4_1", "Q4_1", "Q4_1"]
    for name, matrix in found.items():
        assert torch.equal(matrix.widen(), weights.require(f"model.{name}.weight", *matrix.shape)), name
    assert len({weights.matrix("model.embed_tokens.weight", 49152, 576).data.data_ptr() for _ in range(2)}) == 1


def test_float_matrices_keep_their_dtype_and_rows_are_stacked() -> None:
    a, b = torch.randn(4, 6).bfloat16(), torch.randn(2, 6).bfloat16()
    stored = [StoredMatrix.of(a), StoredMatrix.of(b)]
    assert [m.kind for m in stored] == ["BF16", "BF16"] and not stored[0].quantized
    assert torch.equal(torch.cat([m.widen() for m in stored]), torch.cat([a, b]))
    assert torch.equal(stored[0].rows(torch.tensor([3, 1])).widen(), a[[3, 1]])


def test_levels_with_a_zero_point_widen() -> None:
    levels, scale, zero = np.arange(32) % 16, np.float16(0.25), np.float16(7)
    packed = (levels[:16] | levels[16:] << 4).astype(np.uint8)
    block = np.concatenate([np.array([scale, zero]).view(np.uint8), packed])
    matrix = StoredMatrix("Q4_Z", 32, torch.from_numpy(block[None]))
    assert matrix.widen()[0].tolist() == [(int(q) - 7) * 0.25 for q in levels]


def test_rows_must_be_whole_blocks() -> None:
    with pytest.raises(ValueError, match="a Q4_K matrix of 576 inputs needs rows of whole blocks of 256"):
        StoredMatrix("Q4_K", 576, torch.zeros(4, 324, dtype=torch.uint8))
