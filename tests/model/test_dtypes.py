"""What `dtype` means for a file: auto takes what suits it, int4 rounds floats, what does not go together is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from foretell.bench.random_file import random_model_file
from foretell.lab.quantize.gguf_grids import GGUF_GRIDS
from foretell.lab.quantize.rtn import round_to_nearest
from foretell.load import load, resolve_dtype
from foretell.model import kernels as native
from foretell.model.config.model import MLAConfig, ModelConfig, MoEConfig
from foretell.model.config.states import ShortConvConfig
from foretell.model.kernels.embedding import NativeEmbedding
from foretell.model.load import memory
from foretell.model.load.native import packable_block, packed_bytes
from foretell.model.load.rounding import RoundedWeights, round_to_blocks
from foretell.model.matrices.kinds import Kind
from foretell.model.matrices.stored import StoredMatrix
from foretell.testing import TINY, RandomWeights

pytestmark = pytest.mark.skipif(not native.available(), reason=native.unavailable_reason())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random models in one shape."""
    config = replace(TINY, vocab=64, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=96, context=128)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foretell.bench.random_file.find_model", lambda shape: (shape, config))
        folder = tmp_path_factory.mktemp("models")
        return {kind: random_model_file("tiny", kind, folder) for kind in ("bf16", "Q4_K")}


def test_auto_takes_what_suits_the_file(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    quantized, half = (str(files[kind]) for kind in ("Q4_K", "bf16"))
    assert resolve_dtype(quantized, "auto", "cpu") == "int8-activations"
    assert resolve_dtype(half, "auto", "cpu") == "bfloat16"
    model = load(quantized)
    answer = model.generate("Hello", max_new_tokens=3, raw=True)[0]
    assert model.precision == answer.backend.precision == "int8-activations"
    assert len(answer.tokens) == 3 and all(p <= 0 for p in answer.logprobs)
    monkeypatch.setenv("FORETELL_NATIVE", "0")
    assert resolve_dtype(quantized, "auto", "cpu") == "bfloat16"
    with pytest.raises(ValueError, match=r"kernels only.*--dtype bfloat16"):
        load(quantized, "int8-activations")


def test_int4_rounds_a_checkpoint_of_floats(files: dict[str, Path]) -> None:
    rounded, exact = (load(str(files["bf16"]), dtype) for dtype in ("int4", "bfloat16"))
    assert (rounded.precision, rounded.network.backend.precision) == ("int4", "int8-activations")
    assert rounded.network.packed_bytes < 0.6 * exact.network.packed_bytes  # type: ignore[attr-defined]
    token = torch.arange(5)
    assert torch.equal(rounded.network.embed(token), exact.network.embed(token))
    with pytest.raises(ValueError, match="quantised already"):
        load(str(files["Q4_K"]), "int4")
    with pytest.raises(ValueError, match="checkpoint has floats; use --dtype int4"):
        load(str(files["bf16"]), "int8-activations")
    with pytest.raises(ValueError, match="did you mean 'int8'"):
        load(str(files["bf16"]), "int9")


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_that_of_the_quantisation_methods(kind: Kind, dtype: torch.dtype) -> None:
    weight = torch.randn(300, 96, generator=torch.Generator().manual_seed(0))
    weight[0], weight[1], weight[2] = 0, weight[1] * 1e-7, weight[2] * 1e4
    grid = GGUF_GRIDS[kind]
    expected = grid.stored(round_to_nearest(weight.to(dtype).float(), grid))
    assert torch.equal(round_to_blocks(StoredMatrix.of(weight.to(dtype)), kind).data, expected.data)
    with pytest.raises(ValueError, match="whole blocks of 32"):
        round_to_blocks(StoredMatrix.of(weight[:, :40]), kind)


WIDE = replace(TINY, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96)
LAYERS = {
    "state": replace(WIDE, architecture="lfm2", state=ShortConvConfig((0,), channels=64)),
    "gated attention": replace(WIDE, attention_gate=True),
    "latent": replace(WIDE, architecture="deepseek_v2", kv_heads=4, latent=MLAConfig(32, 32, 8, 8, 16)),
    "stacked experts": replace(
        WIDE, architecture="granitemoeshared", experts=MoEConfig(3, 2, ffn=32, shared_ffn=64, layers=(0,))
    ),
}


@pytest.mark.parametrize("config", LAYERS.values(), ids=LAYERS)
def test_int4_rounds_the_matrices_of_every_kind_of_layer(config: ModelConfig) -> None:
    block = packable_block(config, 0, RoundedWeights(RandomWeights()), "int8-activations")
    experts = [] if block.experts is None else [*block.experts.experts, block.experts.shared]
    networks = [part for m in (block.mlp, *experts) if m is not None for part in (m.gate_up, m.down)]
    query = [] if block.latent is None else [block.latent.query]
    linears = (block.qkv, block.output, block.attention_gate, *networks, *query)
    found = [matrix for linear in linears if linear is not None for matrix in linear.parts]
    assert len(found) >= 4 and all(isinstance(m, StoredMatrix) and m.kind == "Q4_1" for m in found)


def test_rows_that_are_no_whole_blocks_stay(caplog: pytest.LogCaptureFixture) -> None:
    rounded = RoundedWeights(RandomWeights())
    for _ in range(2):
        assert not rounded.round_matrix("model.layers.0.down", torch.zeros(8, 40)).quantized
    assert len(caplog.records) == 1 and "model.layers.0.down stays in bfloat16" in caplog.text


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_embedding_rows_are_widened_as_the_matrix_is(kind: str) -> None:
    grid = GGUF_GRIDS[kind]
    weight = torch.randn(50, 256, generator=torch.Generator().manual_seed(1))
    table = grid.stored(round_to_nearest(weight, grid))
    lookup = NativeEmbedding(table, torch.bfloat16, 2.0)
    token = torch.tensor([49, 0, 7, *range(40)])
    expected = table.widen()[token].bfloat16().float() * 2
    assert torch.equal(lookup(token), expected)
    written = np.empty(expected.shape, np.float32)
    lookup.write(token.numpy(), written)
    assert np.array_equal(written, expected)
    with pytest.raises(IndexError, match=r"0 \.\. 49"):
        lookup(torch.tensor([50]))


def test_a_model_larger_than_memory_is_refused_before_it_is_read(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 600 << 20)
    memory.check_memory("m", "int8", 10 << 20)
    with pytest.raises(ValueError, match=r"m: its weights take 16.1 GB in bfloat16, and 0.6 GB .*-memory-limit 88"):
        memory.check_memory("m", "bfloat16", 16_100_000_000)
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    with pytest.raises(ValueError, match="memory are available"):
        load(str(files["bf16"]))


def test_the_estimate_is_the_packed_size(files: dict[str, Path]) -> None:
    model = load(str(files["Q4_K"]))
    estimate = packed_bytes(model.config, model.checkpoint._weights, "int8-activations")
    assert abs(model.network.packed_bytes - estimate) < 2000  # type: ignore[attr-defined]
