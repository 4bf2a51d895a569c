"""`foretell inspect` and `foretell models`: what lies on this machine, told from headers alone."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from command import expect_error, run_foretell, tiny_target
from foretell.catalogue import find
from foretell.cli.description import describe
from foretell.model.load.reference import resolve_reference
from foretell.speculator.pairs import known_pairs, pairs_for

LAYERS, HIDDEN, FFN, VOCAB, MERGES = 32, 4096, 14336, 128_256, 280_147


def write_8b(path: Path) -> None:
    """The header of Llama 3.1 8B in Q4_K with a vocabulary of its size, and a hole in place of the tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Meta Llama 3.1 8B Instruct")
    for key, value in {
        "context_length": 131072,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "head_count": 32,
    }.items():
        getattr(writer, f"add_{key}")(value)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count_kv(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([f"token{i}" for i in range(VOCAB - 1)] + ["<|eot_id|>"])
    writer.add_token_types([1] * (VOCAB - 1) + [3])
    writer.add_token_merges([f"a{i} b{i}" for i in range(MERGES)])
    writer.add_eos_token_id(VOCAB - 1)
    writer.add_chat_template("{{ messages }}")
    kinds = gguf.GGMLQuantizationType

    def add(name: str, *shape: int, kind: gguf.GGMLQuantizationType = kinds.Q4_K) -> None:
        per_block, size = gguf.GGML_QUANT_SIZES[kind]
        rows = (*shape[:-1], shape[-1] // per_block * size)
        count = 1
        for each in rows:
            count *= each
        dtype = "uint8" if kind != kinds.F32 else "float32"
        writer.add_tensor_info(name, rows if dtype == "uint8" else shape, gguf_dtype(dtype), count, raw_dtype=kind)

    add("token_embd.weight", VOCAB, HIDDEN)
    add("output.weight", VOCAB, HIDDEN, kind=kinds.Q6_K)
    add("output_norm.weight", HIDDEN, kind=kinds.F32)
    for i in range(LAYERS):
        for name, rows, columns in (("attn_q", HIDDEN, HIDDEN), ("attn_k", 1024, HIDDEN), ("attn_v", 1024, HIDDEN)):
            add(f"blk.{i}.{name}.weight", rows, columns)
        add(f"blk.{i}.attn_output.weight", HIDDEN, HIDDEN)
        add(f"blk.{i}.ffn_gate.weight", FFN, HIDDEN)
        add(f"blk.{i}.ffn_up.weight", FFN, HIDDEN)
        add(f"blk.{i}.ffn_down.weight", HIDDEN, FFN, kind=kinds.Q6_K)
        add(f"blk.{i}.attn_norm.weight", HIDDEN, kind=kinds.F32)
        add(f"blk.{i}.ffn_norm.weight", HIDDEN, kind=kinds.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def gguf_dtype(name: str) -> object:
    import numpy as np

    return np.dtype(name)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read as Linux tells it")
def test_a_file_of_8_billion_is_described_without_its_weights(tmp_path: Path) -> None:
    path = tmp_path / "Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf"
    write_8b(path)
    matrices = LAYERS * (2 * HIDDEN * HIDDEN + 2 * 1024 * HIDDEN + 3 * FFN * HIDDEN) + 2 * VOCAB * HIDDEN
    os.truncate(path, 6 << 30)
    code = (
        "import resource, sys; from foretell.cli import main\n"
        "sys.argv = ['foretell', 'inspect', '--json', sys.argv[1]]\n"
        "try: main()\nexcept SystemExit: pass\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM:')).split()[1]\n"
        "print(peak, used.ru_utime + used.ru_stime, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    *record, used = result.stdout.splitlines()
    said, (kilobytes, seconds, with_torch) = json.loads("\n".join(record)), used.split()
    assert int(kilobytes) < 300_000 and float(seconds) < 2 and with_torch == "False", used
    assert said["runs"] and said["weights"] == matrices + (2 * LAYERS + 1) * HIDDEN
    assert said["config"]["layers"] == LAYERS and said["config"]["kv_heads"] == 8
    assert said["cache_bytes_per_token"] == 2 * LAYERS * 8 * 128 * 2
    assert said["ends"] == {str(VOCAB - 1): "<|eot_id|>"} and said["tokenizer"].endswith("128,256 tokens")
    assert [kind["kind"] for kind in said["kinds"]] == ["Q4_K", "Q6_K", "F32"] and said["unread"] == []
    assert {pair.kind for pair in pairs_for([said["name"]])} >= {"eagle3", "dflash"}


@pytest.mark.exhaustive
def test_sizes_are_those_of_the_gguf_package() -> None:
    path = resolve_reference("smollm2-135m")
    tensors, said = gguf.GGUFReader(path).tensors, describe(path)
    assert said.bytes == sum(tensor.n_bytes for tensor in tensors)
    assert said.weights == sum(tensor.n_elements for tensor in tensors)
    kinds = {kind.kind: kind.tensors for kind in said.kinds}
    assert kinds == {kind: sum(t.tensor_type.name == kind for t in tensors) for kind in kinds}
    record = json.loads(run_foretell("roofline", "analyze", path, "--json").stdout)
    matrices = sum(tensor.n_bytes for tensor in tensors if len(tensor.shape) > 1)
    assert record["memory"]["weights"] == pytest.approx(matrices, rel=2e-3)  # norms are counted with matrices there


def test_what_types_become_that_no_kernel_reads_is_said(tmp_path: Path) -> None:
    """The memory is that of the nearest type: 210 bytes for 256 numbers of Q6_K, 34 for 32 of Q8_0."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for name, kind in (("a", "IQ3_S"), ("b", "IQ2_S")):
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, np.zeros((8, gguf.GGML_QUANT_SIZES[number][1]), np.uint8), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    lines = run_foretell("inspect", tmp_path / "m.gguf").stdout
    assert "read as Q6_K (the same numbers)" in lines and "read as Q8_0 (a loss of 0.6 %)" in lines
    kinds = json.loads(run_foretell("inspect", tmp_path / "m.gguf", "--json").stdout)["kinds"]
    assert {kind["kind"]: kind["memory"] for kind in kinds} == {"IQ3_S": 8 * 210, "IQ2_S": 8 * 8 * 34}


def test_a_directory_is_described(tmp_path: Path) -> None:
    said = json.loads(run_foretell("inspect", tiny_target(), "--json").stdout)
    assert (said["architecture"], said["runs"], said["config"]["vocab"]) == ("llama", True, 257)
    assert said["ends"] == {"256": "<end>"} and [kind["kind"] for kind in said["kinds"]] == ["F32"]
    text = run_foretell("inspect", tiny_target()).stdout
    assert "runs:         on the own decoder" in text and "not read:     nothing is left out" in text
    assert "no such directory" in expect_error("inspect", tmp_path / "none")


def test_a_model_that_does_not_run_is_described_with_the_reason(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    said = json.loads(run_foretell("inspect", tmp_path / "m.gguf", "--json").stdout)
    assert not said["runs"] and "'bert'" in said["refusal"] and said["config"] is None


def test_the_models_of_this_machine_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / ".lmstudio/models/lmstudio-community/Qwen3-8B-GGUF"
    folder.mkdir(parents=True)
    (folder / "Qwen3-8B-Q4_K_M.gguf").write_bytes(resolve_reference("smollm2-135m").read_bytes())
    (folder / "Qwen3-8B-Q8_0.gguf").write_bytes(b"GGUF" + bytes(60))
    (folder / "Qwen3-8B-BF16.gguf.part").write_bytes(b"GGUF")
    rows = {row["reference"]: row for row in json.loads(run_foretell("models", "--json").stdout)}
    name = "lmstudio-community/Qwen3-8B-GGUF"
    assert set(rows) == {"smollm2-135m", f"{name}:Q4_K_M", f"{name}:Q8_0", str(folder / "Qwen3-8B-BF16.gguf.part")}
    fits = {pair["speculator"] for pair in rows[f"{name}:Q4_K_M"]["speculators"]}
    assert fits == {pair.speculator for pair in known_pairs() if pair.target == "Qwen/Qwen3-8B"} and len(fits) > 2
    assert rows["smollm2-135m"]["runs"] and not rows["smollm2-135m"]["speculators"]
    assert not rows[f"{name}:Q8_0"]["runs"] and "version 0" in rows[f"{name}:Q8_0"]["reason"]
    assert rows[str(folder / "Qwen3-8B-BF16.gguf.part")]["reason"] == "its download is not finished"
    text = run_foretell("models").stdout
    assert "--method eagle3 --draft-model RedHatAI/Qwen3-8B-speculator.eagle3 (licence: see its page)" in text


def test_the_table_of_pairs_has_its_form() -> None:
    pairs, hub_id = known_pairs(), re.compile(r"[\w.-]+/[\w.-]+")
    assert len({(pair.target, pair.speculator) for pair in pairs}) == len(pairs) > 20
    for pair in pairs:
        assert hub_id.fullmatch(pair.target) and hub_id.fullmatch(pair.speculator), pair
        assert find(pair.kind).name == pair.kind and {"drafts", "speculators"} & {*find(pair.kind).reads}, pair
        assert pair.source.startswith("https://") and pair.licence in ("", "apache-2.0", "mit", "llama3"), pair
    lines = run_foretell("models", "--speculators").stdout.splitlines()
    assert lines[::2] == [pair.target for pair in pairs]


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3-8B", "unsloth/Qwen3-8B-GGUF:Q4_K_M", "Qwen3-8B-UD-Q4_K_XL.gguf", "mlx-community/Qwen3-8B-4bit",
        "Qwen3 8B", "qwen3-8b-q8_0-00001-of-00002.gguf", "Qwen/Qwen3-8B-AWQ",
    ],
)  # fmt: skip
def test_a_model_is_known_under_the_names_of_its_files(name: str) -> None:
    assert {pair.target for pair in pairs_for([name])} == {"Qwen/Qwen3-8B"}


@pytest.mark.parametrize("name", ["Qwen/Qwen3-80B", "Qwen3-8B-Base", "qwen3", "", "Qwen3-VL-8B-Instruct"])
def test_another_model_has_no_speculator(name: str) -> None:
    assert pairs_for([name]) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["models"],
        ["methods"],
        *(
            pytest.param(a, marks=pytest.mark.exhaustive)
            for a in (["models", "--speculators"], ["methods", "pld"], ["methods", "--json"])
        ),
    ],
)
def test_models_and_methods_are_listed_without_torch(tmp_path: Path, arguments: list[str]) -> None:
    code = (
        "import sys; from foretell.cli import main\n"
        "sys.argv[0] = 'foretell'\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"HOME": str(tmp_path)}
    )
    assert len(result.stdout.splitlines()) > 1 and result.stdout.splitlines()[-1] == "False"
