"""`foretell generate` and `methods`: what they print."""

import gc
import io
import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from command import expect_error, run_foretell, save_tiny_model, tiny_draft, tiny_target
from foretell.catalogue import catalogue
from foretell.cli import comparison
from foretell.cli.show import DraftHighlighter
from foretell.engine.engine import Engine
from foretell.engine.request import Update
from foretell.load import load
from foretell.tokenizer.stream import Detokenizer

KEYS = [
    "text", "tokens", "prompt_tokens", "new_tokens", "method", "drafter", "lossless", "exact", "backend",
    "target_passes", "tokens_per_pass", "accepted_per_position", "prefill_seconds", "decode_seconds", "draft_seconds",
    "verify_seconds", "tokens_per_second", "finish_reason",
]  # fmt: skip


def records(*arguments: str | Path, stdin: str | None = None, status: int = 0) -> list[dict[str, object]]:
    result = run_foretell("generate", *arguments, "--model", tiny_target(), "--dtype", "float32", "--json", stdin=stdin)
    assert result.exit_code == status, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_an_answer_of_one_token_has_no_rate() -> None:
    arguments = ("generate", "hello", "--model", tiny_target(), "--dtype", "float32", "--max-new-tokens")
    assert "tokens/s" in run_foretell(*arguments, "9").output
    one = run_foretell(*arguments, "1").output
    assert "tokens/s" not in one and "1.00 tokens per pass" in one


@pytest.mark.exhaustive
def test_an_answer_of_a_gguf_file_imports_nothing_heavy_beside_torch() -> None:
    code = (
        "import sys; from foretell.cli import main\n"
        "sys.argv = ['foretell', 'generate', 'hi', '--max-new-tokens', '1', '--model', 'smollm2-135m']\n"
        "try: main()\nexcept SystemExit as end: assert not end.code\n"
        "assert not {'transformers', 'scipy', 'huggingface_hub', 'llguidance', 'PIL'} & {*sys.modules}, sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout, run.stderr


def test_the_garbage_collector_passes_over_what_was_loaded() -> None:
    gc.unfreeze()
    try:
        records("hello", "--max-new-tokens", "1")
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def prompts(path: Path, *lines: object) -> Path:
    file = path / "prompts.jsonl"
    file.write_text("".join(json.dumps(x) + "\n" for x in lines))
    return file


def test_json_has_exactly_the_keys() -> None:
    (record,) = records("hello", "--max-new-tokens", "9")
    assert list(record) == KEYS
    assert record["new_tokens"] == 9 and record["method"] == "auto" and record["lossless"] is True
    assert record["drafter"] == "longest suffix match, and successors from earlier passes"
    assert isinstance(record["tokens"], list) and len(record["tokens"]) == 9
    (record,) = records("hello", "--max-new-tokens", "3", "--logprobs")
    assert list(record) == [*KEYS, "logprobs"]


def test_text_and_closing_line() -> None:
    wanted = records("hello", "--max-new-tokens", "20")[0]["text"]
    for extra in ([], ["--no-stream"]):
        result = run_foretell(
            "generate", "hello", "--model", tiny_target(), "--dtype", "float32", "--max-new-tokens", "20", *extra
        )
        assert result.exit_code == 0 and result.stdout == f"{wanted}\n"
        assert "tokens per pass · auto · lossless" in result.stderr


def test_methods_give_the_same_text(tmp_path: Path) -> None:
    wanted = records("abcabcabc", "--max-new-tokens", "24")[0]["tokens"]
    reference = tmp_path / "notes.txt"
    reference.write_text("some text to copy from")
    for name, *extra in (
        ("suffix",),
        ("layer_skip",),
        ("llma", "--reference", str(reference)),
        ("draft_model", "--draft-model", str(tiny_draft())),
        ("specinfer", "--draft-model", str(tiny_draft()), "--draft-model", str(tiny_draft())),
    ):
        (record,) = records("abcabcabc", "--max-new-tokens", "24", "--method", name, *extra)
        assert record["tokens"] == wanted and record["method"] == name


def test_config_names_method_and_draft_model() -> None:
    config = {"method": "draft_model", "model": str(tiny_draft()), "num_speculative_tokens": 2}
    (record,) = records("hello", "--max-new-tokens", "8", "--speculative-config", json.dumps(config))
    assert record["method"] == "draft_model"
    (record,) = records(
        "hello", "--max-new-tokens", "8", "--speculative-config", '{"method": "ngram"}', "--method", "pld"
    )
    assert record["method"] == "ngram"


def test_a_draft_model_may_be_for_the_method_of_a_line(tmp_path: Path) -> None:
    named = ("--method", "suffix", "--draft-model", tiny_draft(), "--max-new-tokens", "4", "--prompts")
    found = records(*named, prompts(tmp_path, "hello", {"prompt": "hello", "method": "draft_model"}))
    assert [r["method"] for r in found] == ["suffix", "draft_model"]
    assert not records(*named, prompts(tmp_path, "hello", {"prompt": "hello", "method": "ngram"}), status=1)


def test_a_lossy_method_is_labelled() -> None:
    result = run_foretell(
        "generate",
        "hello",
        "--model",
        tiny_target(),
        "--draft-model",
        tiny_draft(),
        "--method",
        "typical_lossy",
        "--max-new-tokens",
        "5",
    )
    assert result.exit_code == 0 and "LOSSY" in result.stderr


def test_prompt_from_standard_input_and_system_message() -> None:
    (piped,), (given,) = records("-", "--max-new-tokens", "5", stdin="hello"), records("hello", "--max-new-tokens", "5")
    assert piped["text"] == given["text"]
    (other,) = records("hello", "--max-new-tokens", "5", "--system", "be brief")
    assert isinstance(other["prompt_tokens"], int) and isinstance(given["prompt_tokens"], int)
    assert other["prompt_tokens"] == given["prompt_tokens"] + len("s:be brief\n")


def test_special_tokens_in_messages_are_text_unless_allowed(tmp_path: Path) -> None:
    text = "a<end>b"
    (plain,), (allowed,), (raw,) = (
        records(text, "--max-new-tokens", "1", *more) for more in ((), ("--allow-special-tokens",), ("--raw",))
    )
    assert plain["prompt_tokens"] == len(f"u:{text}\na:")
    assert allowed["prompt_tokens"] == len("u:a<end>b\na:") - len("<end>") + 1
    assert raw["prompt_tokens"] == 3
    (listed,) = records("--prompts", prompts(tmp_path, text), "--max-new-tokens", "1", "--allow-special-tokens")
    assert listed["prompt_tokens"] == allowed["prompt_tokens"]


def test_batch_answers_as_alone_and_in_order(tmp_path: Path) -> None:
    long, short = "tell me everything about it", "hi"
    file = prompts(
        tmp_path, {"prompt": long}, short, {"messages": [{"role": "user", "content": short}], "max_new_tokens": 3},
        {"prompt": short, "temperature": 0.9, "seed": 7, "stop": "zz", "question_id": 3},
    )  # fmt: skip
    together = records("--prompts", file, "--max-new-tokens", "12", "--rows", "2")
    alone = [
        *records(long, "--max-new-tokens", "12"),
        *records(short, "--max-new-tokens", "12"),
        *records(short, "--max-new-tokens", "3"),
        *records(short, "--max-new-tokens", "12", "--temperature", "0.9", "--seed", "7", "--stop", "zz"),
    ]
    assert [r["tokens"] for r in together] == [r["tokens"] for r in alone]


def test_lines_name_methods_and_limits_of_their_own(tmp_path: Path) -> None:
    text = "abcabcabc"
    file = prompts(
        tmp_path, text, {"prompt": text, "method": "pld"}, {"prompt": text, "method": "layer_skip", "max_drafts": 1},
        {"prompt": text, "max_drafts": 0, "priority": -1}, {"prompt": text, "method": "draft_model"},
    )  # fmt: skip
    config = '{"method": "suffix", "num_speculative_tokens": 3}'
    found = records("--prompts", file, "--max-new-tokens", "16", "--speculative-config", config, status=1)
    assert [r["method"] for r in found] == ["suffix", "ngram", "layer_skip", "suffix"]
    assert all(r["tokens"] == found[0]["tokens"] for r in found)
    assert found[3]["target_passes"] == 16
    file = prompts(tmp_path, {"prompt": text, "method": "sufix"}, {"prompt": text, "max_drafts": -1})
    result = run_foretell("generate", "--prompts", file, "--model", tiny_target())
    assert result.exit_code == 1 and "line 1" in result.stderr and "suffix" in result.stderr
    assert "line 2" in result.stderr and "max_drafts" in result.stderr


def test_turns_follow_the_earlier_answers(tmp_path: Path) -> None:
    file = prompts(tmp_path, {"turns": ["one", "two"]}, {"prompt": "three"})
    first, second, third = records("--prompts", file, "--max-new-tokens", "6")
    text = f"u:one\na:{first['text']}\nu:two\na:"
    assert second["prompt_tokens"] == len(text.encode())
    assert third["prompt_tokens"] == len("u:three\na:")


def test_batch_as_text_names_the_lines(tmp_path: Path) -> None:
    result = run_foretell(
        "generate", "--prompts", prompts(tmp_path, "hi", "ho"), "--model", tiny_target(), "--max-new-tokens", "4"
    )
    assert result.exit_code == 0
    assert result.stdout.index("── 1 ── hi") < result.stdout.index("── 2 ── ho")
    assert "2 answers" in result.stderr


def test_ctrl_c_keeps_and_prints_what_was_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = Engine.step, list[int]()

    def press(self: Engine) -> list[Update]:
        calls.append(0)
        if len(calls) == 5:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    whole = records("hello", "--max-new-tokens", "40")[0]["tokens"]
    monkeypatch.setattr(Engine, "step", press)
    (record,) = records("hello", "--max-new-tokens", "40", status=130)
    assert record["finish_reason"] == "cancelled"
    assert isinstance(whole, list) and record["tokens"] == whole[:5]


def test_colour_never_changes_the_text() -> None:
    codec = load(str(tiny_target())).codec
    text = "naïve 你好 🙂 end"
    tokens = codec.encode(text)
    highlighter, engine = DraftHighlighter(codec.detokenizer()), Detokenizer(codec.decode)
    shown, drafted, at = "", "", 0
    for size, accepted in ((3, 2), (1, 0), (4, 4), (2, 1), (5, 3), (100, 99)):
        part = tuple(tokens[at : at + size])
        at += size
        whole = engine.push(part) + (engine.finish() if at >= len(tokens) else "")
        for piece, mark in highlighter.segments(Update(1, part, whole, min(accepted, len(part)))):
            shown += piece
            drafted += piece if mark else "·" * len(piece)
    assert shown == text and len(drafted) == len(text)
    assert drafted.startswith("na·")


def test_methods_shows_the_whole_catalogue() -> None:
    entries = catalogue()
    found = json.loads(run_foretell("methods", "--json").stdout)
    assert [e["name"] for e in found] == list(entries)
    assert set(found[0]) >= {"name", "family", "draft", "tree", "accept", "lossless", "same_seed", "needs", "training"}
    table = run_foretell("methods").stdout
    assert all(name in table for name in entries)
    lines = run_foretell("methods", "--markdown").stdout.strip().splitlines()
    assert len(lines) == len(entries) + 2 and len({line.count("|") for line in lines}) == 1


def test_methods_explains_one_method() -> None:
    entry = catalogue()["eagle3"]
    shown = " ".join(run_foretell("methods", "eagle3").stdout.split())
    for fact in (
        entry.description,
        entry.when_to_use,
        "arXiv 2503.01840",
        "num_draft_tokens = 12",
        "eagle_topk = unset",
    ):
        assert fact in shown
    found = json.loads(run_foretell("methods", "eagle3", "--json").stdout)
    assert found["papers"][0]["arxiv"] == "2503.01840"
    assert {"num_draft_tokens": 12, "confidence_threshold": 0.07}.items() <= {
        o["name"]: o["default"] for o in found["options"]
    }.items()
    assert run_foretell("methods", "pld", "--json").stdout == run_foretell("methods", "ngram", "--json").stdout
    assert "did you mean 'eagle3'" in run_foretell("methods", "eagel3").stderr


def test_version_and_help() -> None:
    assert run_foretell("--version").stdout.startswith("foretell ")
    shown = run_foretell("--help").stdout
    assert all(word in shown for word in ("generate", "chat", "methods", "verify", "roofline", "--compare"))
    assert run_foretell().exit_code == 0
    assert "--speculative-config" in run_foretell("generate", "--help").stdout


def test_a_prediction_gives_the_same_text_and_is_counted(tmp_path: Path) -> None:
    plain = records("hello", "--max-new-tokens", "20")[0]
    (tmp_path / "like.txt").write_text(str(plain["text"]))
    found = records("hello", "--max-new-tokens", "20", "--prediction", tmp_path / "like.txt", "--method", "plain")[0]
    assert found["text"] == plain["text"] and found["target_passes"] < 20  # type: ignore[operator]
    assert found["accepted_prediction_tokens"] >= 4  # type: ignore[operator]  # its bytes are mostly no characters
    file = prompts(tmp_path, {"prompt": "hello", "prediction": plain["text"]}, {"prompt": "hello"})
    two = records("--prompts", file, "--max-new-tokens", "20")
    assert [r["text"] for r in two] == [plain["text"]] * 2 and "accepted_prediction_tokens" not in two[1]


def test_a_draft_model_of_another_vocabulary_is_told_what_takes_it(tmp_path: Path) -> None:
    """As of Qwen2.5, whose larger models have 128 tokens more than the smaller ones."""
    target, draft = (save_tiny_model(tmp_path / str(vocab), vocab=vocab) for vocab in (260, 261))
    command = ("generate", "Hi", "--model", target, "--draft-model", draft, "--max-new-tokens", "4")
    text = expect_error(*command, "--method", "draft_model")
    assert "has 261 tokens, the target's 260" in text and "--method universal_draft, which takes any" in text
    assert run_foretell(*command, "--method", "universal_draft").exit_code == 0


def test_compare_prints_the_answer_once_and_the_gain() -> None:
    arguments = ("generate", "hello", "--model", tiny_target(), "--dtype", "float32", "--max-new-tokens", "20")
    wanted = run_foretell(*arguments, "--method", "autoregressive").stdout
    result = run_foretell(*arguments, "--compare", "--method", "sam_recycling")
    assert result.exit_code == 0 and result.stdout == wanted
    first, last = result.stderr.splitlines()[-2:]
    assert "sam_recycling" in first and "cut at the most new tokens" in first
    assert "times plain decoding's speed" in last and last.endswith("identical")


def test_compare_needs_a_method_that_drafts_and_one_prompt(tmp_path: Path) -> None:
    model = ("--model", tiny_target(), "--dtype", "float32")
    assert "beside plain decoding" in expect_error("generate", "a", *model, "--compare", "--method", "autoregressive")
    file = prompts(tmp_path, {"prompt": "a"})
    message = expect_error("generate", "--prompts", file, *model, "--compare")
    assert "--prompts would have no effect" in message


def test_two_answers_stand_side_by_side_on_a_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(comparison, "Console", partial(Console, file=shown, force_terminal=True, width=100))
    arguments = ("hello", "--model", tiny_target(), "--dtype", "float32", "--max-new-tokens", "8", "--compare")
    assert run_foretell("generate", *arguments).stdout == ""
    last = [line for line in shown.getvalue().splitlines() if "plain decoding" in line][-1]
    assert "auto" in last and shown.getvalue().count("8 tokens, ") > 1


def test_the_times_of_passes_are_kept_when_the_command_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path))
    monkeypatch.delenv("FORETELL_CACHE_LIMIT", raising=False)
    for length, kept in (("8", 0), ("60", 1)):
        records("hello", "--max-new-tokens", length, "--method", "autoregressive", "--ignore-eos")
        assert len(list(tmp_path.glob("*.times.json"))) == kept
