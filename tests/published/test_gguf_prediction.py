"""Layers of multi-token prediction in GGUF files score as those of transformers, and are written as the converter of
llama.cpp writes them.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import copy
from typing import Any
from urllib.request import Request, urlopen

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from gguf_models import CASES, oracle_of, write_model
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpLayer, MtpModel
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.glm4_moe import modeling_glm4_moe as glm
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen_moe
from transformers.models.qwen3_next import modeling_qwen3_next as next_qwen

from command import expect_error, run_foretell, save_tiny_model, tiny_tokenizer
from foretell.core.context import StepResult
from foretell.draft import MTPDrafter, MTPModulesDrafter
from foretell.load import open_checkpoint
from foretell.model.kernels import available
from foretell.model.load.build import build_decoder
from foretell.model.load.gguf import GGUF
from foretell.model.load.gguf_header import GGUFHeader, check_model, gguf_config
from foretell.model.load.gguf_weights import GGUFWeights
from foretell.model.load.mtp import load_mtp
from foretell.model.load.native import load_native
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.mtp import MTPLayer
from foretell.model.run.network import Network
from foretell.speculator.formats.gguf import open_gguf
from foretell.speculator.formats.mtp_gguf import write_prediction
from foretell.speculator.load import is_speculator
from helpers import chain_tree, context_of, random_tokens

TEXT = random_tokens(20, 61, seed=3)
PARTS: dict[str, tuple[Any, Any]] = {
    "glm4moe": (glm.Glm4MoeDecoderLayer, glm.Glm4MoeRMSNorm),
    "deepseek2 V3": (deepseek.DeepseekV3DecoderLayer, deepseek.DeepseekV3RMSNorm),
    "deepseek2 whole": (deepseek.DeepseekV3DecoderLayer, deepseek.DeepseekV3RMSNorm),
    "qwen35": (qwen.Qwen3_5DecoderLayer, qwen.Qwen3_5RMSNorm),
    "qwen35moe": (qwen_moe.Qwen3_5MoeDecoderLayer, qwen_moe.Qwen3_5MoeRMSNorm),
    "qwen3next": (next_qwen.Qwen3NextDecoderLayer, next_qwen.Qwen3NextRMSNorm),
}
"""Classes of a layer and of its norms, by the case of the model."""
STEMS = {"mtp_block.": "", "enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm"}
"""Names of the parts in transformers, and in checkpoints."""
QWEN = {
    "eh_proj": "mtp.fc", "shared_head.norm": "mtp.norm", "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
}  # fmt: skip
"""Names of the parts in checkpoints of Qwen."""


@cache
@torch.no_grad()
def layer_of(name: str) -> tuple[MtpLayer, dict[str, torch.Tensor]]:
    """The layer of a random model, and its tensors by their names in DeepSeek-V3."""
    model = oracle_of(CASES[name])
    attends = max(
        i for i, kind in enumerate(getattr(model.config, "layer_types", None) or [""] * 3) if "lin" not in kind
    )
    layer = MtpLayer(model.config, *PARTS[name], attends).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    at, tensors = f"model.layers.{model.config.num_hidden_layers}.", dict[str, torch.Tensor]()
    for part, tensor in layer.state_dict().items():
        stem = next(stem for stem in STEMS if part.startswith(stem))
        tensors[at + part.replace(stem, STEMS[stem], 1)] = tensor
    return layer, tensors


@torch.no_grad()
def write(path: Path, name: str) -> torch.Tensor:
    """Write a random model with its layer; the scores of the layer after the text."""
    model = oracle_of(CASES[name])
    layer, tensors = layer_of(name)
    write_model(path, CASES[name], model, prediction=tensors)
    states = model.model(torch.tensor([TEXT])).last_hidden_state[:, :-1]
    count = states.shape[1]
    position, mask = torch.arange(count)[None], torch.full((count, count), float("-inf")).triu(1)[None, None]
    embedded = model.model.embed_tokens(torch.tensor([TEXT[1:]]))
    out = layer(embedded, states, model.model.rotary_emb(embedded, position), mask, position, None)
    scores: torch.Tensor = model.lm_head(out)[0, -1]
    return scores


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=pytest.mark.skipif(not available(), reason="-"))])
@pytest.mark.parametrize("name", PARTS)
def test_a_layer_of_a_file_scores_as_that_of_transformers(name: str, kernels: bool, tmp_path: Path) -> None:
    wanted = write(tmp_path / "m.gguf", name)
    file = GGUF(tmp_path / "m.gguf")
    config = gguf_config(file)
    weights = GGUFWeights(file, config)
    cpu = torch.device("cpu")
    network = load_native(config, weights, "float32") if kernels else build_decoder(config, weights, torch.float32, cpu)
    torch.testing.assert_close(
        scores(network, load_mtp(config, weights, network)), wanted, rtol=0, atol=1e-5 * float(wanted.abs().max())
    )


def scores(network: Network, layer: MTPLayer) -> torch.Tensor:
    """The scores of a layer after the text."""
    tree = chain_tree(TEXT[:-1])
    drafter, output = MTPDrafter(layer), DecoderRunner(network).forward([0], tree, hidden_layers=layer.hidden_layers)
    drafter.observe(StepResult(context_of(TEXT), tree, output, (tuple(range(tree.nodes)),), ((TEXT[-1],),), (0,)))
    logits, at = drafter.expand(chain_tree([TEXT[-1]]), np.array([[0]]), context_of(TEXT))
    last: torch.Tensor = logits[at[0, -1]]
    return last


def split(path: Path, name: str) -> tuple[Path, torch.Tensor]:
    """Write a model and its layer as llama.cpp's converter does with --no-mtp and --mtp; the scores of the layer."""
    path.mkdir(exist_ok=True)
    wanted, layers = write(path / "both", name), oracle_of(CASES[name]).config.num_hidden_layers
    reader = GGUFReader(path / "both")
    for file, own in (("m.gguf", False), ("mtp-m.gguf", True)):
        writer = GGUFWriter(path / file, reader.fields["general.architecture"].contents())
        for key, field in reader.fields.items():
            if not key.startswith(("GGUF.", "general.architecture")):
                writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
        for tensor in reader.tensors:
            if not tensor.name.startswith("blk.") or tensor.name.startswith(f"blk.{layers}.") is own:
                writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return path / "m.gguf", wanted


@pytest.mark.parametrize("named", [False, True])
def test_the_layer_of_a_file_beside_the_model_scores_the_same(named: bool, tmp_path: Path) -> None:
    model, wanted = split(tmp_path, "glm4moe")
    file = tmp_path / "mtp-m.gguf"
    if named:
        file = file.rename(tmp_path / "other.gguf")
    assert is_speculator(file) and not is_speculator(model)
    config = gguf_config(GGUF(model))
    weights = GGUFWeights(GGUF(model), config)
    network = build_decoder(config, weights, torch.float32, torch.device("cpu"))
    own = scores(network, load_mtp(config, weights, network, file if named else None))
    torch.testing.assert_close(own, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


def test_files_with_the_layer_alone_are_refused_in_a_sentence(tmp_path: Path) -> None:
    model, _ = split(tmp_path, "glm4moe")
    split(tmp_path / "other", "deepseek2 V3")
    config = gguf_config(GGUF(model))
    weights = GGUFWeights(GGUF(model), config)
    network = build_decoder(config, weights, torch.float32, torch.device("cpu"))
    alone = tmp_path / "mtp-m.gguf"
    for call, words in (
        (lambda: GGUFWeights(GGUF(alone), config), "alone; name the model's file with --model"),
        (lambda: check_model(GGUFHeader(alone)), "alone; name the model's file with --model"),
        (lambda: open_gguf(alone), "with which --method mtp drafts alone"),
        (lambda: load_mtp(config, weights, network, model), "this file is of another kind"),
        (lambda: load_mtp(config, weights, network, tmp_path / "other/mtp-m.gguf"), "of another model: the arch"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    copy(alone, tmp_path / "mtp-n.gguf")
    with pytest.raises(ValueError, match="2 files with a layer of multi-token prediction beside it"):
        load_mtp(config, weights, network)
    for file in tmp_path.glob("mtp-*"):
        file.unlink()
    with pytest.raises(ValueError, match="without its multi-token prediction layer"):
        load_mtp(config, weights, network)


def publish(folder: Path, name: str, apart: bool = False) -> Path:
    """Write a checkpoint with the layer under its published names; `apart`: with a tensor for each expert."""
    model = oracle_of(CASES[name])
    model.save_pretrained(folder)
    at = f"model.layers.{model.config.num_hidden_layers}."
    layer = dict(layer_of(name)[1])
    if name.startswith("qwen"):
        layer = {f"{QWEN[part]}.weight" if (part := key.removeprefix(at)[:-7]) in QWEN else key: t
                 for key, t in layer.items()}  # fmt: skip
        layer = {key.replace(at, "mtp.layers.0."): t for key, t in layer.items()}
    else:
        layer |= {f"{at}embed_tokens.weight": model.model.embed_tokens.weight.data}
        layer |= {f"{at}shared_head.head.weight": model.lm_head.weight.data}
    for key in [key for key in layer if apart and ".experts." in key]:
        whole = layer.pop(key)
        parts = {"gate": whole, "up": whole} if key.endswith("gate_up_proj") else {"down": whole}
        for i in range(len(whole)):
            for half, (part, _) in enumerate(parts.items()):
                matrix = whole[i].chunk(len(parts))[half]
                layer[f"{key.rpartition('.')[0]}.{i}.{part}_proj.weight"] = matrix
    tensors = load_file(folder / "model.safetensors") | layer
    save_file({key: t.clone().contiguous() for key, t in tensors.items()}, folder / "model.safetensors")
    tiny_tokenizer(model.config.vocab_size).save(str(folder / "tokenizer.json"))
    return folder


def written(path: Path, name: str, folder: Path) -> tuple[Path, Path]:
    """The file of a model without its layer, and that of the layer alone that is made of both."""
    write_model(path / "m.gguf", CASES[name], oracle_of(CASES[name]))
    checkpoint = open_checkpoint(folder)
    write_prediction(checkpoint.config, checkpoint.weights, path / "m.gguf", path / "mtp-m.gguf", torch.float32)
    return path / "m.gguf", path / "mtp-m.gguf"


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", PARTS)
def test_a_layer_is_written_as_the_converter_writes_it(name: str, apart: bool, tmp_path: Path) -> None:
    """Metadata and tensors are those of the file with model and layer, and the layer scores as that of transformers."""
    wanted, layers = write(tmp_path / "both", name), oracle_of(CASES[name]).config.num_hidden_layers
    model, alone = written(tmp_path, name, publish(tmp_path / "published", name, apart))
    both, own = GGUFReader(tmp_path / "both"), GGUFReader(alone)
    fields = [{k: f.contents() for k, f in file.fields.items() if not k.startswith("GGUF.")} for file in (both, own)]
    assert fields[0] == fields[1] and fields[1][f"{CASES[name].architecture}.block_count"] == layers + 1
    expected = {t.name: t for t in both.tensors if not t.name.startswith("blk.") or t.name.startswith(f"blk.{layers}.")}
    copies = {} if name.startswith("qwen") else {
        f"blk.{layers}.nextn.embed_tokens.weight": expected["token_embd.weight"],
        f"blk.{layers}.nextn.shared_head_head.weight": expected["output.weight"],
    }  # fmt: skip
    found = {t.name: t for t in own.tensors}
    assert found.keys() == expected.keys() | copies.keys()
    for key, tensor in (expected | copies).items():
        assert list(tensor.shape) == list(found[key].shape), key
        np.testing.assert_array_equal(tensor.data, found[key].data, key)
    config = gguf_config(GGUF(model))
    weights = GGUFWeights(GGUF(model), config)
    network = build_decoder(config, weights, torch.float32, torch.device("cpu"))
    again = scores(network, load_mtp(config, weights, network))
    torch.testing.assert_close(again, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


def test_names_of_a_layer_are_those_of_the_package(tmp_path: Path) -> None:
    _, alone = written(tmp_path, "glm4moe", publish(tmp_path / "published", "glm4moe"))
    known = [gguf.TENSOR_NAMES[kind].format(bid=3) for kind in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.GLM4_MOE]]
    names = [tensor.name.rpartition(".")[0] for tensor in GGUFReader(alone).tensors]
    assert set(names) <= set(known) and {n for n in names if "nextn" in n} == {n for n in known if "nextn" in n}


def test_the_command_writes_a_layer_in_bfloat16(tmp_path: Path) -> None:
    name = "qwen35moe"
    write_model(tmp_path / "m.gguf", CASES[name], oracle_of(CASES[name]))
    folder = publish(tmp_path / "published", name)
    common = ("export", folder, "--format", "gguf", "--model", tmp_path / "m.gguf")
    done = run_foretell(*common, "--out", tmp_path / "out")
    assert done.exit_code == 0 and "mtp-m.gguf" in done.stdout, done.stderr
    types = {t.name: t.tensor_type.name for t in GGUFReader(tmp_path / "out" / "mtp-m.gguf").tensors}
    assert types["blk.3.nextn.eh_proj.weight"] == types["blk.3.ffn_gate_exps.weight"] == "BF16"
    assert types["blk.3.nextn.enorm.weight"] == types["blk.3.ffn_gate_inp.weight"] == "F32"
    assert types["token_embd.weight"] == "F32"
    assert "float32 or bfloat16" in expect_error(*common, "--out", tmp_path / "no", "--dtype", "int8")
    assert "name that file with --model" in expect_error(*common[:-1], folder, "--out", tmp_path / "no")
    write_model(tmp_path / "glm.gguf", CASES["glm4moe"], oracle_of(CASES["glm4moe"]))
    said = expect_error(*common[:-1], tmp_path / "glm.gguf", "--out", tmp_path / "no")
    assert "the architecture is glm4moe, and qwen35moe that of" in said and not (tmp_path / "no").exists()
    wider = replace(CASES[name], values={**CASES[name].values, "hidden_size": 96})
    write_model(tmp_path / "wider.gguf", wider, oracle_of(wider))
    said = expect_error(*common[:-1], tmp_path / "wider.gguf", "--out", tmp_path / "no")
    assert "the width is 96, and 64 that of" in said
    tensors = load_file(folder / "model.safetensors")
    save_file({key: t for key, t in tensors.items() if "mtp.fc" not in key}, folder / "model.safetensors")
    assert "has no mtp.fc.weight" in expect_error(*common, "--out", tmp_path / "no")


@pytest.mark.parametrize("name", ["glm4moe", "deepseek2 V3"])
def test_several_layers_of_a_file_draft_as_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Layer by layer along a path, from the model's file and from a written one, as from safetensors."""
    model, folder = oracle_of(CASES[name]), publish(tmp_path / "published", name)
    count, at = 2, model.config.num_hidden_layers
    first = layer_of(name)[1]
    second = {key.replace(f"layers.{at}.", f"layers.{at + 1}."): t.flip(0) for key, t in first.items()}
    tensors = load_file(folder / "model.safetensors")
    copies = {key.replace(f"layers.{at}.", f"layers.{at + 1}."): t.flip(0) if key in first else t.clone()
              for key, t in tensors.items() if f"layers.{at}." in key}  # fmt: skip
    save_file({key: t.contiguous() for key, t in (tensors | copies).items()}, folder / "model.safetensors")
    oracle, path = MtpModel(model, count).eval(), random_tokens(1, 61, seed=4)
    own = layer_of(name)[0].state_dict()
    for k, layer in enumerate(oracle.layers):
        layer.load_state_dict({key: t.flip(0) if k else t for key, t in own.items()})
    with torch.no_grad():
        states, tokens = model.model(torch.tensor([TEXT[:-1]])).last_hidden_state, torch.tensor([TEXT + path])
        for k in range(count):
            end = k + 1 + states.shape[1]
            cache, where = MtpCache(config=oracle.config), torch.arange(k + 1, end)[None]
            states = oracle.forward_layer(k, states, where, cache, tokens[:, k + 1 : end])
        wanted = model.lm_head(states)[0, -1]
    model_file, _ = written(tmp_path, name, folder)
    write_model(tmp_path / "both.gguf", CASES[name], model, prediction=first | second)
    published = open_checkpoint(folder)
    for file, weights in ((model_file, None), (tmp_path / "both.gguf", None), (model_file, published.weights)):
        config = gguf_config(GGUF(file))
        network = build_decoder(config, GGUFWeights(GGUF(file), config), torch.float32, torch.device("cpu"))
        layer = load_mtp(config, weights or GGUFWeights(GGUF(file), config), network)
        assert len(layer.modules) == count
        drafter = MTPModulesDrafter(layer)
        context, tree = context_of(TEXT), chain_tree(TEXT[:-1])
        output = DecoderRunner(network).forward([0], tree, hidden_layers=layer.hidden_layers)
        drafter.observe(StepResult(context, tree, output, (tuple(range(tree.nodes)),), ((TEXT[-1],),), (0,)))
        drafter.expand(chain_tree([TEXT[-1]]), np.array([[0]]), context)
        logits, where = drafter.expand(chain_tree([TEXT[-1], *path]), np.array([[1]]), context)
        torch.testing.assert_close(
            logits[where[0, 1]], wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()), msg=str(file)
        )
    done = run_foretell("export", folder, "--format", "gguf", "--model", model_file, "--out", tmp_path / "out")
    assert "(2 of them, and llama.cpp drafts with one alone)" in " ".join(done.stdout.split()), done.stderr
    less = {key: tensor for key, tensor in (first | second).items() if key != f"model.layers.{at + 1}.eh_proj.weight"}
    write_model(tmp_path / "less.gguf", CASES[name], model, prediction=less)
    with pytest.raises(ValueError, match=f"should have 2 layers of multi-token prediction, and block {at + 1} is none"):
        load_mtp(config, GGUFWeights(GGUF(tmp_path / "less.gguf"), config), network)


def test_layers_that_no_file_can_hold_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", CASES["glm4moe"], oracle_of(CASES["glm4moe"]))
    checkpoint = open_checkpoint(save_tiny_model(tmp_path / "plain"))
    with pytest.raises(ValueError, match="qwen3_5_moe_text can be written to GGUF, found llama"):
        write_prediction(checkpoint.config, checkpoint.weights, tmp_path / "m.gguf", tmp_path / "no", torch.float32)


def changed(key: str, tensor: torch.Tensor, norm: torch.Tensor, one: float) -> torch.Tensor:
    """A tensor of a model that knows the next token by the last one alone, or of a layer that reads this one alone."""
    if key.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
        return torch.zeros_like(tensor)
    if key.endswith(("eh_proj.weight", "mtp.fc.weight")):
        return torch.eye(len(tensor), tensor.shape[1])
    if key.endswith(("enorm.weight", "hnorm.weight")) or "pre_fc_norm" in key:
        return torch.full_like(tensor, one)
    if key.endswith(("shared_head.norm.weight", "mtp.norm.weight")):
        return norm
    if key.endswith(("lm_head.weight", "shared_head.head.weight")):
        return torch.cat((torch.zeros_like(tensor[:1]), 50 * tensor[1:]))  # the end of the text is never the next token
    return tensor


def with_vocabulary(source: Path, path: Path) -> None:
    """Copy a file; its tokens are letters."""
    reader = GGUFReader(source)
    writer = GGUFWriter(path, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture", "tokenizer.")):
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([chr(ord("A") + i) for i in range(61)])
    writer.add_token_types([1] * 61)
    writer.add_token_merges(["A B"])
    writer.add_eos_token_id(0)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_cpp(model: Path, layer: Path | None) -> Any:
    """The answer of llama.cpp's server."""
    package = pytest.importorskip("xllamacpp")
    params = package.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = str(model), 128, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    if layer is not None:
        params.speculative.types = [package.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_MTP]
        drafts = params.speculative.draft
        drafts.mparams.path, drafts.n_max, drafts.p_min, drafts.cpuparams.n_threads = str(layer), 1, 0.0, 1
    server = package.Server(params)
    fixed = {"n_predict": 24, "temperature": 0, "ignore_eos": True, "return_tokens": True, "cache_prompt": False}
    body = json.dumps(fixed | {"prompt": list(TEXT)}).encode()
    with urlopen(Request(f"{server.listening_address}/completion", body)) as response:
        return json.load(response)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in PARTS if name != "deepseek2 whole"])
def test_llama_cpp_drafts_with_a_written_layer(name: str, tmp_path: Path) -> None:
    """All drafts are right, as the layer knows the same as the model."""
    pytest.importorskip("xllamacpp")
    model, folder = oracle_of(CASES[name]), publish(tmp_path / "published", name)
    norm, one = model.model.norm.weight.detach().clone(), float(not name.startswith("qwen"))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(changed(key, parameter, norm, one))
    tensors = load_file(folder / "model.safetensors")
    save_file({k: changed(k, t, norm, one).clone() for k, t in tensors.items()}, folder / "model.safetensors")
    write_model(tmp_path / "bare.gguf", CASES[name], model)
    with_vocabulary(tmp_path / "bare.gguf", tmp_path / "m.gguf")
    checkpoint = open_checkpoint(folder)
    layer = tmp_path / "mtp-m.gguf"
    write_prediction(checkpoint.config, checkpoint.weights, tmp_path / "m.gguf", layer, torch.float32)
    plain, drafted = (llama_cpp(tmp_path / "m.gguf", file) for file in (None, layer))
    assert drafted["tokens"] == plain["tokens"] and len(set(plain["tokens"])) > 1
    assert drafted["timings"]["draft_n_accepted"] == drafted["timings"]["draft_n"] > 8


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["glm4moe", "deepseek2 V3"])
def test_llama_cpp_reads_a_file_with_several_layers(name: str, tmp_path: Path) -> None:
    """Its loader asks for the tensors of every layer that the metadata counts; it decodes without them as before."""
    pytest.importorskip("xllamacpp")
    model, first = oracle_of(CASES[name]), layer_of(name)[1]
    at = f"layers.{model.config.num_hidden_layers}."
    second = {key.replace(at, f"layers.{model.config.num_hidden_layers + 1}."): t for key, t in first.items()}
    answers = []
    for i, layers in enumerate((None, first | second)):
        write_model(tmp_path / f"bare{i}.gguf", CASES[name], model, prediction=layers)
        with_vocabulary(tmp_path / f"bare{i}.gguf", tmp_path / f"m{i}.gguf")
        answers.append(llama_cpp(tmp_path / f"m{i}.gguf", None)["tokens"])
    assert answers[0] == answers[1] and len(set(answers[0])) > 1
