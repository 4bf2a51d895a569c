"""Loading checkpoints: GGUF files of several precisions against transformers, and one sentence for damaged or refused
files.
"""

import json
import os
import struct
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from foretell.load import load
from foretell.model.block.decoder import Decoder
from foretell.model.config.readers.gguf import from_gguf
from foretell.model.config.readers.hf import from_hf
from foretell.model.load.build import build_decoder
from foretell.model.load.gguf import GGUF
from foretell.model.load.gguf_header import gguf_config
from foretell.model.load.gguf_weights import GGUFWeights
from foretell.model.load.reference import resolve_reference
from foretell.model.load.weights import SafetensorsWeights
from foretell.model.matrices.stored import StoredMatrix
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.testing import letter_codec
from helpers import LLAMA3, all_logits, chain_tree, random_tokens

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
}
NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "lm_head": "output",
}


def oracle_of(architecture: str, **values: object) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, architecture)(**(SIZES | values))
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def as_stored(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of a Llama's query and key rows: rotary pairs side by side."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, oracle: Any, kind: Kind = Kind.F32, scaling: Mapping[str, Any] | None = None) -> None:
    """A GGUF file of the model, its matrices stored as `kind`; the model's own matrices become what the file can
    hold.
    """
    name, config = oracle.config.model_type, oracle.config
    writer = gguf.GGUFWriter(path, name)
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim or config.hidden_size // config.num_attention_heads)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    for key, value in (scaling or {}).items():
        getattr(writer, f"add_{key}")(value)
    for key, tensor in oracle.state_dict().items():
        parts = key.split(".")
        block = f"blk.{parts[2]}." if parts[1] == "layers" else ""
        data = tensor.numpy()
        stored = kind if data.ndim > 1 else Kind.F32
        tensor.copy_(torch.from_numpy(dequantize(quantize(data, stored), stored).astype(np.float32)))
        if name == "llama" and parts[-2] in ("q_proj", "k_proj"):
            data = as_stored(data, config.num_attention_heads if parts[-2] == "q_proj" else config.num_key_value_heads)
        writer.add_tensor(f"{block}{NAMES[parts[-2]]}.{parts[-1]}", quantize(data, stored), raw_dtype=stored)
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "llama3":
        inverse = oracle.model.rotary_emb.inv_freq.numpy()
        plain = 10000.0 ** -(np.arange(len(inverse)) / len(inverse))
        writer.add_tensor("rope_freqs.weight", (plain / inverse).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_gguf(path: Path) -> Decoder:
    file = GGUF(path)
    config = gguf_config(file)
    return build_decoder(config, GGUFWeights(file, config), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("architecture", "kind", "values", "scaling"),
    [
        ("LlamaConfig", Kind.F32, {}, {}),
        ("LlamaConfig", Kind.F16, {}, {}),
        ("LlamaConfig", Kind.Q8_0, {}, {}),
        ("LlamaConfig", Kind.Q4_1, {"head_dim": 16}, {}),
        ("LlamaConfig", Kind.F32, {"rope_parameters": LLAMA3}, {}),
        (
            "LlamaConfig",
            Kind.F32,
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
            {"rope_scaling_type": gguf.RopeScalingType.LINEAR, "rope_scaling_factor": 2.0},
        ),
        (
            "LlamaConfig",
            Kind.F32,
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "rope_theta": 10000.0,
                    "original_max_position_embeddings": 32,
                }
            },
            {
                "rope_scaling_type": gguf.RopeScalingType.YARN,
                "rope_scaling_factor": 4.0,
                "rope_scaling_orig_ctx_len": 32,
            },
        ),
        ("Qwen3Config", Kind.F32, {"head_dim": 16}, {}),
    ],
    ids=["F32", "F16", "Q8_0", "Q4_1", "llama3 rope", "linear rope", "yarn", "qwen3"],
)
def test_a_gguf_file_gives_the_logits_of_transformers(
    architecture: str, kind: Kind, values: Mapping[str, Any], scaling: Mapping[str, Any], tmp_path: Path
) -> None:
    oracle, text = oracle_of(architecture, **values), random_tokens(60, 64)
    with torch.no_grad():
        write_gguf(tmp_path / "model.gguf", oracle, kind, scaling)
        wanted = oracle(torch.tensor([text])).logits[0]
    found = all_logits(read_gguf(tmp_path / "model.gguf"), text)
    torch.testing.assert_close(torch.from_numpy(found), wanted.double(), rtol=0, atol=1e-4)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory with a small Llama."""
    oracle_of("LlamaConfig").save_pretrained(tmp_path)
    return tmp_path


def read_directory(path: Path) -> Decoder:
    config = from_hf(json.loads((path / "config.json").read_text()))
    return build_decoder(config, SafetensorsWeights(path), torch.float32, torch.device("cpu"))


def test_a_sharded_checkpoint_reads_as_a_whole_one(tmp_path: Path) -> None:
    oracle = oracle_of("LlamaConfig")
    oracle.save_pretrained(tmp_path / "whole")
    oracle.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    whole, shards = (DecoderRunner(read_directory(tmp_path / n)) for n in ("whole", "shards"))
    tree = chain_tree(random_tokens(9, 64))
    assert torch.equal(whole.forward([0], tree).logits, shards.forward([0], tree).logits)


def one_sentence(error: pytest.ExceptionInfo[ValueError], *words: str) -> None:
    message = str(error.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_a_missing_tensor_is_named(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(ValueError) as error:
        read_directory(checkpoint)
    one_sentence(error, str(checkpoint), "model.layers.1.mlp.up_proj.weight")


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model."])
def test_more_layers_than_the_configuration_says_are_refused(prefix: str, checkpoint: Path) -> None:
    """The layer of multi-token prediction follows the model's own under their name (DeepSeek-V3, GLM)."""
    file, config = checkpoint / "model.safetensors", json.loads((checkpoint / "config.json").read_text())
    tensors = {name.replace("model.", prefix, 1): t for name, t in load_file(file).items()}
    layer = f"{prefix}layers.2."
    predicting = {layer + "eh_proj.weight": torch.ones(32, 64), layer + "mlp.up_proj.weight": torch.ones(64, 32)}
    save_file(tensors | predicting, file)
    letter_codec(64).tokenizer.save(str(checkpoint / "tokenizer.json"))
    load(str(checkpoint))
    (checkpoint / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(ValueError) as error:
        load(str(checkpoint))
    one_sentence(error, "config.json says that there are 1 layers, and the weights have a layer 1")


def test_a_tensor_of_another_shape_is_named(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, file)
    with pytest.raises(ValueError) as error:
        read_directory(checkpoint)
    one_sentence(error, "model.norm.weight", "(7,)", "(32,)")


@pytest.mark.parametrize("keep", [0, 5, 1000, -10])
def test_truncated_safetensors_are_refused(checkpoint: Path, keep: int) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError) as error:
        read_directory(checkpoint)
    one_sentence(error, "model.safetensors", "not complete", "may still be growing")


@pytest.mark.parametrize(
    ("at", "value", "word"),
    [
        (0, 10**12, "damaged"),
        (8, None, "damaged"),
        (None, b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
    ],
)
def test_damaged_safetensors_are_told_from_incomplete_ones(
    at: int | None, value: int | bytes | None, word: str, checkpoint: Path
) -> None:
    file = checkpoint / "model.safetensors"
    content = bytearray(file.read_bytes())
    if isinstance(value, bytes):
        content = bytearray(value)
    elif at is not None:
        content[at : at + 8] = struct.pack("<Q", value or 0)
    file.write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_directory(checkpoint)
    one_sentence(error, "model.safetensors", word)


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("/no/model", "no such directory"),
        ("./model", "no such"),
        ("a/b/c", "no such"),
        ("smollm", "did you mean 'smollm2-135m'"),
    ],
)
def test_a_missing_model_is_reported(reference: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        resolve_reference(reference)


def test_a_pickle_is_refused_by_name(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(ValueError) as error:
        read_directory(checkpoint)
    one_sentence(error, "pytorch_model.bin", "pickle", "safetensors")


def test_a_directory_without_weights_is_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ValueError) as error:
        read_directory(checkpoint)
    one_sentence(error, "no model.safetensors")


@pytest.mark.parametrize(
    "index",
    [
        "{", "[]", "[" * 10**5, '{"weight_map": [1]}', '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "../gone.safetensors"}}',
        '{"weight_map": {"a": "gone.safetensors"}}',
    ],
)  # fmt: skip
def test_a_damaged_index_is_refused(checkpoint: Path, index: str) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError) as error:
        read_directory(checkpoint)
    one_sentence(error, "download it again")


def test_an_untied_checkpoint_without_a_head_is_refused(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file)
    with pytest.raises(ValueError) as error:
        read_directory(checkpoint)
    one_sentence(error, "lm_head.weight")


def test_a_gguf_file_without_a_head_is_tied(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", oracle_of("LlamaConfig", tie_word_embeddings=True))
    assert not gguf_config(GGUF(tmp_path / "model.gguf")).tied
    oracle = oracle_of("LlamaConfig")
    del oracle.lm_head
    write_gguf(tmp_path / "tied.gguf", oracle)
    decoder = read_gguf(tmp_path / "tied.gguf")
    assert decoder.config.tied and torch.equal(decoder.head.weight, decoder.embedding)


def fp8(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name + "_scale"] = torch.ones(1)
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


def no_scales(tensors: dict[str, torch.Tensor]) -> None:
    fp8(tensors)
    del tensors["model.layers.0.self_attn.q_proj.weight_scale"]


def int8(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = (tensors[name] * 100).to(torch.int8)
    tensors[name + "_scale"] = torch.full((64, 1), 0.01)


def gptq(tensors: dict[str, torch.Tensor]) -> None:
    at = "model.layers.0.mlp.down_proj."
    del tensors[at + "weight"]
    tensors |= {at + "qweight": torch.zeros(8, 32, dtype=torch.int32), at + "scales": torch.ones(1, 32)}


def bitsandbytes(tensors: dict[str, torch.Tensor]) -> None:
    at = "model.layers.0.mlp.down_proj.weight"
    tensors |= {at: torch.zeros(1024, 1, dtype=torch.uint8), at + ".absmax": torch.ones(32)}


def leftover(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(1)


@pytest.mark.parametrize("change", [fp8, no_scales, int8, gptq, bitsandbytes, leftover], ids=lambda f: f.__name__)
def test_quantised_tensors_are_refused_by_name(
    change: Callable[[dict[str, torch.Tensor]], None], checkpoint: Path
) -> None:
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(ValueError) as error:
        load(str(checkpoint), "float32")
    one_sentence(error, "model.safetensors", "quantised checkpoint", "proj.")


@pytest.mark.parametrize(
    ("architecture", "method"),
    [
        ("llama", "bitsandbytes"),
        ("llama", "hqq"),
        ("llama", "quark"),
        ("gpt2", "gptq"),
        ("gpt2", "fp8"),
        ("gpt2", "awq"),
    ],
)
def test_quantised_checkpoints_are_refused_by_their_configuration(
    architecture: str, method: str, checkpoint: Path
) -> None:
    file = checkpoint / "config.json"
    raw = json.loads(file.read_text()) | {"model_type": architecture, "quantization_config": {"quant_method": method}}
    file.write_text(json.dumps(raw))
    with pytest.raises(ValueError) as error:
        load(str(checkpoint), "float32")
    one_sentence(error, str(checkpoint), f"quantised with {method}")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["{", "[]", "[" * 10**5, '{"a": "\\ud800"}', "\xff", '{"eos_token_id": "</s>"}'])
def test_a_damaged_json_file_is_named(name: str, text: str, checkpoint: Path) -> None:
    letter_codec(26).tokenizer.save(str(checkpoint / "tokenizer.json"))
    (checkpoint / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError) as error:
        load(str(checkpoint), "float32")
    one_sentence(error, f"{name}: ")


def test_end_tokens_are_those_of_both_files(checkpoint: Path) -> None:
    letter_codec(26).tokenizer.save(str(checkpoint / "tokenizer.json"))
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert load(str(checkpoint), "float32").eos == (2, 7)


def test_a_gguf_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf", oracle_of("LlamaConfig"))
    whole = (tmp_path / "whole.gguf").read_bytes()
    for size in [*range(0, 900, 7), len(whole) // 2, len(whole) - 1]:
        part = tmp_path / "part.gguf"
        part.write_bytes(whole[:size])
        with pytest.raises(ValueError) as error:
            GGUF(part)
        one_sentence(error, "part.gguf", "complete", *([] if size < 24 else ["may still be growing"]))


def _header(tensors: int, keys: bytes = b"", count: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, count) + keys


def _key(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


def _tensor(*shape: int, offset: int = 0, name: str = "t") -> bytes:
    axes = struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, offset)
    return struct.pack("<Q", len(name)) + name.encode() + axes


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (_header(10**12), ["asks for", "damaged"]),
        (_header(1, _key("k", 9, struct.pack("<IQ", 4, 10**12)), 1), ["asks for", "damaged"]),
        (_header(1, _key("k", 9, struct.pack("<IQ", 8, 10**12)), 1), ["asks for", "damaged"]),
        (_header(1, _key("k", 9, struct.pack("<IQ", 9, 2**31) * 3000), 1), ["array of arrays"]),
        (_header(1, _key("k", 8, struct.pack("<Q", 10**13)), 1), ["asks for", "damaged"]),
        (_header(1, _tensor(10**6, 10**6)), ["1.0e+12 numbers", "damaged"]),
        (_header(1, _tensor(*[1] * 9)), ["9 axes", "damaged"]),
        (_header(1, _tensor(10**6)) + bytes(99), ["not complete", "4,000,064 bytes"]),
        (_header(2, _tensor(8) + _tensor(8, name="u")) + bytes(999), ["damaged", "begins at byte"]),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", ["git lfs pull"]),
        (bytes(4096), ["begins with zeros"]),
    ],
    ids=str,
)
def test_an_absurd_gguf_header_takes_no_memory(content: bytes, words: Sequence[str], tmp_path: Path) -> None:
    part = tmp_path / "part.gguf"
    part.write_bytes(content)
    os.truncate(part, max(len(content), 1 << 33 if "asks for" in words else 0))
    tracemalloc.start()
    with pytest.raises(ValueError) as error:
        GGUF(part)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    one_sentence(error, "part.gguf", *words)
    assert most < 1 << 20


def test_a_download_that_stopped_long_ago_is_told_from_one_that_grows(tmp_path: Path) -> None:
    part = tmp_path / "part.gguf"
    part.write_bytes(_header(1, _tensor(10**6)) + bytes(99))
    os.utime(part, (0, 0))
    with pytest.raises(ValueError, match="its download has stopped"):
        GGUF(part)


def test_a_gguf_header_with_any_damaged_byte_is_read_or_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf", oracle_of("LlamaConfig"))
    whole, generator = (tmp_path / "whole.gguf").read_bytes(), np.random.default_rng(0)
    for _ in range(200):
        damaged, at = bytearray(whole), int(generator.integers(0, 1200))
        damaged[at] = int(generator.integers(0, 256))
        part = tmp_path / "part.gguf"
        part.write_bytes(damaged)
        try:
            from_gguf(GGUF(part).metadata)
        except ValueError as error:
            assert "\n" not in str(error)


def test_a_gguf_file_without_a_tensor_names_it(tmp_path: Path) -> None:
    oracle = oracle_of("LlamaConfig")
    del oracle.model.layers[1].mlp.down_proj
    write_gguf(tmp_path / "model.gguf", oracle)
    with pytest.raises(ValueError) as error:
        read_gguf(tmp_path / "model.gguf")
    one_sentence(error, "model.gguf", "model.layers.1.mlp.down_proj.weight")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "gpt2"}, ["gpt2", "docs/models.md"]),
        ({"hidden_size": None}, ["hidden_size"]),
        ({"num_key_value_heads": 3}, ["4 query heads", "3"]),
        ({"num_hidden_layers": 0}, ["layers"]),
        ({"hidden_act": "mish"}, ["mish", "silu"]),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}, ["spiral", "yarn"]),
    ],
)
def test_a_configuration_out_of_the_family_is_refused(
    values: Mapping[str, object], words: list[str], checkpoint: Path
) -> None:
    raw = json.loads((checkpoint / "config.json").read_text()) | values
    with pytest.raises(ValueError) as error:
        from_hf(raw)
    one_sentence(error, *words)


def test_numbers_of_q8_0_are_those_of_gguf() -> None:
    raw = quantize(np.random.default_rng(0).normal(size=(9, 96)).astype(np.float32), Kind.Q8_0)
    found = StoredMatrix("Q8_0", 96, torch.from_numpy(raw)).widen()
    assert found.numpy().tobytes() == dequantize(raw, Kind.Q8_0).tobytes() and found.shape == (9, 96)


def test_a_tensor_of_a_file_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    file = GGUF(resolve_reference("smollm2-135m"))
    weights = GGUFWeights(file, config := gguf_config(file))
    read, load_tensor = list[str](), GGUF.load_tensor

    def recorded(file: GGUF, name: str, *part: int | None) -> Any:
        read.append(name)
        return load_tensor(file, name, *part)

    monkeypatch.setattr(GGUF, "load_tensor", recorded)
    weights.require("model.norm.weight", config.hidden)
    with pytest.raises(ValueError, match="has shape"):
        weights.require("model.norm.weight", config.hidden + 1)
    assert read == ["output_norm.weight"] * 2
