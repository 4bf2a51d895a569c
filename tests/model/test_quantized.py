"""Quantised safetensors checkpoints, written here by numpy from the definitions of their formats."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from command import save_tiny_model
from foretell.api import Model
from foretell.load import load, load_draft
from foretell.model.load.quantization_config import parse_quantization, quantization_method
from foretell.model.load.quantized import QuantizedWeights
from foretell.model.load.quantized_formats import unpack_bits
from helpers import chain_tree, random_tokens

OUT, IN, NAME = 64, 96, "model.layers.0.mlp.up_proj"
Tensors = dict[str, np.ndarray]


def bit_stream(fields: np.ndarray, bits: int) -> np.ndarray:
    """Rows of fields as 32-bit words, the lowest bits first."""
    each = (fields[..., None].astype(np.int64) >> np.arange(bits)) & 1
    flat: np.ndarray = each.reshape(len(fields), -1)
    words: np.ndarray = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 32))).reshape(len(fields), -1, 32)
    return np.asarray((words << np.arange(32)).sum(-1).astype(np.uint32).view(np.int32))


def draw(bits: int, group: int, symmetric: bool, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random levels [out, in], scales and zero points [out, groups]."""
    random, groups = np.random.default_rng(seed), -(-IN // (group or IN))
    level = random.integers(0, 1 << bits, (OUT, IN))
    scale = random.uniform(0.001, 0.1, (OUT, groups)).astype(np.float16)
    zero = np.full_like(scale, 1 << (bits - 1)) if symmetric else random.integers(1, (1 << bits) - 1, scale.shape)
    return level, scale, zero.astype(np.int64)


def product(level: np.ndarray, scale: np.ndarray, zero: np.ndarray, group_of: np.ndarray) -> np.ndarray:
    return np.asarray(scale.astype(np.float32)[:, group_of] * (level - zero[:, group_of]).astype(np.float32))


def write(folder: Path, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> QuantizedWeights:
    """A checkpoint of these tensors, read again; names without a module belong to `NAME`."""
    found = {}
    for name, value in tensors.items():
        whole = name if name.startswith(("model.", "lm_head.")) else f"{NAME}.{name}"
        found[whole] = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(value))
    save_file(found, folder / "model.safetensors")
    quantization = parse_quantization({"quantization_config": config}, "config.json")
    assert quantization is not None
    return QuantizedWeights(folder, quantization)


def gptq(level: np.ndarray, scale: np.ndarray, zero: np.ndarray, bits: int, offset: int = 1) -> Tensors:
    return {
        "qweight": bit_stream(level, bits).T,
        "qzeros": bit_stream(zero.T - offset, bits),
        "scales": scale.T,
    }


@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "version", "kind"),
    [
        (4, 32, True, 1, "Q4_0"), (4, 32, False, 1, "Q4_Z"), (4, 96, False, 2, "Q4_Z"), (4, 0, True, 2, "Q4_0"),
        (8, 32, True, 1, "Q8_0"), (8, 0, True, 2, "Q8_0"), (2, 32, True, 1, "Q4_0"), (3, 32, False, 1, "Q4_Z"),
        (8, 32, False, 2, "F32"), (4, 16, True, 1, "F32"),
    ],
)  # fmt: skip
def test_gptq(bits: int, group: int, symmetric: bool, version: int, kind: str, tmp_path: Path) -> None:
    level, scale, zero = draw(bits, group, symmetric)
    config = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "sym": symmetric}
    config |= {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    weights = write(tmp_path, gptq(level, scale, zero, bits, 2 - version), config)
    wanted = torch.from_numpy(product(level, scale, zero, np.arange(IN) // (group or IN)))
    assert torch.equal(weights.require(f"{NAME}.weight", OUT, IN), wanted)
    stored = weights.matrix(f"{NAME}.weight", OUT, IN)
    assert stored.kind == kind and torch.equal(stored.widen(), wanted)
    assert (f"{NAME}.weight" in weights.widened) == (kind == "F32")


def test_gptq_with_an_order_of_its_own_is_widened(tmp_path: Path) -> None:
    level, scale, zero = draw(4, 32, symmetric=False)
    index = np.random.default_rng(1).permutation(np.arange(IN) // 32).astype(np.int32)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
    weights = write(tmp_path, gptq(level, scale, zero, 4) | {"g_idx": index}, config)
    stored = weights.matrix(f"{NAME}.weight", OUT, IN)
    assert torch.equal(stored.widen().float(), torch.from_numpy(product(level, scale, zero, index)))
    assert "several scales" in weights.widened[f"{NAME}.weight"]


def test_awq(tmp_path: Path) -> None:
    level, scale, zero = draw(4, 32, symmetric=False)
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])

    def words(fields: np.ndarray) -> np.ndarray:
        return bit_stream(fields.reshape(len(fields), -1, 8)[..., order].reshape(len(fields), -1), 4)

    tensors = {"qweight": words(level.T), "qzeros": words(zero.T), "scales": scale.T}
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    weights = write(tmp_path, tensors, config)
    wanted = torch.from_numpy(product(level, scale, zero, np.arange(IN) // 32))
    assert torch.equal(weights.require(f"{NAME}.weight", OUT, IN), wanted)
    stored = weights.matrix(f"{NAME}.weight", OUT, IN)
    assert stored.kind == "Q4_Z" and torch.equal(stored.widen(), wanted)


def compressed(stored: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "sparsity_config": {"format": "dense"},
        "transform_config": {},
    }


@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "kind"),
    [(4, 32, True, "Q4_0"), (4, 32, False, "Q4_Z"), (3, 96, True, "Q4_0"), (8, 0, True, "Q8_0"), (6, 32, True, "Q8_0")],
)
def test_pack_quantized(bits: int, group: int, symmetric: bool, kind: str, tmp_path: Path) -> None:
    level, scale, zero = draw(bits, group, symmetric)
    tensors: dict[str, Any] = {
        "weight_packed": bit_stream(level, bits),
        "weight_scale": torch.from_numpy(scale).bfloat16(),
        "weight_shape": np.array([OUT, IN]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = bit_stream(zero.T, bits).T
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    config = compressed("pack-quantized", num_bits=bits, type="int", symmetric=symmetric, **strategy)
    weights = write(tmp_path, tensors, config)
    exact = torch.from_numpy(scale).bfloat16().float().numpy()
    wanted = torch.from_numpy(product(level, exact, zero, np.arange(IN) // (group or IN)))
    assert torch.equal(weights.require(f"{NAME}.weight", OUT, IN), wanted)
    stored = weights.matrix(f"{NAME}.weight", OUT, IN)
    assert stored.kind == kind and torch.equal(stored.widen(), wanted)


@pytest.mark.parametrize(("scale", "kind"), [(torch.bfloat16, "Q8_0"), (torch.float32, "F32")])
def test_int_quantized_keeps_scales_that_float16_holds(scale: torch.dtype, kind: str, tmp_path: Path) -> None:
    level = np.random.default_rng(0).integers(-128, 128, (OUT, IN)).astype(np.int8)
    scales = torch.linspace(0.001, 0.1, OUT).to(scale)[:, None]
    config = compressed("int-quantized", num_bits=8, type="int", symmetric=True, strategy="channel")
    tensors = {"weight": level, "weight_scale": scales, "input_scale": torch.ones(1)}
    weights = write(tmp_path, tensors, config)
    stored = weights.matrix(f"{NAME}.weight", OUT, IN)
    assert stored.kind == kind and torch.equal(stored.widen(), scales.float() * torch.from_numpy(level))
    assert (weights.widened.get(f"{NAME}.weight") == "float16 does not hold its scales") == (kind == "F32")


def float8() -> torch.Tensor:
    return torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("config", "name", "shape", "rows", "columns"),
    [
        ({"quant_method": "fp8"}, "weight_scale", (), OUT, IN),
        ({"quant_method": "fp8"}, "weight_scale", (OUT, 1), 1, IN),
        ({"quant_method": "fbgemm_fp8"}, "weight_scale", (OUT, 1), 1, IN),
        ({"quant_method": "fp8", "weight_block_size": [48, 40]}, "weight_scale_inv", (2, 3), 48, 40),
        (compressed("float-quantized", num_bits=8, type="float", strategy="tensor"), "weight_scale", (1,), OUT, IN),
        (compressed("naive-quantized", num_bits=8, type="float", strategy="channel"), "weight_scale", (OUT, 1), 1, IN),
        (
            compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure="48x40"),
            "weight_scale", (2, 3), 48, 40,
        ),
    ],
)  # fmt: skip
def test_float8(
    config: dict[str, Any], name: str, shape: tuple[int, ...], rows: int, columns: int, tmp_path: Path
) -> None:
    value, scale = float8(), torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.1
    weights = write(tmp_path, {"weight": value, name: scale}, config)
    grid = scale.reshape(-(-OUT // rows), -(-IN // columns))
    each = grid[torch.arange(OUT) // rows][:, torch.arange(IN) // columns]
    assert torch.equal(weights.require(f"{NAME}.weight", OUT, IN), value.float() * each)
    assert torch.equal(weights.matrix(f"{NAME}.weight", OUT, IN).widen(), value.float() * each)


def test_float8_with_powers_of_two_fits_bfloat16(tmp_path: Path) -> None:
    weights = write(tmp_path, {"weight": float8(), "weight_scale": torch.tensor(0.125)}, {"quant_method": "fp8"})
    stored = weights.matrix(f"{NAME}.weight", OUT, IN)
    assert stored.kind == "BF16" and torch.equal(stored.widen().float(), float8().float() / 8)


def microscaling(random: np.random.Generator, *shape: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes, exponents and numbers of blocks of 32."""
    code, exponent = random.integers(0, 16, (*shape, 32)), random.integers(100, 140, shape)
    value = (
        np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[code & 7]
        * np.where(code & 8, -1, 1)
        * 2.0 ** (exponent[..., None] - 127)
    )
    packed = code[..., ::2] | code[..., 1::2] << 4
    return packed.astype(np.uint8), exponent.astype(np.uint8), value.astype(np.float32).reshape(*shape[:-1], -1)


def test_mxfp4_experts(tmp_path: Path) -> None:
    blocks, scales, values = microscaling(np.random.default_rng(0), 2, 64, 3)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    weights = write(tmp_path, {f"{name}_blocks": blocks, f"{name}_scales": scales}, config)
    wide = weights.require(name, 2, 96, 64)
    assert wide.dtype == torch.bfloat16 and torch.equal(wide.float(), torch.from_numpy(values).transpose(1, 2))
    stored = weights.matrix(name, 128, 96)
    assert stored.kind == "MXFP4" and torch.equal(stored.widen(), torch.from_numpy(values).flatten(0, 1))


def test_mxfp4_of_compressed_tensors(tmp_path: Path) -> None:
    blocks, scales, values = microscaling(np.random.default_rng(0), 64, 3)
    config = compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32)
    weights = write(tmp_path, {"weight_packed": blocks.reshape(64, -1), "weight_scale": scales}, config)
    assert torch.equal(weights.require(f"{NAME}.weight", 64, 96), torch.from_numpy(values))
    assert weights.matrix(f"{NAME}.weight", 64, 96).kind == "MXFP4"


def nvfp4(method: str, inputs: int) -> tuple[dict[str, Any], dict[str, Any], torch.Tensor]:
    """Tensors, configuration and numbers of a matrix of NVFP4 as a program writes it."""
    random, factor = np.random.default_rng(0), np.float32(1 / 320)
    code = random.integers(0, 16, (OUT, inputs))
    scale = torch.from_numpy(random.uniform(0.001, 448, (OUT, inputs // 16)).astype(np.float32))
    scale[:, :2] *= 2**-14  # denormal ones
    scale = scale.to(torch.float8_e4m3fn)
    value = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)[code & 7] * np.where(code & 8, -1, 1)
    wide = torch.from_numpy(value.astype(np.float32)) * (scale.float() * float(factor)).repeat_interleave(16, 1)
    packed = (code[:, ::2] | code[:, 1::2] << 4).astype(np.uint8)
    if method == "modelopt":
        tensors = {"weight": packed, "weight_scale_2": np.array(factor), "input_scale": np.ones(1, np.float32)}
        config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.self_attn*"]}
    else:
        tensors = {"weight_packed": packed, "weight_global_scale": 1 / np.full(1, factor)}
        config = compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)
    return {**tensors, "weight_scale": scale}, config, wide


@pytest.mark.parametrize("method", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("inputs", [128, 96])
def test_nvfp4(method: str, inputs: int, tmp_path: Path) -> None:
    tensors, config, wide = nvfp4(method, inputs)
    other = "model.layers.0.self_attn.o_proj.weight"
    weights = write(tmp_path, {**tensors, other: np.ones((4, 4), np.float32)}, config)
    torch.testing.assert_close(weights.require(f"{NAME}.weight", OUT, inputs), wide, rtol=2e-7, atol=0)
    stored = weights.matrix(f"{NAME}.weight", OUT, inputs)
    assert stored.kind == ("NVFP4" if inputs % 64 == 0 else "F32")
    assert torch.equal(stored.widen(), weights.require(f"{NAME}.weight", OUT, inputs))
    tensors["weight_scale"] = -tensors["weight_scale"].float()
    tensors["weight_scale"] = tensors["weight_scale"].to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="weight_scale holds a negative scale or not-a-number"):
        write(tmp_path, tensors, config).matrix(f"{NAME}.weight", OUT, inputs)


def test_groups_of_modules_have_their_own_scheme(tmp_path: Path) -> None:
    config = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32)
    eight = {"num_bits": 8, "type": "int", "strategy": "channel"}
    config["config_groups"]["group_1"] = {"targets": ["re:.*down_proj"], "weights": eight}
    tensors: Tensors = {}
    wanted = {}
    for name, bits, group in ((NAME, 4, 32), ("model.layers.0.mlp.down_proj", 8, IN)):
        level, scale, zero = draw(bits, group, symmetric=True)
        tensors |= {f"{name}.weight_packed": bit_stream(level, bits), f"{name}.weight_scale": scale}
        tensors |= {f"{name}.weight_shape": np.array([OUT, IN])}
        wanted[name] = torch.from_numpy(product(level, scale, zero, np.arange(IN) // group))
    weights = write(tmp_path, tensors, config)
    for name, values in wanted.items():
        assert torch.equal(weights.require(f"{name}.weight", OUT, IN), values)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "gptq", "bits": 5}, "bits should be one of 2, 3, 4, 8, found 5"),
        ({"quant_method": "gptq", "bits": "4"}, "bits should be an integer, found '4'"),
        ({"quant_method": "gptq"}, "has no 'quantization_config.bits'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size should be -1 or at least 1"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format should be one of gptq"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*up": {"bits": 8}}}, "dynamic should be empty"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version should be one of gemm, found 'gemv'"),
        ({"quant_method": "awq", "bits": 3}, "bits should be one of 4, found 3"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size should be two integers"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt should be one of e4m3"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantised with bitsandbytes, which is not supported"),
        ({"group_size": 64, "bits": 7}, "bits should be one of 2, 3, 4, 5, 6, 8, found 7"),
        ({"group_size": 48, "bits": 4}, "group_size should be one of 32, 64, 128, found 48"),
        ({"group_size": 16, "bits": 4, "mode": "nvfp4"}, "mode should be one of affine, found 'nvfp4'"),
        ({"quant_method": "compressed-tensors"}, "has no 'quantization_config.format'"),
        (compressed("marlin-24", num_bits=4), "format should be one of pack-quantized"),
        (compressed("nvfp4-pack-quantized", num_bits=8, type="float"), "num_bits should be one of 4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "quant_algo should be one of NVFP4, found 'FP8'"),
        (compressed("pack-quantized", num_bits=9), "num_bits should be one of 1, 2"),
        (compressed("pack-quantized", num_bits=4, type="float"), "type should be one of int"),
        (compressed("float-quantized", num_bits=8, type="float", strategy="block"), "block_structure should be two"),
        (compressed("pack-quantized", num_bits=4, strategy="rows"), "strategy should be one of"),
        (
            compressed("pack-quantized", num_bits=4) | {"transform_config": {"config_groups": {"a": 1}}},
            "transform_config",
        ),
        (compressed("pack-quantized", num_bits=4) | {"config_groups": {}}, "config_groups should be a group"),
    ],
)
def test_what_a_configuration_asks_for_is_read_or_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_quantization({"quantization_config": config}, "config.json")
    assert said in str(error.value) and "\n" not in str(error.value)


def test_quantisations_are_known_by_name() -> None:
    assert quantization_method({"quantization_config": {"quant_method": "fp8"}}) == "fp8"
    assert quantization_method({"text_config": {"quantization_config": {"quant_method": "awq"}}}) == "awq"
    assert quantization_method({"quantization": {"bits": 4, "group_size": 64}}) == "MLX"
    assert quantization_method({"quantization_config": None}) is None
    assert quantization_method({}) is None


def no_zeros(tensors: dict[str, Any]) -> None:
    del tensors["qzeros"]


def stranger(tensors: dict[str, Any]) -> None:
    tensors["weight.absmax"] = np.zeros(3, np.float32)


def short_scales(tensors: dict[str, Any]) -> None:
    tensors["scales"] = tensors["scales"][1:]


def wrong_type(tensors: dict[str, Any]) -> None:
    tensors["qweight"] = tensors["qweight"].astype(np.int64)


def wrong_index(tensors: dict[str, Any]) -> None:
    tensors["g_idx"] = np.full(IN, 3, np.int32)


def zero_of_fifteen(tensors: dict[str, Any]) -> None:
    tensors["qzeros"] = np.full_like(tensors["qzeros"], -1)


def not_converted(tensors: dict[str, Any]) -> None:
    tensors["lm_head.qweight"] = tensors["qweight"]


def nothing(tensors: dict[str, Any]) -> None:
    tensors.clear()
    tensors["model.norm.weight"] = np.ones(4, np.float32)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (no_zeros, f"has no {NAME}.qzeros"),
        (stranger, f"{NAME}.weight.absmax (F32) belongs to a quantised checkpoint"),
        (short_scales, "scales has shape (2, 64), its other tensors ask for (3, 64)"),
        (wrong_type, f"{NAME}.qweight is I64, and its quantization_config asks for I32"),
        (wrong_index, "index of groups that does not fit 96 inputs in groups of 32"),
        (zero_of_fifteen, "stores the zero point 15"),
        (not_converted, "quantization_config says that lm_head is not"),
        (nothing, "quantised with gptq, and none of its tensors is"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_tensors_that_do_not_fit_are_one_sentence(change: Callable[[Any], None], said: str, tmp_path: Path) -> None:
    tensors = gptq(*draw(4, 32, symmetric=True), 4)
    change(tensors)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "modules_to_not_convert": ["lm_head"]}
    with pytest.raises(ValueError) as error:
        write(tmp_path, tensors, config).matrix(f"{NAME}.weight", OUT, IN)
    assert said in str(error.value) and "\n" not in str(error.value)


def mlx(weight: np.ndarray, bits: int, group: int, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of `mlx.core.quantize` by its documentation (affine), and the matrix that they stand for.

    With the largest number a and the smallest b of a group: s = (a - b) / (2^bits - 1), levels round((w - b) / s).
    """
    groups = weight.reshape(len(weight), -1, group)
    low, high = groups.min(-1), groups.max(-1)
    scale, bias = (torch.from_numpy(each).to(dtype) for each in ((high - low) / (2**bits - 1), low))
    s, b = (each.float().numpy()[..., None] for each in (scale, bias))
    level = np.clip(np.round((groups - b) / s), 0, 2**bits - 1)
    words = torch.from_numpy(bit_stream(level.reshape(len(weight), -1).astype(np.int64), bits).view(np.uint32))
    wide = torch.from_numpy((level.astype(np.float32) * s + b).reshape(weight.shape))
    return {"weight": words, "scales": scale, "biases": bias}, wide


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("bits", "group", "kind"),
    [
        (4, 64, "Q4_1"),
        (4, 32, "Q4_1"),
        (8, 64, "F32"),
        (8, 128, "F32"),
        (2, 64, "Q4_1"),
        (3, 64, "Q4_1"),
        (6, 32, "F32"),
    ],
)
def test_mlx(bits: int, group: int, kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    matrix = np.random.default_rng(bits).normal(0, 0.05, (64, 256)).astype(np.float32)
    tensors, wide = mlx(matrix, bits, group, dtype)
    weights = write(tmp_path, tensors, {"bits": bits, "group_size": group})
    stored = weights.matrix(f"{NAME}.weight", 64, 256)
    assert stored.kind == kind
    assert torch.equal(stored.widen().float(), wide) and torch.equal(weights.require(f"{NAME}.weight", 64, 256), wide)
    assert (wide - torch.from_numpy(matrix)).abs().max() < 0.3 / (2**bits - 1) + 0.002  # of bfloat16


def test_scales_of_mlx_that_float16_does_not_hold_are_widened(tmp_path: Path) -> None:
    tensors, wide = mlx(np.random.default_rng(0).normal(0, 1e-7, (64, 64)).astype(np.float32), 4, 64, torch.bfloat16)
    stored = write(tmp_path, tensors, {"bits": 4, "group_size": 64}).matrix(f"{NAME}.weight", 64, 64)
    assert stored.kind == "F32" and torch.equal(stored.widen(), wide)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_directory_of_mlx_gives_the_logits_of_its_widened_copy(tied: bool, dtype: str, tmp_path: Path) -> None:
    plain, packed = (save_tiny_model(tmp_path / name, hidden=64, ffn=96) for name in ("plain", "packed"))
    wide = load_file(plain / "model.safetensors")
    wide = {name: tensor for name, tensor in wide.items() if not (tied and name == "lm_head.weight")}
    tensors, own = dict(wide), "model.layers.0.self_attn.o_proj"
    for name, weight in wide.items():
        module = name.removesuffix(".weight")
        if weight.ndim == 2 and "layers.1.mlp.down" not in name:
            parts, wide[name] = mlx(weight.float().numpy(), 8 if module == own else 4, 32, torch.bfloat16)
            tensors |= {f"{module}.{key}": value for key, value in parts.items()}
    save_file(wide, plain / "model.safetensors")
    save_file(tensors, packed / "model.safetensors", {"format": "mlx"})
    for folder in (plain, packed):
        raw = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": tied}
        if folder == packed:
            settings = {"group_size": 32, "bits": 4, own: {"group_size": 32, "bits": 8}}
            raw |= {"quantization": settings | {"model.layers.1.mlp.down_proj": False}}
            raw["quantization_config"] = raw["quantization"]
        (folder / "config.json").write_text(json.dumps(raw))
    tree = chain_tree(random_tokens(9, 257))
    logits = [load(str(folder), dtype).runner().forward([0], tree).logits for folder in (plain, packed)]
    assert torch.equal(*logits)


def test_models_whose_tensors_mlx_changes_are_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, hidden=64)
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors", {"format": "mlx"})
    load(str(folder))
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="a checkpoint of MLX, which changes tensors of mixtral"):
        load(str(folder))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_quantised_model_gives_the_logits_of_its_widened_copy(dtype: str, tmp_path: Path) -> None:
    plain, packed = (save_tiny_model(tmp_path / name, hidden=64, ffn=96) for name in ("plain", "packed"))
    wide = load_file(plain / "model.safetensors")
    tensors = dict(wide)
    for name, weight in wide.items():
        if "_proj" not in name:
            continue
        groups = weight.view(len(weight), -1, 32)
        scale = (groups.abs().amax(2, keepdim=True) / 7).half()
        level = (groups / scale.float()).round().clamp(-8, 7).int() + 8
        wide[name] = (scale.float() * (level - 8)).flatten(1)
        parts = gptq(level.flatten(1).numpy(), scale[..., 0].numpy(), np.full(scale.shape[:2], 8), 4)
        module = name.removesuffix("weight")
        del tensors[name]
        tensors |= {f"{module}{k}": torch.from_numpy(np.ascontiguousarray(v)) for k, v in parts.items()}
    save_file(wide, plain / "model.safetensors")
    save_file(tensors, packed / "model.safetensors")
    raw = json.loads((packed / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (packed / "config.json").write_text(json.dumps(raw))
    tree = chain_tree(random_tokens(9, 257))
    logits = [load(str(folder), dtype).runner().forward([0], tree).logits for folder in (plain, packed)]
    assert torch.equal(*logits)
    assert isinstance(load_draft(str(packed), dtype), Model), "as a draft model, too"


def test_one_word_per_row_is_unpacked_however_its_tensor_lies() -> None:
    words = torch.tensor([[0x76543210, 0x0FEDCBA9]], dtype=torch.int32).T  # a stride of two for one column
    assert unpack_bits(words, 4, 8).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7], [9, 10, 11, 12, 13, 14, 15, 0]]
