"""Gemma 4's assistant against that of transformers, in torch and on the kernels."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from foretell.catalogue import BuildContext, build
from foretell.core.context import StepResult
from foretell.core.sampling import SamplingParams
from foretell.core.tree import tree_from_lists
from foretell.draft import AssistantDrafter
from foretell.draft.cached_states import layout_of
from foretell.engine.engine import Engine
from foretell.engine.request import Request
from foretell.model.config.readers.hf import from_hf
from foretell.model.kernels import available
from foretell.model.load.assistant import is_assistant, load_assistant
from foretell.model.load.build import build_decoder
from foretell.model.load.native import load_native
from foretell.model.load.weights import SafetensorsWeights
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.speculator.formats.gguf import is_drafter
from foretell.testing import RandomWeights
from helpers import chain_tree, context_of, random_tokens

S, F = "sliding_attention", "full_attention"
WINDOW, VOCAB = 8, 64
TARGET: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 5, "head_dim": 16,
    "global_head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": [S, F, S, F, F],
    "sliding_window": WINDOW, "max_position_embeddings": 256, "pad_token_id": 0, "initializer_range": 0.15,
    "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 6, "num_kv_shared_layers": 1,
}  # fmt: skip
WHOLE = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
         "num_global_key_value_heads": 1}  # fmt: skip
TEXTS = random_tokens(26, VOCAB, seed=3), random_tokens(WINDOW - 2, VOCAB, seed=5)
PATH = random_tokens(3, VOCAB, seed=4)
KINDS = ("E2B", "31B")
backends = pytest.mark.parametrize(
    "native",
    [False, pytest.param(True, marks=pytest.mark.skipif(not available(), reason="the kernels are not available here"))],
)


@cache
def oracle_of(kind: str) -> tuple[Any, Any, Path, Path]:
    """A random model of transformers, its assistant, and the folders of both: small like E2B (shared keys, inputs of
    each layer, a head in groups), or like the large models.
    """
    torch.manual_seed(0)
    small = kind == "E2B"
    config = transformers.Gemma4TextConfig(**(TARGET if small else TARGET | WHOLE))
    own = {**TARGET, **WHOLE, "hidden_size": 32, "num_hidden_layers": 3, "layer_types": [S, S, F],
           "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 3, "use_double_wide_mlp": False}  # fmt: skip
    if small:
        own |= {"attention_k_eq_v": False, "num_global_key_value_heads": None}
    assistant = transformers.Gemma4AssistantConfig(
        text_config=transformers.Gemma4TextConfig(**own), backbone_hidden_size=64, use_ordered_embeddings=small,
        num_centroids=16, centroid_intermediate_top_k=5,
    )  # fmt: skip
    models = (
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval(),
        transformers.Gemma4AssistantForCausalLM._from_config(assistant, attn_implementation="eager").eval(),
    )
    folders = Path(mkdtemp(prefix="foretell-gemma-")), Path(mkdtemp(prefix="foretell-assistant-"))
    for model, folder in zip(models, folders, strict=True):
        with torch.no_grad():
            scalars = ((name, each) for name, each in model.named_buffers() if "layer_scalar" in name)
            for name, parameter in [*model.named_parameters(), *scalars]:
                if parameter.dim() == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
                if name.endswith("q_norm.weight"):
                    parameter.mul_(0.3)
        if model is models[1] and small:
            models[1].masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
        model.save_pretrained(folder)
    return *models, *folders


@torch.no_grad()
def reference(kind: str, text: Sequence[int], path: Sequence[int]) -> torch.Tensor:
    """Logits after the last token of a path of drafts; the layers with windows see so many positions, that of the last
    token of the text included, which the target has not read.
    """
    target, assistant, *_ = oracle_of(kind)
    read = target.model(torch.tensor([text[:-1]]), return_shared_kv_states=True)
    shared = {kind: tuple(part[:, :, -(WINDOW - 1) if kind == S else 0 :] for part in parts)
              for kind, parts in read.shared_kv_states.items()}  # fmt: skip
    state, position = read.last_hidden_state[:, -1:], torch.tensor([[len(text) - 1]])
    for token in (text[-1], *path):
        inputs = torch.cat((target.get_input_embeddings()(torch.tensor([[token]])), state), -1)
        out = assistant(inputs_embeds=inputs, position_ids=position, shared_kv_states=shared)
        state = out.last_hidden_state
    logits: torch.Tensor = out.logits[0, -1]
    return logits


def target_of(kind: str, native: bool) -> Network:
    folder = oracle_of(kind)[2]
    config, weights = from_hf(json.loads((folder / "config.json").read_text())), SafetensorsWeights(folder)
    if native:
        return load_native(config, weights, "float32")
    return build_decoder(config, weights, torch.float32, torch.device("cpu"))


@backends
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind: str, native: bool) -> None:
    """For two requests at once, of which one is longer than the window, and along a path of drafts."""
    network = target_of(kind, native)
    runner, drafter = DecoderRunner(network), AssistantDrafter(load_assistant(oracle_of(kind)[3], network))
    drafter.attach(runner)
    context = context_of(*TEXTS)
    for row, text in enumerate(TEXTS):
        tree, one = chain_tree(text[:-1]), context.select([row])
        output = runner.forward([row], tree, hidden_layers=drafter.hidden_layers)
        runner.commit(row, range(tree.nodes))
        drafter.observe(StepResult(one, tree, output, (tuple(range(tree.nodes)),), ((text[-1],),), (0,)))
    for end in range(1, len(PATH) + 2):
        chains = [[text[-1], *PATH][:end] for text in TEXTS]
        tree = tree_from_lists(chains, [list(range(-1, end - 1))] * len(TEXTS))
        logits, at = drafter.expand(tree, np.full((len(TEXTS), 1), end - 1), context)
        for row, text in enumerate(TEXTS):
            ours, wanted = logits[at[row, -1]], reference(kind, text, PATH[: end - 1])
            scored = ours.isfinite()
            assert int(scored.sum()) == (20 if kind == "E2B" else VOCAB)
            torch.testing.assert_close(ours[scored], wanted[scored], rtol=0, atol=1e-4)
            assert scored.all() or wanted[~scored].max() < wanted[scored].min()
    runner.truncate(0, 3)  # as where a request is paused, and its tokens are read again later
    assert drafter.max_depths(context).tolist() == [0, 99]


OF_GGUF = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.q_norm": "attn_q_norm",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "post_feedforward_layernorm": "post_ffw_norm",
    "pre_projection": "nextn.pre_projection", "post_projection": "nextn.post_projection",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm",
    "masked_embedding.centroids": "masked_embd_centroids",
}  # fmt: skip
"""Names of tensors by llama.cpp's loader and converter (src/models/gemma4-assistant.cpp, conversion/gemma.py)."""


def write_gguf(folder: Path, file: Path, full_heads: int) -> Path:
    """An assistant as llama.cpp's converter writes it."""
    config = json.loads((folder / "config.json").read_text())
    text, arch = config["text_config"], "gemma4-assistant"
    local, layers = [kind == S for kind in text["layer_types"]], text["num_hidden_layers"]
    full, dim = TARGET["global_head_dim"], text["head_dim"]
    heads = [text["num_key_value_heads"] if own else full_heads for own in local]
    writer = gguf.GGUFWriter(file, arch)
    for key, number in {
        "vocab_size": VOCAB, "context_length": text["max_position_embeddings"], "embedding_length": text["hidden_size"],
        "embedding_length_out": config["backbone_hidden_size"], "block_count": layers, "nextn_predict_layers": layers,
        "feed_forward_length": text["intermediate_size"], "attention.head_count": text["num_attention_heads"],
        "attention.shared_kv_layers": layers, "attention.sliding_window": text["sliding_window"],
        "attention.key_length": full, "attention.value_length": full, "attention.key_length_swa": dim,
        "attention.value_length_swa": dim, "rope.dimension_count": full, "rope.dimension_count_swa": dim,
        "embedding_length_per_layer_input": 0,
    }.items():  # fmt: skip
        writer.add_uint32(f"{arch}.{key}", number)
    writer.add_array(f"{arch}.attention.head_count_kv", heads)
    writer.add_array(f"{arch}.attention.sliding_window_pattern", local)
    floats = {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4}
    for key, value in floats.items():
        writer.add_float32(f"{arch}.{key}", value)
    rotated = full // 2 // 4
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * rotated + [1e30] * (full // 2 - rotated), np.float32))
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name == "masked_embedding.token_ordering":
            writer.add_tensor("masked_embd_ordering", tensor.int().numpy())
            continue
        layer, _, part = name.removeprefix("model.layers.").partition(".")
        at, part = (f"blk.{layer}.", part) if name.startswith("model.layers.") else ("", name)
        known = "layer_output_scale" if part == "layer_scalar" else OF_GGUF[part.removesuffix(".weight")]
        writer.add_tensor(f"{at}{known}.weight", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@backends
@pytest.mark.parametrize("kind", KINDS)
def test_a_gguf_file_scores_all_tokens_as_the_directory(kind: str, native: bool, tmp_path: Path) -> None:
    """Of the architecture that llama.cpp reads, which leaves groups of tokens and scores all."""
    folder, network = oracle_of(kind)[3], target_of(kind, native)
    file = write_gguf(folder, tmp_path / "mtp-assistant.gguf", 2 if kind == "E2B" else 1)
    assert is_assistant(file) and is_drafter(file)
    whole = Path(shutil.copytree(folder, tmp_path / "whole"))
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps(config | {"use_ordered_embeddings": False}))
    drawn = torch.Generator().manual_seed(1)
    states, token = torch.randn(3, 64, generator=drawn), torch.tensor([4, 9, 1])
    runner = DecoderRunner(network)
    tree = chain_tree(TEXTS[0])
    runner.forward([0], tree)
    runner.commit(0, range(tree.nodes))
    n = np.full(3, len(TEXTS[0]))
    layout = layout_of(np.zeros(3, int), n - 1, n, n)
    layout = replace(layout, window_end=layout.position + 1)
    out = []
    for place in (file, whole):
        assistant = load_assistant(place, network)
        out.append(assistant.draft_step(states, token, layout, assistant.attended(runner.cache)))
    for ours, wanted in zip(*out, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-4)
    assert out[0][1].isfinite().all()
    sizes = replace(network.config, vocab=9)
    other = build_decoder(sizes, RandomWeights(0), torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="an assistant of another model: the size of the vocabulary is 64"):
        load_assistant(file, other)


@pytest.mark.covering(1)
@backends
@pytest.mark.parametrize("kind", KINDS)
def test_texts_stay_those_of_the_target(kind: str, native: bool) -> None:
    network = target_of(kind, native)
    context = BuildContext(VOCAB, network, speculators=(oracle_of(kind)[3],))
    requests = [
        Request(t, SamplingParams(temperature=heat, seed=1), max_new_tokens=30) for t in TEXTS for heat in (0, 1)
    ]
    drafted, chained, plain = (
        [c.tokens for c in Engine(DecoderRunner(network), build(name, context, options)).complete(requests)]
        for name, options in (("mtp", {}), ("mtp", {"eagle_topk": 1, "num_steps": 3}), ("autoregressive", {}))
    )
    assert drafted == chained == plain


def test_an_order_that_is_not_of_integers_is_refused(tmp_path: Path) -> None:
    """By its name, before anything is computed from it."""
    folder = oracle_of("E2B")[3]
    copied = Path(shutil.copytree(folder, tmp_path / "assistant"))
    tensors = load_file(copied / "model.safetensors")
    name = "masked_embedding.token_ordering"
    save_file(tensors | {name: tensors[name].float()}, copied / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"{name} should have integers, and has numbers of torch.float32"):
        load_assistant(copied, target_of("E2B", native=False))


def test_a_key_that_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    file = Path(shutil.copytree(oracle_of("31B")[3], tmp_path / "assistant")) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"draft_gate": 2}))
    with pytest.raises(ValueError, match="draft_gate should be left out: this key is not known here"):
        load_assistant(file.parent, target_of("31B", False))
