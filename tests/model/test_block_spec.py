"""The record of a block: its tensors are those of transformers, and modules give back the record they were made of."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from test_compressed_blocks import CONFIG, RANKS
from test_decoder import oracle_of
from test_state_models import STATES, single_mixers

from foretell.model.block import weights
from foretell.model.block.modules import from_weights, to_weights
from foretell.model.block.spec import BlockWeights, GatedWeights, LinearWeights, VectorSpec, specs_of
from foretell.model.block.weights import map_linears, map_matrices, places_of, read_block
from foretell.model.config.compressed import LowRank
from foretell.model.config.model import ModelConfig
from foretell.model.config.readers.hf import from_hf
from foretell.model.matrices.stored import StoredMatrix
from foretell.testing import TINY, RandomWeights, tiny_deepseek, tiny_gpt_oss, tiny_moe

STATE_KINDS = {"delta_net": "qwen3_5_text", "short_conv": "lfm2", "mamba2": "granitemoehybrid"}
CONFIGS: dict[str, ModelConfig] = {
    "llama": TINY,
    "biased": CONFIG,
    "norms": replace(TINY, qk_norm=True, post_norms=True, norm_offset=1.0, value_norm=True, layer_scales=True),
    "norms after": replace(TINY, qk_norm=True, qk_norm_over="all", pre_norms=False, post_norms=True),
    "parallel": replace(TINY, qk_norm=True, qk_norm_over="rotated", parallel_blocks=True, centered=True),
    "gpt_oss": tiny_gpt_oss(),
    "mixtral": tiny_moe(),
    "deepseek": tiny_deepseek(),
    "low rank": replace(CONFIG, low_rank=LowRank(**RANKS)),
    "sliced": replace(CONFIG, shortcuts=True),
    "gated": replace(TINY, attention_gate=True, qkv_bias=True),
    "single mixers": single_mixers(replace(TINY, state=STATES["nemotron"], architecture="nemotron_h")),
    **{
        name: replace(TINY, state=STATES[name], architecture=kind, attention_gate=name == "delta_net")
        for name, kind in STATE_KINDS.items()
    },
}


def tensors_of(part: Any, path: str = "") -> dict[str, torch.Tensor]:
    """All tensors of a record by their paths; the matrices of a linear layer as one."""
    if isinstance(part, LinearWeights):
        matrices = [m.widen() if isinstance(m, StoredMatrix) else m for m in part.parts]
        factor = part.factor.widen() if isinstance(part.factor, StoredMatrix) else part.factor
        found = {"weight": torch.cat(matrices), "bias": part.bias, "factor": factor}
        return {f"{path}.{name}": tensor for name, tensor in found.items() if tensor is not None}
    if is_dataclass(part):
        return {
            key: value
            for each in fields(part)
            for key, value in tensors_of(getattr(part, each.name), f"{path}.{each.name}").items()
        }
    if part is None or isinstance(part, torch.Tensor):
        return {} if part is None else {path: part}
    return {key: value for i, each in enumerate(part) for key, value in tensors_of(each, f"{path}.{i}").items()}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_modules_give_back_the_record_they_were_made_of(config: ModelConfig) -> None:
    for i in range(config.layers):
        made = from_weights(config, i, read_block(config, i, RandomWeights()), torch.float32, torch.device("cpu"))
        found, wanted = (tensors_of(each) for each in (to_weights(made), read_block(config, i, RandomWeights())))
        assert found.keys() == wanted.keys() and len(wanted) >= 3
        for path, tensor in wanted.items():
            assert torch.equal(found[path].float(), tensor.float()), path


@pytest.mark.parametrize(
    "name",
    ["llama", "llama biased", "mistral", "qwen2", "qwen3", "qwen3 biased", "gemma2", "gemma3", "smollm3", "granite"],
)
def test_the_tensors_of_a_dense_block_are_those_of_transformers(name: str) -> None:
    oracle = oracle_of(name)
    config, state = from_hf(oracle.config.to_dict()), oracle.state_dict()
    for i in range(config.layers):
        prefix = f"model.layers.{i}."
        wanted = {key: tuple(tensor.shape) for key, tensor in state.items() if key.startswith(prefix)}
        assert {place.name: place.shape for place in places_of(config, i)} == wanted
        block = map_linears(read_block(config, i, _Stored(state)), lambda path, linear: _widened(linear))
        written = weights.tensors_of(replace(config, norm_offset=0.0), i, block)
        assert written.keys() == wanted.keys()
        for place in places_of(config, i):
            spec = specs_of(BlockWeights).get(place.path)
            offset = config.norm_offset * (isinstance(spec, VectorSpec) and spec.offset)
            assert torch.equal(written[place.name], state[place.name] + offset), place.name


class _Stored(RandomWeights):
    """Given tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def require(self, name: str, *shape: int) -> torch.Tensor:
        assert tuple(self._tensors[name].shape) == shape
        return self._tensors[name]


def _widened(linear: LinearWeights) -> LinearWeights:
    return replace(linear, parts=tuple(m.widen() if isinstance(m, StoredMatrix) else m for m in linear.parts))


@pytest.mark.parametrize("name", ["mixtral", "deepseek", "delta_net", "sliced"])
def test_matrices_that_decide_much_are_not_rounded(name: str) -> None:
    config, rounded = CONFIGS[name], set[str]()
    for i in range(config.layers):
        block = map_matrices(read_block(config, i, RandomWeights()), lambda path, m: rounded.add(path) or m)  # type: ignore[func-returns-value]
        for _ in () if block.experts is None else block.experts.experts:
            pass
    kept = {"experts.router", "experts.shared_gate", "mixer.gates", "latent.key", "latent.value"}
    assert {"qkv", "output"} <= rounded and not rounded & (kept | {"attention_shortcut", "mlp_shortcut"})
    assert ("experts.experts.gate_up" in rounded) == (config.experts is not None)


def test_what_every_network_has_must_be_given() -> None:
    with pytest.raises(TypeError, match="gate_up"):
        GatedWeights()


@pytest.mark.parametrize("name", ["mixtral", "deepseek", "mamba2"])
def test_blocks_that_are_stored_in_another_way_are_not_listed(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be written yet"):
        list(places_of(CONFIGS[name], 0)) + list(places_of(CONFIGS[name], 1))
