"""Other runtimes with the same weights say the same greedy words."""

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from bench_helpers import bench, model, target

from foretell.bench.competitor import GenerationSettings, MethodCompetitor, MethodSpec
from foretell.bench.peers import hf, isolated
from foretell.bench.peers.export import as_directory, export
from foretell.bench.peers.registry import PeerSettings, expand_names, load_peers, require_installed
from foretell.bench.questions import Question
from foretell.model.load.gguf import GGUF
from foretell.model.load.reference import resolve_reference

PROMPT = "abcabcabc"
transformers = pytest.importorskip("transformers")


def test_names_are_expanded() -> None:
    assert expand_names(["transformers"], "int8", False) == [
        "transformers-plain/bfloat16",
        "transformers-lookup/bfloat16",
    ]
    assert expand_names(["transformers"], "float32", True)[-1] == "transformers-assisted/float32"
    assert expand_names(["llama.cpp"], "int8", False)[0] == "llama.cpp-plain/bf16"
    assert expand_names(["llama.cpp-lookup"], "int8", False) == ["llama.cpp-lookup/bf16"]


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """A file with one matrix, one embedding and one norm, whatever model that may be."""
    random = np.random.default_rng(0)
    tensors = {
        "token_embd.weight": random.normal(size=(8, 64)).astype(np.float32),
        "blk.0.attn_q.weight": random.normal(size=(32, 64)).astype(np.float32),
        "output_norm.weight": random.normal(size=64).astype(np.float32),
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_token_list(["a", "b"])
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.mark.parametrize(
    ("precision", "kinds"), [("bf16", ("BF16", "BF16")), ("q8_0", ("Q8_0", "Q8_0")), ("q4_0", ("Q8_0", "Q4_0"))]
)
def test_weights_are_exported_for_llama_cpp(tmp_path: Path, precision: str, kinds: tuple[str, str]) -> None:
    tensors = write_gguf(tmp_path / "m.gguf")
    path = export(str(tmp_path / "m.gguf"), precision, tmp_path / "cache")
    assert export(str(tmp_path / "m.gguf"), precision, tmp_path / "cache") == path
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [path.name]
    file = GGUF(path)
    assert file.metadata["general.architecture"] == "llama" and file.metadata["tokenizer.ggml.tokens"] == ["a", "b"]
    names = ("token_embd.weight", "blk.0.attn_q.weight", "output_norm.weight")
    assert tuple(gguf.GGMLQuantizationType(file.tensors[n].ggml_type).name for n in names) == (*kinds, "F32")
    for name, values in tensors.items():
        assert np.abs(file.load_tensor(name).numpy() - values).max() <= np.abs(values).max() / 7


@pytest.mark.exhaustive
def test_a_gguf_file_becomes_a_directory_that_transformers_reads(tmp_path: Path) -> None:
    path = as_directory("smollm2-135m", tmp_path)
    assert as_directory("smollm2-135m", tmp_path) == path == as_directory(str(path), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    prompt = torch.tensor([[504, 3575, 282, 4649, 314, 7042, 28, 284, 260, 3575, 282, 4649, 314]])
    written = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        theirs = hf.load("smollm2-135m", torch.bfloat16).float()(prompt).logits
        assert torch.allclose(written(prompt).logits, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["onnxruntime-plain/int4", "vllm-lookup/bfloat16"])
def test_installed_peers_that_read_directories_say_what_transformers_says(name: str, tmp_path: Path) -> None:
    """Their environments take gigabytes, so where they are not installed nothing is asked."""
    try:
        require_installed([name])
    except ValueError as error:
        pytest.skip(str(error))
    counting = [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28, 216, 38, 28]
    settings = PeerSettings("smollm2-135m", None, "auto", 256, 1, tmp_path)
    answer = load_peers([name], settings)[name].generate(counting, 6)
    theirs = hf.TransformersPeer(hf.load("smollm2-135m", torch.float32)).generate(counting, 6)
    assert answer.tokens == theirs.tokens and sum(answer.counts) == 6
    assert list(answer.seconds) == sorted(answer.seconds)


def test_a_directory_cannot_be_exported() -> None:
    with pytest.raises(ValueError, match="reads GGUF files"):
        export(str(target()), "bf16", Path("nowhere"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["lookup", pytest.param("plain", marks=pytest.mark.exhaustive)])
def test_transformers_answers_as_we_do(mode: str) -> None:
    peer = hf.TransformersPeer(hf.load(str(target()), torch.float32), mode)  # type: ignore[arg-type]
    (plain,) = MethodCompetitor(model(), MethodSpec.parse("autoregressive"), GenerationSettings(12)).answer(
        Question("q", "c", (PROMPT,)), None
    )
    prompt = model().tokens(PROMPT)
    found = peer.generate(prompt, 12)
    assert found.tokens[: len(plain.tokens)] == plain.tokens
    assert len(found.tokens) == sum(found.counts) == 12 and list(found.seconds) == sorted(found.seconds)


@pytest.mark.filterwarnings("ignore")
def test_transformers_takes_part_in_a_run_and_in_the_steps(tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text(PROMPT)
    fixed = ["--model", target(), "--dtype", "float32", "--peers", "transformers"]
    run = bench(
        "run",
        *fixed,
        "--tasks",
        tmp_path / "q.txt",
        "--out",
        tmp_path / "o",
        "--max-new-tokens",
        6,
        "--repeats",
        1,
        "--methods",
        "ngram",
        "--no-memory",
    )
    assert run.exit_code == 0, run.output
    assert "| transformers-lookup/float32 |" in (tmp_path / "o" / "report.md").read_text()
    step = bench("step", *fixed, "--tokens", 1, "--context", 8, "--repeats", 1, "--no-engine")
    assert step.exit_code == 0 and "transformers eager float32" in step.stdout


def test_peers_of_environments_are_named_and_their_installation_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert expand_names(["openvino"], "int8", True) == [f"openvino-{m}/file" for m in ("plain", "lookup", "draft")]
    assert expand_names(["onnxruntime"], "int8", True) == ["onnxruntime-plain/int4"]
    assert expand_names(["vllm"], "int8", False) == ["vllm-plain/bfloat16", "vllm-lookup/bfloat16"]
    with pytest.raises(ValueError, match="foretell bench peers install xllamacpp"):
        require_installed(["xllamacpp-ngram-mod/file"])
    with pytest.raises(ValueError, match="unknown peer 'openvin'"):
        isolated.install("openvin")


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment of xllamacpp that is the tests' own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = isolated.python_of("xllamacpp")
    place.parent.mkdir(parents=True)
    place.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    place.chmod(0o755)


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("mode", ["plain", pytest.param("lookup", marks=pytest.mark.exhaustive)])
def test_llama_cpp_in_a_process_of_its_own_says_what_transformers_says(mode: str) -> None:
    pytest.importorskip("xllamacpp")
    model = resolve_reference("smollm2-135m")
    peer = isolated.IsolatedPeer(f"xllamacpp-{mode}/file", model, None, 256, 1)
    prompt = [504, 3575, 282, 4649, 314, 7042, 28, 284, 260, 3575, 282, 4649, 314]
    answer = peer.generate(prompt, 8)
    theirs = hf.TransformersPeer(hf.load("smollm2-135m", torch.float32)).generate(prompt, 8)
    assert answer.tokens == theirs.tokens
    assert sum(answer.counts) == 8 and list(answer.seconds) == sorted(answer.seconds)
    assert peer.generate(prompt, 8).tokens == answer.tokens


@pytest.mark.usefixtures("environment")
def test_a_model_that_a_peer_cannot_load_is_an_error_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="xllamacpp-plain/file failed: "):
        isolated.IsolatedPeer("xllamacpp-plain/file", tmp_path / "none.gguf", None, 64, 1)
