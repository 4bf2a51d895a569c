"""Multi-token prediction layers against those of transformers, in torch and on the kernels."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpLayer
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from foretell.catalogue import BuildContext, build
from foretell.core.context import StepResult
from foretell.core.sampling import SamplingParams
from foretell.core.tree import tree_from_lists
from foretell.draft import MTPDrafter
from foretell.engine.engine import Engine
from foretell.engine.request import Request
from foretell.model.block.decoder import Decoder
from foretell.model.config.families import family_of
from foretell.model.config.readers.hf import from_hf
from foretell.model.kernels import available
from foretell.model.load.build import build_decoder
from foretell.model.load.mtp import load_mtp, read_layers
from foretell.model.load.native import load_native
from foretell.model.load.weights import SafetensorsWeights
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.mtp import MTPLayer
from helpers import TinyCheckpoint, chain_tree, context_of, random_tokens

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.15,
}  # fmt: skip
CONFIGS = {
    "qwen3_5": transformers.Qwen3_5TextConfig(
        **SIZES, head_dim=16, layer_types=["linear_attention", "linear_attention", "full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    ),
    "deepseek_v3": transformers.DeepseekV3Config(
        **(SIZES | {"num_key_value_heads": 4}), q_lora_rank=12, kv_lora_rank=28, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=6, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=24,
        n_group=4, topk_group=2, first_k_dense_replace=1,
    ),
    "mimo": transformers.Qwen2Config(**SIZES),
}  # fmt: skip
PARTS = {"qwen3_5": (qwen.Qwen3_5DecoderLayer, qwen.Qwen3_5RMSNorm),
         "deepseek_v3": (deepseek.DeepseekV3DecoderLayer, deepseek.DeepseekV3RMSNorm),
         "mimo": (qwen2.Qwen2DecoderLayer, qwen2.Qwen2RMSNorm)}  # fmt: skip
NAMES = {
    "qwen3_5": {"mtp_block.": "mtp.layers.0.", "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden",
                "eh_proj": "mtp.fc", "post_norm": "mtp.norm"},
    "deepseek_v3": {"mtp_block.": "model.layers.3.", "enorm": "model.layers.3.enorm", "hnorm": "model.layers.3.hnorm",
                    "eh_proj": "model.layers.3.eh_proj", "post_norm": "model.layers.3.shared_head.norm"},
    "mimo": {"mtp_block.": "model.mtp_layers.0.", "enorm": "model.mtp_layers.0.token_layernorm",
             "hnorm": "model.mtp_layers.0.hidden_layernorm", "eh_proj": "model.mtp_layers.0.input_proj",
             "post_norm": "model.mtp_layers.0.final_layernorm"},
}  # fmt: skip
TEXT, PATH = random_tokens(20, 61, seed=3), random_tokens(3, 61, seed=4)


@cache
def oracle_of(kind: str) -> tuple[Any, MtpLayer, Path]:
    """A random model of transformers, its layer, and a folder with the checkpoint of both."""
    torch.manual_seed(0)
    config, folder = CONFIGS[kind], Path(mkdtemp(prefix="foretell-mtp-"))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    layer = MtpLayer(model.config, *PARTS[kind], 2).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in layer.state_dict().items():
        stem = next(stem for stem in NAMES[kind] if name.startswith(stem))
        # MiMo's matrix reads the hidden state before the embedding, as in its authors' code in vLLM.
        order = tensor.roll(config.hidden_size, 1) if kind == "mimo" and stem == "eh_proj" else tensor
        tensors[name.replace(stem, NAMES[kind][stem], 1)] = order.contiguous()
    save_file(tensors, folder / "model.safetensors")
    if kind == "mimo":
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw | {"model_type": "mimo", "num_nextn_predict_layers": 1}))
    return model, layer, folder


@torch.no_grad()
def states_of(kind: str, text: Sequence[int]) -> torch.Tensor:
    """The target's states after its final norm; of MiMo those before it, as its authors' code in vLLM has them."""
    model, inputs = oracle_of(kind)[0], []
    hook = model.model.norm.register_forward_pre_hook(lambda norm, given: inputs.append(given[0]))
    normed: torch.Tensor = model.model(torch.tensor([text])).last_hidden_state
    hook.remove()
    return inputs[0] if kind == "mimo" else normed


@torch.no_grad()
def reference(kind: str, text: Sequence[int]) -> torch.Tensor:
    """The layer's output at every position but the last, over the target's own states."""
    return run_layer(kind, states_of(kind, text)[:, :-1], text[1:])


@torch.no_grad()
def run_layer(kind: str, states: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    model, layer, _ = oracle_of(kind)
    length = states.shape[1]
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    embedded, position = model.model.embed_tokens(torch.tensor([tokens])), torch.arange(length)[None]
    angles = model.model.rotary_emb(embedded, position)
    out: torch.Tensor = layer(embedded, states, angles, mask, position, None)
    return out


def target_of(kind: str) -> tuple[Decoder, MTPLayer]:
    folder = oracle_of(kind)[2]
    config, weights = from_hf(json.loads((folder / "config.json").read_text())), SafetensorsWeights(folder)
    decoder = build_decoder(config, weights, torch.float32, torch.device("cpu"))
    return decoder, load_mtp(config, weights, decoder)


def scores_after(runner: DecoderRunner, layer: MTPLayer, path: Sequence[int]) -> torch.Tensor:
    """Scores after the last token of a path of drafts, asked for one by one."""
    drafter, tree = MTPDrafter(layer), chain_tree(TEXT[:-1])
    output = runner.forward([0], tree, hidden_layers=layer.hidden_layers)
    drafter.observe(StepResult(context_of(TEXT), tree, output, (tuple(range(tree.nodes)),), ((TEXT[-1],),), (0,)))
    tokens = [TEXT[-1], *path]
    for end in range(1, len(tokens) + 1):
        chain = tree_from_lists([tokens[:end]], [list(range(-1, end - 1))])
        logits, at = drafter.expand(chain, np.array([[end - 1]]), context_of(TEXT))
    scores: torch.Tensor = logits[at[0, -1]]
    return scores


@pytest.mark.parametrize("kind", CONFIGS)
def test_scores_are_those_of_transformers(kind: str) -> None:
    decoder, layer = target_of(kind)
    wanted = oracle_of(kind)[0].lm_head(reference(kind, TEXT))[0, -1]
    torch.testing.assert_close(scores_after(DecoderRunner(decoder), layer, []), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", CONFIGS)
def test_drafted_positions_read_the_output_of_the_layer(kind: str) -> None:
    decoder, layer = target_of(kind)
    model, tokens = oracle_of(kind)[0], list(TEXT)
    states = states_of(kind, TEXT)[:, :-1]
    for token in PATH:
        out = run_layer(kind, states, tokens[1:])
        states, tokens = torch.cat((states, out[:, -1:]), 1), [*tokens, token]
    wanted = model.lm_head(run_layer(kind, states, tokens[1:]))[0, -1]
    torch.testing.assert_close(scores_after(DecoderRunner(decoder), layer, PATH), wanted, rtol=0, atol=1e-4)


@pytest.mark.skipif(not available(), reason="the kernels are not available here")
@pytest.mark.parametrize("kind", CONFIGS)
def test_on_the_kernels_it_drafts_the_same_and_changes_no_bit(kind: str) -> None:
    folder = oracle_of(kind)[2]
    config, weights = from_hf(json.loads((folder / "config.json").read_text())), SafetensorsWeights(folder)
    network = load_native(config, weights, "float32")
    decoder, layer = target_of(kind)
    found = scores_after(DecoderRunner(network), load_mtp(config, weights, network), PATH)
    torch.testing.assert_close(found, scores_after(DecoderRunner(decoder), layer, PATH), rtol=0, atol=1e-4)
    checkpoint = TinyCheckpoint(decoder, weights)
    checkpoint.config = config
    context = BuildContext(61, network, checkpoint=checkpoint)
    requests = [Request(TEXT, SamplingParams(temperature=t, seed=1), max_new_tokens=30) for t in (0, 0.8)]
    drafted, plain = (
        [c.tokens for c in Engine(DecoderRunner(network), build(name, context)).complete(requests)]
        for name in ("mtp", "autoregressive")
    )
    assert drafted == plain


def test_what_has_no_such_layer_is_refused() -> None:
    decoder = target_of("qwen3_5")[0]
    folder = Path(mkdtemp(prefix="foretell-mtp-"))
    oracle_of("qwen3_5")[0].save_pretrained(folder)
    with pytest.raises(ValueError, match=r"published without its multi-token prediction layer .*no mtp\.fc\.weight"):
        load_mtp(decoder.config, SafetensorsWeights(folder), decoder)
    with pytest.raises(ValueError, match="and llama has none; architectures that have one: mimo, qwen3_next"):
        build("mtp", BuildContext(61, decoder, checkpoint=_Llama(decoder)))


class _Llama(TinyCheckpoint):
    def __init__(self, network: Decoder) -> None:
        super().__init__(network)
        self.config = from_hf({"model_type": "llama", **SIZES})


def test_the_layer_of_mimo_is_not_trained_further() -> None:
    decoder, weights = target_of("mimo")[0], SafetensorsWeights(oracle_of("mimo")[2])
    names = family_of("mimo").prediction("mimo", 3)
    with pytest.raises(ValueError, match=r"prediction of mimo reads states that .* draft with it as it is"):
        read_layers(decoder.config, weights, names)
