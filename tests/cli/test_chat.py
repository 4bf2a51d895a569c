"""`foretell chat` with lines from a pipe."""

import json
import shutil
import signal
from pathlib import Path

import pytest

from command import expect_error, run_foretell, tiny_target
from foretell.api import Answer
from foretell.engine.engine import Engine
from foretell.engine.request import Completion, Update


def chat(*lines: str, status: int = 0) -> tuple[str, str]:
    options = ("--model", tiny_target(), "--dtype", "float32", "--max-new-tokens", "6")
    result = run_foretell("chat", *options, stdin="\n".join(lines) + "\n")
    assert result.exit_code == status, result.output
    return result.stdout, result.stderr


def test_remembers_resets_and_changes_the_method() -> None:
    once, _ = chat("hello")
    twice, _ = chat("hello", "hello")
    again, err = chat("hello", "/reset", "/method suffix", "hello")
    assert twice.startswith(once) and twice != once * 2
    assert again == once * 2
    assert "decoding with suffix" in err and "suffix · lossless" in err


def test_stats_help_quit_and_blank_lines() -> None:
    out, err = chat("", "/help", "hello", "/stats", "/quit", "never asked")
    assert "/method NAME" in err and err.count("tokens per pass") == 2
    assert out == chat("hello")[0]


def test_mistakes_do_not_end_the_conversation() -> None:
    out, err = chat("/stats", "/method", "/metod x", "/method sufix", "x" * 600, "hello")
    assert "there is no answer yet" in err and "the method is auto" in err
    assert (
        "did you mean '/method'" in err and "did you mean 'suffix'" in err and "/reset starts a new conversation" in err
    )
    assert out == chat("hello")[0]


def test_ctrl_c_stops_the_answer_and_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = Engine.step, list[int]()

    def press(self: Engine) -> list[Update]:
        calls.append(0)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    whole, _ = chat("hello")
    monkeypatch.setattr(Engine, "step", press)
    out, err = chat("hello", "/stats")
    first = out.splitlines()[0]
    assert whole.startswith(first) and len(first) < len(whole.strip("\n"))
    assert err.count("tokens per pass") == 2


def test_a_turn_reuses_the_cached_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    cached, real = list[int](), Answer.from_completion

    def watched(completion: Completion, engine: Engine) -> Answer:
        cached.append(completion.statistics.cached_tokens)
        return real(completion, engine)

    monkeypatch.setattr(Answer, "from_completion", watched)
    chat("hello", "hello", "/reset", "hello")
    assert cached[0] == 0 and cached[1] > 5 and 0 < cached[2] < cached[1]


def test_a_model_without_chat_template_is_refused_before_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "base"
    shutil.copytree(tiny_target(), path)
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    message = expect_error("chat", "--model", path, stdin="hello\n")
    assert "a chat needs a chat template, and this model has none; use `foretell generate`" in message
