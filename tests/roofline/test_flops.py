"""Our operation counts against torch's FlopCounterMode on meta tensors, architecture by architecture."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from foretell.model.load.transformers import cache_argument
from foretell.roofline.analysis import AnalyzedModel, phase_graphs
from foretell.roofline.attention import SOFTMAX_OPS
from foretell.roofline.cost import scalar
from foretell.roofline.linear_cost import LinearCost
from foretell.roofline.model_configs import builtin_models, find_model, read_config
from foretell.roofline.op_graph import Op
from foretell.roofline.workload import Workload, phase_extents

transformers = pytest.importorskip("transformers")
LAYERS = 2
NAMES = ("llama-3-8b", "gemma-2-9b", "qwen3-8b", "opt-6.7b", "gpt-j-6b", "glm-4-9b")


def multiplied(op: Op) -> LinearCost:
    """OPs of the matrix products alone, which is what the counter sees."""
    if op.kind not in ("matmul", "attention"):
        return LinearCost()
    return op.work


def ours(name: str, workload: Workload) -> float:
    _, config = find_model(name)
    model = AnalyzedModel(name, replace(config, layers=LAYERS, window=0, window_layers=()))
    ((network, phase),) = phase_graphs(model, workload)
    return sum(
        block.count * scalar(multiplied(op).evaluate(phase_extents(network, block, phase)))
        for block in network.groups
        for op in block.ops
    )


def reference(name: str, layers: int | None = LAYERS) -> torch.nn.Module:
    """The random model of transformers without storage; `layers`: in place of its own."""
    keys = {k: v for k, v in builtin_models()[name].items() if k not in ("source", "sliding_window")}
    if keys["model_type"] == "phi3":
        keys["pad_token_id"] = 0
    if layers is not None:
        keys |= {"n_layer" if "n_layer" in keys else "num_hidden_layers": layers}
    config = transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
    with torch.device("meta"):
        module: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return module.eval()


def counted(module: torch.nn.Module, batch: int, past: int, tokens: int) -> int:
    ids = torch.zeros(batch, past + tokens, dtype=torch.long, device="meta")
    with torch.no_grad():
        cache = {cache_argument(module): transformers.DynamicCache(config=module.config)}
        if past:
            module(ids[:, :past], use_cache=True, **cache)
        with FlopCounterMode(display=False) as counter:
            module(ids[:, past:], use_cache=True, **cache)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("name", NAMES)
def test_operations_equal_the_flop_counter(name: str) -> None:
    module = reference(name)
    for batch, past, tokens in ((1, 0, 33), (2, 40, 1), (2, 40, 5)):
        stage = "verify" if past else "prefill"
        context = past or tokens
        workload = Workload(stage, batch, context, tokens, fusion="none", square=True)  # type: ignore[arg-type]
        expected = counted(module, batch, past, tokens)
        found = ours(name, workload)
        if not past:
            # The module makes logits for every prompt token, a prefill needs those of the last one.
            _, config = find_model(name)
            found += 2.0 * config.hidden * config.vocab * batch * (tokens - 1)
        assert found == expected, (batch, past, tokens)


def test_parameters_equal_the_reference() -> None:
    for name in NAMES:
        _, config = find_model(name)
        found = AnalyzedModel(name, replace(config, layers=LAYERS, window_layers=())).graph("none", False).parameters
        assert found == sum(p.numel() for p in dict.fromkeys(reference(name).parameters())), name


@pytest.mark.parametrize("name", ["phi-3.5-mini", "phi-4", "gpt-oss-20b", "gpt-oss-120b", "falcon-7b", "vicuna-33b"])
def test_parameters_of_models_that_are_analysed_and_not_measured(name: str) -> None:
    _, config = find_model(name)
    two = replace(config, layers=LAYERS, window_layers=())
    if two.experts is not None:
        two = replace(two, experts=replace(two.experts, layers=tuple(range(LAYERS))))
    assert AnalyzedModel(name, two).graph("none", False).parameters == sum(
        p.numel() for p in dict.fromkeys(reference(name).parameters())
    )


def test_fused_attention_counts_the_same_products() -> None:
    workload = Workload("verify", 3, 100, 7)
    plain, fused = (replace(workload, fusion=f) for f in ("none", "flash"))
    assert ours("llama-2-7b", fused) - ours("llama-2-7b", plain) == SOFTMAX_OPS * 32 * LAYERS * 3 * (7 * 100 + 28)


def test_latent_attention_of_a_prompt_equals_the_flop_counter() -> None:
    _, config = find_model("deepseek-v3")
    expected = counted(reference("deepseek-v3"), 2, 0, 33)
    found = ours("deepseek-v3", Workload("prefill", 2, 33, fusion="none", square=True))
    assert found + 2.0 * config.hidden * config.vocab * 2 * 32 == expected


FIRST_OF_TYPE = {str(model["model_type"]): name for name, model in reversed(list(builtin_models().items()))}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in FIRST_OF_TYPE.values() else pytest.mark.exhaustive) for n in builtin_models()],
)
def test_every_builtin_model_has_the_parameters_of_the_reference(name: str) -> None:
    # deepseek-v3's router bias is a buffer of the reference.
    buffers = {"deepseek-v3": 58 * 256, "glm-4.5-air": 45 * 128}
    _, config = find_model(name)
    expected = sum(p.numel() for p in dict.fromkeys(reference(name, None).parameters())) + buffers.get(name, 0)
    assert AnalyzedModel(name, config).graph("none", False).parameters == expected


def test_a_checkpoint_of_glm_with_code_of_its_own_is_the_same_model() -> None:
    """The keys of the config.json of THUDM/glm-4-9b-chat."""
    own = {
        "model_type": "chatglm", "add_qkv_bias": True, "ffn_hidden_size": 13696, "hidden_size": 4096,
        "kv_channels": 128, "multi_query_attention": True, "multi_query_group_num": 2, "num_attention_heads": 32,
        "num_layers": 40, "rope_ratio": 500, "padded_vocab_size": 151552, "seq_length": 131072,
    }  # fmt: skip
    _, config = find_model("THUDM/glm-4-9b-chat")
    read = read_config(own, "config.json")
    assert config.rope is not None and read.rope is not None and read.rope.theta == 500 * config.rope.theta
    assert replace(read, rope=config.rope) == config
    assert AnalyzedModel("glm", read).graph("none", False).parameters == 9_399_951_360
    with pytest.raises(ValueError, match=r"config\.json: the configuration has no 'ffn_hidden_size', 'seq_length'"):
        read_config({k: v for k, v in own.items() if k not in ("ffn_hidden_size", "seq_length")}, "config.json")
