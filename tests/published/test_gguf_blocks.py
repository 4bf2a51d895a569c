"""Block formats of GGUF are widened to the numbers of llama.cpp, also those that no kernel reads."""

import zlib
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from gguf_models import CASES, oracle_of, write_model

from foretell.model.load.build import build_decoder
from foretell.model.load.gguf import GGUF
from foretell.model.load.gguf_header import gguf_config
from foretell.model.load.gguf_weights import GGUFWeights
from foretell.model.matrices.kinds import KINDS
from helpers import all_logits, random_tokens

LLAMA_CPP = {
    "IQ1_M": 0x162B09AF, "IQ1_S": 0x7FA96D38, "IQ2_S": 0xCB659E7D, "IQ2_XS": 0x90B034FD, "IQ2_XXS": 0xF474209D,
    "IQ3_S": 0x97B063A8, "IQ3_XXS": 0xA9BDAD07, "IQ4_NL": 0xD6FF2934, "IQ4_XS": 0x7246BA0F, "MXFP4": 0x4A9CA196,
    "NVFP4": 0x856F3FAB, "Q2_K": 0xFE5840CB, "Q3_K": 0x85FA093C, "Q4_0": 0x19A0A13D, "Q4_1": 0x33336711, "Q4_K":
    0x6373248B, "Q5_0": 0xD5207EB3, "Q5_1": 0xE00E9861, "Q5_K": 0x8A711182, "Q6_K": 0x2FA3A4D3, "Q8_0": 0x257074B0,
    "TQ1_0": 0x1914E3B9, "TQ2_0": 0xC277B57F,
}  # fmt: skip
"""CRC-32 of the float32 numbers, what is not finite replaced, of 32 drawn blocks, by `dequantize_row_*` of
ggml 0.25.3.
"""


SAME = {
    "TQ1_0": "Q4_0", "TQ2_0": "Q4_0", "Q3_K": "Q6_K", "IQ3_XXS": "Q6_K", "IQ3_S": "Q6_K",
    "IQ1_S": "Q6_K", "IQ1_M": "Q6_K", "NVFP4": "NVFP4",
}  # fmt: skip
"""Formats that become another one with the same numbers."""
NEAR = {
    "IQ2_XXS": ("Q8_0", 0.03), "Q2_K": ("Q8_0", 0.7), "IQ2_XS": ("Q8_0", 0.7), "IQ2_S": ("Q8_0", 0.7),
}  # fmt: skip
"""Formats that become the nearest one, and the most that this may change, in per cent."""
SCALE_AT = {"Q2_K": 80, "Q3_K": 108, "TQ1_0": 52, "TQ2_0": 64}
"""Byte of the scale of a block, where it is not the first."""


def write(path: Path, tensors: dict[str, tuple[np.ndarray, Kind]]) -> GGUF:
    writer = gguf.GGUFWriter(path, "llama")
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUF(path)


@pytest.mark.parametrize("name", LLAMA_CPP)
def test_blocks_have_the_numbers_of_llama_cpp(name: str, tmp_path: Path) -> None:
    kind = Kind[name]
    raw = np.random.default_rng(kind.value).integers(0, 256, (8, 4 * GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    file = write(tmp_path / "m.gguf", {"t": (raw, kind)})
    with np.errstate(all="ignore"):
        numbers = file.load_tensor("t").numpy()
        assert numbers.shape == (8, 4 * GGML_QUANT_SIZES[kind][0])
        assert zlib.crc32((np.nan_to_num(numbers) + np.float32(0)).tobytes()) == LLAMA_CPP[name]
        stored = file.stored_matrix("t") if name in KINDS else None
        if stored is not None:
            np.testing.assert_array_equal(stored.widen().numpy(), numbers)


def blocks_of(name: str, random: np.random.Generator) -> np.ndarray:
    """Drawn blocks with the scales of small weights."""
    kind = Kind[name]
    per_block, size = GGML_QUANT_SIZES[kind]
    raw = random.integers(0, 256, (8, 1024 // per_block, size), dtype=np.uint8)
    scales = random.uniform(1e-3, 4e-3, raw.shape[:2]).astype(np.float16)
    if name == "IQ1_M":
        words = raw[..., -8:].view(np.uint16)
        words[...] = words & 0x0FFF | ((scales.view(np.uint16)[..., None] >> np.array([0, 4, 8, 12], np.uint16)) << 12)
    elif name == "NVFP4":
        # Scales of a factor of 16, as those of neighbouring weights are.
        raw[..., :4] = random.integers(64, 96, raw[..., :4].shape)
    else:
        at = SCALE_AT.get(name, 0)
        raw[..., at : at + 2] = scales[..., None].view(np.uint8)
        if name == "Q2_K":
            raw[..., 82:84] = scales[..., None].view(np.uint8)
    return raw.reshape(8, -1)


@pytest.mark.parametrize("name", [*SAME, *NEAR])
def test_blocks_that_no_kernel_reads_become_the_nearest_ones(name: str, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", {"t": (blocks_of(name, np.random.default_rng(1)), Kind[name])})
    stored, numbers = file.stored_matrix("t"), file.load_tensor("t").numpy()
    assert stored is not None and (stored.kind, stored.shape) == (SAME.get(name) or NEAR[name][0], (8, 1024))
    if name in SAME:
        np.testing.assert_array_equal(stored.widen().numpy(), numbers)
        return
    lost = np.linalg.norm(stored.widen().numpy() - numbers) / np.linalg.norm(numbers)
    assert 0 < 100 * lost < NEAR[name][1], lost


@pytest.mark.parametrize("name", ["NVFP4", "Q3_K", "TQ2_0"])
def test_a_factor_is_a_part_of_the_blocks(name: str, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", {"t": (blocks_of(name, np.random.default_rng(2)), Kind[name])})
    stored, numbers = file.stored_matrix("t", factor=0.37), file.load_tensor("t").numpy() * np.float32(0.37)
    assert stored is not None
    np.testing.assert_allclose(stored.widen().numpy(), numbers, rtol=2e-7 if name == "NVFP4" else 5e-4)


def test_rows_are_made_in_any_order(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", {"t": (blocks_of("IQ3_S", np.random.default_rng(3)), Kind.IQ3_S)})
    stored = file.stored_matrix("t")
    assert stored is not None
    order = torch.tensor([6, 1, 7, 0])
    assert torch.equal(stored.rows(order).widen(), stored.widen()[order])
    assert torch.equal(stored.rows(order).read_rows(1, 3), stored.data[[1, 7]])


@pytest.mark.parametrize("kind", [Kind.Q1_0, Kind.I32])
def test_a_type_that_cannot_be_read_is_named(kind: Kind, tmp_path: Path) -> None:
    size = GGML_QUANT_SIZES[kind][1]
    with pytest.raises(
        ValueError, match=rf"the tensor t has the type {kind.name}, which is not supported; take a file"
    ):
        write(tmp_path / "m.gguf", {"t": (np.zeros((2, size), np.uint8), kind)}).load_tensor("t")


@pytest.mark.parametrize("name", ["qwen3", "granitemoe"])
def test_factors_of_matrices_are_used(name: str, tmp_path: Path) -> None:
    """Files with NVFP4 have a factor beside a matrix, and one for each expert beside those of the experts."""
    model, text = oracle_of(CASES[name]), random_tokens(13, 61)
    with torch.no_grad():
        write_model(tmp_path / "m.gguf", CASES[name], model)
    plain, tensors = GGUF(tmp_path / "m.gguf"), dict[str, tuple[np.ndarray, Kind]]()
    for tensor, entry in plain.tensors.items():
        data = plain.load_tensor(tensor).numpy()
        if tensor.startswith("blk.1.") and len(entry.shape) > 1 and "ffn_gate_inp" not in tensor:
            factor = np.linspace(0.5, 2, entry.shape[0] if len(entry.shape) == 3 else 1, dtype=np.float32)
            tensors[tensor.replace(".weight", ".scale")] = factor, Kind.F32
            tensors[tensor.replace(".weight", ".input_scale")] = factor, Kind.F32
            data = data / factor.reshape(-1, *[1] * (data.ndim - 1))
        tensors[tensor] = data, Kind.F32
    scaled = write(tmp_path / "scaled.gguf", tensors)
    assert len(scaled.tensors) > len(plain.tensors)
    config = gguf_config(plain)
    one, two = (
        all_logits(build_decoder(config, GGUFWeights(file, config), torch.float32, torch.device("cpu")), text)
        for file in (plain, _with_metadata(scaled, plain))
    )
    np.testing.assert_allclose(two, one, rtol=0, atol=1e-5 * np.abs(one).max())


def _with_metadata(file: GGUF, other: GGUF) -> GGUF:
    file.metadata = other.metadata
    return file
