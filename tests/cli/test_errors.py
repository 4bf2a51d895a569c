"""Every error on a command line becomes one sentence and a non-zero exit status."""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from command import ENVIRONMENT, TEMPLATE, expect_error, run_foretell, save_tiny_model, tiny_draft, tiny_target
from foretell.bench.peers.hf import load as load_peer
from foretell.cli import app


def generate(*arguments: str | Path, stdin: str | None = None, status: int = 1) -> str:
    return expect_error("generate", *arguments, stdin=stdin, status=status)


def generate_hello(*arguments: str | Path) -> str:
    return generate("hello", "--model", tiny_target(), *arguments)


def test_unknown_names_get_a_suggestion() -> None:
    assert "did you mean 'suffix'" in generate_hello("--method", "sufix")
    assert "did you mean 'smollm2-135m'" in generate("hello", "--model", "smolm2-135m")
    assert "did you mean 'bfloat16'" in generate_hello("--dtype", "bfloat61")
    assert "unknown device" in generate_hello("--device", "tpu")
    assert "Did you mean 'generate'" in expect_error("generat", "hello", status=2)
    assert "--max-new-token" in expect_error("generate", "--max-new-token", "3", status=2)
    assert "--bogus" in expect_error("--bogus", status=2)
    assert "did you mean 'suffix'" in expect_error("verify", "sufix", "--model", tiny_target())
    assert "did you mean 'suffix'" in expect_error("chat", "--method", "sufix", "--model", tiny_target())


def test_draft_models(tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", vocab=300)
    refused = generate_hello("--method", "draft_model", "--draft-model", other)
    assert "vocabulary has 300 tokens, the target's 257; use a draft model with the target's tokenizer" in refused
    assert "needs a draft model" in generate_hello("--method", "draft_model")
    for name in ("suffix", "layer_skip", "recycling"):
        unused = generate_hello("--method", name, "--draft-model", tiny_draft())
        assert f"would have no effect: {name} does not draft with it; leave it out" in unused
    document = Path(__file__)
    assert "the reference of" in generate_hello("--method", "recycling", "--reference", document)
    chat = expect_error("chat", "--method", "suffix", "--model", tiny_target(), "--draft-model", tiny_draft())
    assert "suffix does not draft with it" in chat
    assert "reference" in generate_hello("--method", "llma")
    assert "no-such-file" in generate_hello("--method", "llma", "--reference", tmp_path / "no-such-file")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in generate_hello("--method", "llma", "--reference", binary)


def test_prompts_that_cannot_be_answered() -> None:
    assert "the prompt has" in generate("x" * 600, "--model", tiny_target())
    assert "prompt is empty" in generate("", "--model", tiny_target())
    assert "prompt is empty" in generate("-", "--model", tiny_target(), stdin=" \n")
    assert "no prompt" in generate("--model", tiny_target())
    assert "leave out one" in generate_hello("--raw", "--system", "be brief")


def test_text_with_lone_surrogates_or_invalid_utf8() -> None:
    surrogate = "x\udcff"  # How Python decodes an argument with a byte that is not UTF-8.
    for arguments in ((surrogate,), (surrogate, "--raw"), ("hello", "--system", surrogate)):
        assert "U+DCFF, which is no character" in generate(*arguments, "--model", tiny_target())
    piped = CliRunner(env=ENVIRONMENT).invoke(app, ["generate", "-", "--model", str(tiny_target())], input=b"x\xff")
    assert piped.exit_code == 1 and piped.stderr == "foretell: the input is not UTF-8 text (byte 1); convert it first\n"


def test_a_template_that_exceeds_the_limits(tmp_path: Path) -> None:
    path = tmp_path / "hostile"
    shutil.copytree(tiny_target(), path)
    for template in ("{{ 'a' * 10**10 }}", "{% for i in range(10**12) %}{% endfor %}"):
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        assert "the chat template" in generate("hello", "--model", path)


def test_numbers_out_of_range() -> None:
    assert "at least 1, found -5" in generate_hello("--max-new-tokens", "-5")
    assert "--temperature must be" in generate_hello("--temperature", "nan")
    assert "temperature must be" in generate_hello("--temperature", "-1")
    assert "--top-p must be" in generate_hello("--top-p", "0")
    assert "--top-k must be" in generate_hello("--top-k", "-2")
    assert "at least 1" in generate("--prompts", __file__, "--rows", "0", "--model", tiny_target())
    assert "--max-new-tokens" in expect_error("generate", "hello", "--max-new-tokens", "many", status=2)
    assert "samples must be at least 1" in expect_error("verify", "suffix", "--model", tiny_target(), "--samples", "0")


def test_speculative_config() -> None:
    assert "sets num_steps and names no method" in generate_hello("--speculative-config", '{"num_steps": 3}')
    reads = "it reads: rejection_sample_method, num_draft_tokens"
    assert f"method specinfer does not read 'num_steps'; {reads}" in generate_hello(
        "--method", "specinfer", "--speculative-config", '{"num_steps": 3}'
    )
    assert "not valid JSON" in generate_hello("--speculative-config", "{method: ngram}")
    assert "a JSON object was expected" in generate_hello("--speculative-config", "[]")
    assert "did you mean 'num_speculative_tokens'" in generate_hello(
        "--method", "ngram", "--speculative-config", '{"num_speculativ_tokens": 3}'
    )
    assert "num_speculative_tokens" in generate_hello(
        "--method", "ngram", "--speculative-config", '{"num_speculative_tokens": -3}'
    )
    assert "give one of them" in generate_hello("--speculative-config", '{"method": "ngram"}', "--method", "suffix")
    assert "give one of them" in generate_hello("--speculative-config", '{"model": "a"}', "--draft-model", "b")


def test_damaged_checkpoints(tmp_path: Path) -> None:
    def broken(name: str, file: str, content: bytes) -> Path:
        path = tmp_path / name
        shutil.copytree(tiny_target(), path)
        (path / file).write_bytes(content)
        return path

    whole = (tiny_target() / "model.safetensors").read_bytes()
    for name, file, content, word in (
        ("truncated", "model.safetensors", whole[: len(whole) // 2], "model.safetensors"),
        ("garbage", "model.safetensors", b"garbage", "model.safetensors"),
        ("config", "config.json", b"{", "config.json"),
        ("lacking", "config.json", b'{"model_type": "llama"}', "hidden_size"),
        ("tokenizer", "tokenizer.json", b"{}", "tokenizer.json"),
        ("settings", "tokenizer_config.json", b"{", "tokenizer_config.json"),
        ("nested settings", "tokenizer_config.json", b"[" * 100_000, "tokenizer_config.json"),
        ("index", "model.safetensors.index.json", b"{", "model.safetensors.index.json"),
        ("map", "model.safetensors.index.json", b"{}", "model.safetensors.index.json"),
    ):
        assert word in generate("hello", "--model", broken(name, file, content)), name


def test_other_files_are_not_models(tmp_path: Path) -> None:
    pickle = tmp_path / "pickle"
    shutil.copytree(tiny_target(), pickle)
    (pickle / "model.safetensors").rename(pickle / "pytorch_model.bin")
    assert "unpickling can run code" in generate("hello", "--model", pickle)
    assert "unpickling can run code" in generate("hello", "--model", pickle / "pytorch_model.bin")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no config.json" in generate("hello", "--model", empty)
    for name, content in (
        ("short", b"GG"),
        ("other", b"x" * 100),
        ("cut", b"GGUF" + struct.pack("<IQQ", 3, 5, 5) + b"\x00" * 20),
    ):
        file = tmp_path / f"{name}.gguf"
        file.write_bytes(content)
        assert f"{name}.gguf" in generate("hello", "--model", file)


def test_bad_lines_are_named_and_good_ones_answered(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = (
        '{"prompt": "good"}', "{not json", "", '{"question": "no prompt"}', '{"prompt": "a", "temperatur": 1}',
        '{"prompt": "a", "top_p": 7}',
        '{"prompt": "a", "seed": "x"}', "17", '{"prompt": "' + "x" * 600 + '"}', '{"prompt": " "}', '{"turns": []}',
        '{"messages": [{"role": "boss", "content": "a"}]}', '{"prompt": "a", "turns": ["b"]}',
        "[" * 100_000, '{"prompt": "a\\ud800"}', '"also good"',
    )  # fmt: skip
    file.write_text("\n".join(lines) + "\n\xff\xfe\n", "latin-1")
    result = run_foretell("generate", "--prompts", file, "--model", tiny_target(), "--max-new-tokens", "3", "--json")
    assert result.exit_code == 1 and len(result.stdout.splitlines()) == 2
    complaints = result.stderr.splitlines()
    assert all(c.startswith("foretell: ") for c in complaints)
    assert sorted(int(c.split("line ")[1].split(":")[0]) for c in complaints) == [2, *range(4, 16), 17]
    assert "did you mean 'temperature'" in result.stderr and "not UTF-8" in result.stderr


def test_files_of_prompts(tmp_path: Path) -> None:
    assert "none.jsonl" in generate("--prompts", tmp_path / "none.jsonl", "--model", tiny_target())
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    assert "no prompt in it" in generate("--prompts", empty, "--model", tiny_target())
    assert "leave out one" in generate("hello", "--prompts", empty, "--model", tiny_target())
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{\n")
    assert "line 1" in expect_error("verify", "suffix", "--model", tiny_target(), "--prompts", bad)


REMOTE_CODE = """
from pathlib import Path
from transformers import GPT2Config, GPT2LMHeadModel
Path({marker!r}).touch()
class Config(GPT2Config):
    model_type = "strange"
class Model(GPT2LMHeadModel):
    config_class = Config
"""


@pytest.mark.parametrize("load", ["generate", "peer"])
def test_code_that_comes_with_a_model_is_never_run_and_never_asked_about(tmp_path: Path, load: str) -> None:
    marker = tmp_path / "code has run"
    path = save_tiny_model(tmp_path / "model")
    (path / "strange.py").write_text(REMOTE_CODE.format(marker=str(marker)))
    auto_map = {"AutoConfig": "strange.Config", "AutoModelForCausalLM": "strange.Model"}
    (path / "config.json").write_text(json.dumps({"model_type": "strange", "auto_map": auto_map}))
    if load == "generate":
        message = generate("-", "--model", path, stdin="y\n")
    else:
        with pytest.raises(ValueError, match="code") as error:
            load_peer(str(path), torch.float32)
        message = str(error.value)
    assert "never runs code from a checkpoint" in message
    assert not marker.exists()


def test_a_template_that_refuses(tmp_path: Path) -> None:
    path = tmp_path / "strict"
    shutil.copytree(tiny_target(), path)
    (path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ raise_exception('no system here') }}" + TEMPLATE})
    )
    assert "no system here" in generate("hello", "--model", path)


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-c", "from foretell.cli import main; main()", *map(str, arguments)]


def environment() -> dict[str, str]:
    return {**os.environ, **ENVIRONMENT, "PYTHONWARNINGS": "default"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_no_space_for_the_output() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command("help", "sampling"), stdout=full, stderr=subprocess.PIPE, text=True, env=environment(), check=False
        )
    assert done.returncode == 1
    assert done.stderr.startswith("foretell: no space left") and len(done.stderr.splitlines()) == 1


def test_outputs_that_are_missing_or_of_unknown_width() -> None:
    shut = subprocess.run(["sh", "-c", '"$@" >&- 2>&-', "sh", *command("help", "sampling")], env=environment())
    assert shut.returncode == 0
    shown = [
        subprocess.run(
            command("--help"), env=environment() | {"COLUMNS": width}, capture_output=True, check=True
        ).stdout
        for width in ("0", "")
    ]
    assert shown[0] == shown[1] and b"generate" in shown[0]


def test_an_encoding_that_cannot_write_the_output() -> None:
    ascii_only = environment() | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(command("--lang", "zh"), env=ascii_only, capture_output=True, text=True)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "foretell: the output is in ascii, which cannot write '\\u" in done.stderr and done.stderr.isascii()


def test_a_closed_output() -> None:
    arguments = ("generate", "hello", "--model", tiny_target(), "--max-new-tokens", "400")
    with subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        message = process.stderr.read().decode().splitlines()
    assert process.returncode == 1 and message == [
        "foretell: the reader of the output has closed it; the rest was not written"
    ]


@pytest.mark.exhaustive
def test_ctrl_c_in_a_separate_process() -> None:
    arguments = (
        "generate",
        "hello",
        "--model",
        tiny_target(),
        "--draft-model",
        tiny_draft(),
        "--max-new-tokens",
        "450",
    )
    with subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, message = process.stdout.read().decode(errors="replace"), process.stderr.read().decode()
    assert process.returncode == 130, message
    assert first and rest.endswith("\n") and "foretell: interrupted" in message and "Traceback" not in message


def test_help_imports_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "from foretell.cli import main; main()", "--help"],
        capture_output=True, text=True, env=environment(), check=True,
    )  # fmt: skip
    # "import time:  self [us] | cumulative | imported package": what another module imports is indented.
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "generate" in done.stdout and "foretell.cli.app" in imported
    heavy = {"torch", "numpy", "scipy", "pydantic", "transformers", "tokenizers"}
    assert not {name for name in imported if name.split(".")[0] in heavy or name == "foretell.engine.engine"}
