"""Files as people have them: split, with biases, tensors that nothing reads, heads beside tied embeddings."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_weights import one_sentence, oracle_of, read_gguf, write_gguf

from foretell.model.block.decoder import Decoder
from foretell.model.config.readers.hf import from_hf
from foretell.model.load.build import build_decoder
from foretell.model.load.gguf import GGUF
from foretell.model.load.reference import resolve_reference
from foretell.model.load.weights import SafetensorsWeights
from foretell.roofline.model_configs import find_model
from helpers import all_logits, random_tokens

Tensors = dict[str, torch.Tensor]
TEXT = random_tokens(23, 64)


def wanted(model: Any) -> np.ndarray:
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([TEXT])).logits[0].numpy()
    return logits


def check(decoder: Decoder, model: Any) -> None:
    np.testing.assert_allclose(all_logits(decoder, TEXT), wanted(model), rtol=0, atol=2e-5)


def read_directory(path: Path) -> Decoder:
    config, weights = from_hf(json.loads((path / "config.json").read_text())), SafetensorsWeights(path)
    weights.check_tensors(config)
    return build_decoder(weights.settle_head(config), weights, torch.float32, torch.device("cpu"))


def test_biases_of_a_gguf_file_are_used(tmp_path: Path) -> None:
    oracle = oracle_of("LlamaConfig", attention_bias=True, mlp_bias=True)
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    write_gguf(tmp_path / "model.gguf", oracle)
    check(read_gguf(tmp_path / "model.gguf"), oracle)


def rewritten(source: Path, path: Path, more: Mapping[str, Any] | None = None, tensors: Mapping[str, Any] | None = None,
              parts: int = 1) -> Path:  # fmt: skip
    """A copy of a GGUF file with more metadata and tensors, in parts."""
    reader, more = gguf.GGUFReader(source), dict(more or {})
    fields = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")} | more
    entries = [(t.name, np.array(t.data)) for t in reader.tensors] + list((tensors or {}).items())
    for part in range(parts):
        name = path if parts == 1 else path.with_name(f"{path.stem}-{part + 1:05}-of-{parts:05}{path.suffix}")
        writer = gguf.GGUFWriter(name, "llama")
        known = dict(fields if part == 0 else {}) | ({"split.no": part, "split.count": parts} if parts > 1 else {})
        for key, value in known.items():
            if key == "general.architecture":
                continue
            write = {float: writer.add_float32, str: writer.add_string, list: writer.add_array}
            write.get(type(value), writer.add_uint32)(key, value)
        for tensor, data in entries[part::parts]:
            writer.add_tensor(tensor, data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return path if parts == 1 else path.with_name(f"{path.stem}-00001-of-{parts:05}{path.suffix}")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "plain.gguf", oracle_of("LlamaConfig"))
    return tmp_path / "plain.gguf"


def test_a_split_file_is_read_by_its_first_part(plain: Path) -> None:
    first = rewritten(plain, plain.with_name("m.GGUF"), parts=3)
    assert resolve_reference(str(first)) == first
    assert len(GGUF(first).files) == 3
    check(read_gguf(first), oracle_of("LlamaConfig"))
    second = first.with_name("m-00002-of-00003.GGUF")
    with pytest.raises(ValueError) as error:
        GGUF(second)
    one_sentence(error, "m-00002-of-00003.GGUF", "first part")
    second.unlink()
    with pytest.raises(ValueError) as error:
        GGUF(first)
    one_sentence(error, "m-00002-of-00003.GGUF", "not here")
    with pytest.raises(ValueError) as error:
        GGUF(first.rename(first.with_name("renamed.gguf")))
    one_sentence(error, "renamed.gguf", "-00001-of-00003.gguf")


@pytest.mark.parametrize("name", ["blk.0.attn_q.scale", "output.bias", "blk.2.attn_norm.weight", "token_types.weight"])
def test_a_tensor_of_a_gguf_file_that_is_not_read_is_named(name: str, plain: Path) -> None:
    rewritten(plain, plain.with_name("more.gguf"), tensors={name: np.ones(32, np.float32)})
    with pytest.raises(ValueError) as error:
        read_gguf(plain.with_name("more.gguf"))
    one_sentence(error, "more.gguf", name)


def test_lists_of_equal_numbers_are_numbers(plain: Path) -> None:
    lists = {"llama.attention.head_count_kv": [2, 2], "llama.feed_forward_length": [64, 64]}
    other = rewritten(plain, plain.with_name("lists.gguf"), lists)
    check(read_gguf(other), oracle_of("LlamaConfig"))
    assert find_model(str(other))[1] == find_model(str(plain))[1]
    unequal = rewritten(plain, plain.with_name("unequal.gguf"), {"llama.feed_forward_length": [64, 32]})
    with pytest.raises(ValueError) as error:
        read_gguf(unequal)
    one_sentence(error, "unequal.gguf", "feed_forward_length")


@pytest.mark.parametrize(
    "scaling",
    [
        {"llama.rope.scaling.factor": 2.0},
        {"llama.rope.scale_linear": 2.0},
        {"llama.rope.scale_linear": 2.0, "llama.rope.scaling.type": "linear"},
        {"llama.rope.scale_linear": 9.0, "llama.rope.scaling.factor": 2.0},
    ],
)
def test_a_factor_without_a_type_is_linear(scaling: Mapping[str, Any], plain: Path) -> None:
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    check(
        read_gguf(rewritten(plain, plain.with_name("r.gguf"), scaling)),
        oracle_of("LlamaConfig", rope_parameters=linear),
    )
    none = rewritten(plain, plain.with_name("n.gguf"), {**scaling, "llama.rope.scaling.type": "none"})
    check(read_gguf(none), oracle_of("LlamaConfig"))


def test_the_roofline_counts_a_tied_matrix_once(plain: Path) -> None:
    assert not find_model(str(plain))[1].tied
    oracle = oracle_of("LlamaConfig")
    del oracle.lm_head
    write_gguf(plain.with_name("tied.gguf"), oracle)
    assert find_model(str(plain.with_name("tied.gguf")))[1].tied


def changed(folder: Path, config: str, change: Callable[[Tensors], Tensors], **values: object) -> Any:
    """A directory with changed tensors, and the model that transformers makes of it."""
    oracle_of(config, **values).save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
HEADS: dict[str, Callable[[Tensors], Tensors]] = {
    "other numbers": lambda t: t | {HEAD: t[TABLE].flip(0).contiguous()},
    "the same numbers": lambda t: t | {HEAD: t[TABLE].clone()},
    "alone": lambda t: {k.replace(TABLE, HEAD): v for k, v in t.items()},
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_beside_a_tied_embedding_is_used_if_it_differs(name: str, tmp_path: Path) -> None:
    model = changed(tmp_path, "LlamaConfig", HEADS[name], tie_word_embeddings=True)
    decoder = read_directory(tmp_path)
    assert decoder.config.tied == (name != "other numbers")
    check(decoder, model)


def test_a_base_model_is_read(tmp_path: Path) -> None:
    model = changed(
        tmp_path, "LlamaConfig", lambda t: {k.removeprefix("model."): v for k, v in t.items()}, tie_word_embeddings=True
    )
    check(read_directory(tmp_path), model)


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.q_proj.bias", "model.layers.0.extra.weight", "lm_head.bias"]
)
def test_a_tensor_of_a_directory_that_is_not_read_is_named(name: str, tmp_path: Path) -> None:
    changed(tmp_path, "LlamaConfig", lambda t: t | {name: torch.ones(32)})
    with pytest.raises(ValueError) as error:
        read_directory(tmp_path)
    one_sentence(error, name)


@pytest.mark.parametrize("types", [["sliding_attention", "full_attention"], ["full_attention"] * 2, None])
def test_windows_of_a_mistral_are_those_of_its_layer_types(types: list[str] | None, tmp_path: Path) -> None:
    oracle_of("MistralConfig", sliding_window=8).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | ({"layer_types": types} if types else {})))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    check(read_directory(tmp_path), model)
