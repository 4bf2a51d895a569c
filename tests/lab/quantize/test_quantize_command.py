"""`foretell quantize` from end to end, on a small random model."""

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from command import expect_error, run_foretell, save_tiny_model
from foretell.lab.quantize.calibration import split_text, text_documents
from foretell.lab.quantize.evaluate import compare
from foretell.lab.quantize.gguf_metadata import pre_tokenizer_name
from foretell.load import load, open_checkpoint
from foretell.model.load.gguf import GGUF
from foretell.tokenizer.pre_tokenizers import PRE_TOKENIZERS, split_by
from helpers import LLAMA3, chain_tree, random_tokens


def save_model(path: Path) -> Path:
    """A small model whose matrices are whole blocks and whose tokenizer has a merge."""
    save_tiny_model(path, vocab=258, hidden=64, ffn=96)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    letters = {k: i for k, i in tokenizer["model"]["vocab"].items() if i < 256}
    tokenizer["model"] |= {"merges": [["a", "b"]], "vocab": letters | {"<end>": 256, "ab": 257}}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


@cache
def model() -> Path:
    return save_model(Path(mkdtemp()) / "model")


@cache
def text() -> Path:
    path = Path(mkdtemp()) / "text.jsonl"
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("abcdefgh"), 5)) for _ in range(40)]
    path.write_text("\n".join(json.dumps({"text": " ".join(random.choice(words, 80))}) for _ in range(12)))
    return path


def quantize(out: Path, *more: str, source: Path | None = None) -> dict[str, object]:
    arguments: list[str | Path] = ["quantize", source or model(), "--out", out, "--text", text(), "--json", *more]
    result = run_foretell(*arguments, "--calibration-tokens", "1024", "--held-back-tokens", "512")
    assert result.exit_code == 0, (result.output, result.exception)
    found: dict[str, object] = json.loads(result.stdout)
    assert not [p for p in out.parent.iterdir() if p.name.startswith(".")]
    return found


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq", "hqq"])
def test_a_gguf_file_is_written_and_loads(method: str, tmp_path: Path) -> None:
    out = tmp_path / "model.gguf"
    found = quantize(out, "--method", method)
    assert found["bytes"] == out.stat().st_size and found["notes"] == []
    assert 0 < float(str(found["kl"])) < 0.5 and float(str(found["same_top"])) > 0.5
    kinds = {name: entry.ggml_type for name, entry in GGUF(out).tensors.items()}
    assert kinds["blk.0.attn_q.weight"] == 2 and kinds["token_embd.weight"] == 8 and kinds["blk.1.ffn_norm.weight"] == 0
    old, new = load(str(model()), "float32"), load(str(out), "float32")
    assert new.tokens("Hello") == old.tokens("Hello") and new.eos == old.eos
    tree = chain_tree(random_tokens(20, 257))
    p, q = (m.runner().forward([0], tree).logits.softmax(-1) for m in (old, new))
    assert float((p - q).abs().sum(-1).mean()) < 0.8


@pytest.mark.parametrize(("kind", "group"), [("Q4_0", "32"), ("Q4_1", "32"), ("Q8_0", "16")])
def test_a_directory_is_written_and_holds_the_numbers_that_it_reports(kind: str, group: str, tmp_path: Path) -> None:
    found = quantize(tmp_path / "out", "--type", kind, "--group-size", group, "--method", "gptq")
    _, weights, read_codec, _ = open_checkpoint(tmp_path / "out")
    codec = read_codec()
    assert weights.matrix("model.layers.0.mlp.down_proj.weight", 64, 96).kind == (
        {"Q4_0": "Q4_0", "Q4_1": "Q4_Z"}.get(kind, "F32")
    )
    assert codec.encode("text") == load(str(model())).codec.encode("text")
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] == int(group)
    assert float(str(found["kl"])) < (0.01 if kind == "Q8_0" else 0.5)


def test_a_gguf_file_is_requantised_with_its_metadata_and_without_loss_where_it_can(tmp_path: Path) -> None:
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    quantize(first, "--method", "rtn", "--type", "Q8_0")
    found = quantize(second, "--method", "rtn", "--type", "Q8_0", source=first)
    assert float(str(found["kl"])) < 1e-4
    old, new = GGUF(first), GGUF(second)
    assert old.metadata == new.metadata and list(old.tensors) == list(new.tensors)
    quantize(tmp_path / "dir", "--method", "rtn", "--group-size", "32", source=first)
    assert load(str(tmp_path / "dir"), "float32").tokens("Hi") == load(str(first), "float32").tokens("Hi")


def test_rows_that_a_k_quant_cannot_hold_have_another_type(tmp_path: Path) -> None:
    found = quantize(tmp_path / "m.gguf", "--type", "Q4_K", "--method", "rtn")
    assert len(found["notes"]) == 4 and "qkv: Q5_0" in str(found["notes"])  # type: ignore[arg-type]


def test_a_model_is_equal_to_itself() -> None:
    config, weights, _, _ = open_checkpoint(model())
    found = compare((config, weights), (config, weights), torch.randint(0, 257, (2, 40)))
    assert (found.tokens, found.same_top) == (78, 1.0) and found.kl < 1e-6
    assert found.perplexity == found.quantized_perplexity


def test_a_dtype_is_compared_with_the_exact_model() -> None:
    options = ("--text", text(), "--tokens", "300", "--length", "64")
    result = run_foretell("evaluate", "--model", model(), "--dtype", "float32,int8", *options, "--json")
    same, rounded = json.loads(result.stdout)
    assert (same["kl"], same["same_top"], same["tokens"]) == (0, 1, 4 * 63)
    assert 0 < rounded["kl"] < 0.1 and rounded["dtype"] == "int8"
    opened, exact = open_checkpoint(model()), load(str(model()), "float32")
    tokens = split_text(text_documents([text()], exact.codec, 64), 0, 300, 64, "").held_back
    by_blocks = compare(opened[:2], opened[:2], tokens).perplexity
    assert (
        same["perplexity"] == pytest.approx(by_blocks, rel=1e-4) and same["quantized_perplexity"] == same["perplexity"]
    )
    assert (
        "float32) beside float32" in run_foretell("evaluate", "--model", model(), "--dtype", "float32", *options).stdout
    )


def test_an_existing_output_is_kept_until_the_new_one_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize(out, "--method", "rtn", "--group-size", "32")
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    arguments = ("quantize", model(), "--out", out, "--text", text(), "--method", "rtn", "--group-size", "32")
    assert "exists already; name another output, or replace it with --force" in expect_error(*arguments)
    assert "40,000" in expect_error(*arguments, "--force", "--held-back-tokens", "512", "--method", "gptq",
                                    "--calibration-tokens", "39488")  # fmt: skip
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    quantize(out, "--method", "rtn", "--group-size", "16", "--force")
    assert {p.name for p in out.iterdir()} == set(before) and (out / "config.json").read_bytes() != before[
        "config.json"
    ]


@pytest.mark.parametrize("command", [("quantize",), ("compress", "--sparsity", "0.5")])
@pytest.mark.parametrize("option", ["--held-back-tokens", "--calibration-tokens"])
def test_too_few_tokens_are_refused_before_any_text_is_written(
    command: tuple[str, ...], option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*arguments: object) -> None:
        pytest.fail("text was written")

    monkeypatch.setattr("foretell.lab.cli.quantize.generated_documents", write)
    said = expect_error(*command, model(), "--out", tmp_path / "out", option, "100")
    assert f"{option}: texts are read in sequences of" in said and "found 100" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--method", "gtpq"], "did you mean 'gptq'"),
        (["--type", "Q4_2"], "unknown type 'Q4_2'"),
        (["--method", "rtn", "--act-order"], "--act-order and --no-act-order are for --method gptq, found rtn"),
        (["--group-size", "64"], "the groups of GGUF types are fixed"),
        (["--out", "DIR", "--type", "Q5_1"], "a directory holds Q4_0, Q4_1, Q8_0"),
        (["--out", "DIR", "--group-size", "128"], "--group-size 128 does not divide the 64 inputs of qkv"),
        (["--out", "DIR", "--group-size", "40"], "take 32 or 16 or 8"),
        (["--out", "none/m.gguf"], "no such directory"),
        (["--text", "none.txt"], "none.txt"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], said: str, tmp_path: Path) -> None:
    given = [str(tmp_path / a) if a in ("DIR", "none/m.gguf", "none.txt") else a for a in arguments]
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "m.gguf")]
    assert said in expect_error("quantize", model(), *out, *given)
    assert not list(tmp_path.iterdir())


def test_the_default_group_of_a_directory_divides_the_inputs(tmp_path: Path) -> None:
    out = tmp_path / "small"
    done = run_foretell(
        "quantize", model(), "--method", "rtn", "--text", text(), "--out", out, "--held-back-tokens", "512"
    )
    assert done.exit_code == 0, done.output
    written = json.loads((out / "config.json").read_text("utf-8"))["quantization_config"]
    assert written["config_groups"]["group_0"]["weights"]["group_size"] == 32


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    narrow = save_tiny_model(tmp_path / "narrow")
    said = expect_error("quantize", narrow, "--out", tmp_path / "m.gguf")
    assert "the 16 inputs of qkv are no whole blocks of 32, as Q4_0 needs" in said


def test_a_folder_without_a_model_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("dear diary")
    said = expect_error("quantize", model(), "--out", tmp_path / "mine", "--force")
    assert "no model is in this directory" in said and (tmp_path / "mine" / "diary.txt").is_file()


def test_text_of_the_model_needs_a_chat_template(tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(model(), base)
    (base / "tokenizer_config.json").write_text("{}")
    assert "writes no text to calibrate on; give --text" in expect_error("quantize", base, "--out", tmp_path / "m.gguf")


@pytest.mark.parametrize("kind", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
def test_pre_tokenizers_are_known_by_llama_cpp_names(kind: str) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = {
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel()]),
        "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    }.get(kind) or split_by(PRE_TOKENIZERS[kind])
    assert pre_tokenizer_name(json.loads(tokenizer.to_str()), "m") == kind
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\p{N}|\w+"), "isolated")
    with pytest.raises(ValueError, match="has no name for its pre-tokenizer"):
        pre_tokenizer_name(json.loads(tokenizer.to_str()), "m")


def test_llama3_scaling_becomes_divisors(tmp_path: Path) -> None:
    scaled = save_model(tmp_path / "scaled")
    raw = json.loads((scaled / "config.json").read_text()) | {"rope_parameters": dict(LLAMA3)}
    (scaled / "config.json").write_text(json.dumps(raw))
    found = quantize(tmp_path / "m.gguf", "--type", "Q8_0", "--method", "rtn", source=scaled)
    assert "rope_freqs.weight" in GGUF(tmp_path / "m.gguf").tensors and float(str(found["kl"])) < 0.01


def test_an_architecture_with_other_tensors_is_refused(tmp_path: Path) -> None:
    other = save_model(tmp_path / "other")
    raw = json.loads((other / "config.json").read_text()) | {"model_type": "mixtral", "num_local_experts": 2}
    (other / "config.json").write_text(json.dumps(raw))
    tensors = {k: v for k, v in load_file(other / "model.safetensors").items() if ".mlp." not in k}
    save_file(tensors, other / "model.safetensors")
    assert "mixtral with experts cannot be quantised yet" in expect_error(
        "quantize", other, "--out", tmp_path / "m.gguf"
    )


def test_a_part_that_is_held_back_is_a_sequence_at_least_and_too_little_text_is_said() -> None:
    documents = [[1] * 30] * 6
    found = split_text(documents, 0, 10, 64, "text")
    assert found.calibration.numel() == 0 and found.held_back.shape == (1, 64)
    with pytest.raises(ValueError, match=r"^text: 180 tokens of text were found, and 364 are needed; give more text"):
        split_text(documents, 300, 10, 64, "text")
    with pytest.raises(ValueError, match=r"documents that leave 60 beside those of calibration, and 164 are needed"):
        split_text([[1] * 120, [1] * 60], 100, 10, 64, "text")
