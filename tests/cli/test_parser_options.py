"""Options that say how a model's texts are read: of calls, reasoning, tokenizers and dates, on the command line."""

import json
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from test_errors import command, environment

from command import expect_error, run_foretell, save_tiny_model, tiny_target

TEMPLATE = (
    "{% if tools %}<tool_call>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    "{{ strftime_now('%d %B %Y') }}{% if add_generation_prompt %}<think>{% endif %}"
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tool-call-parser", "hermess"), "unknown tool call parser 'hermess'.*hermes"),
        (("--reasoning-parser", "qwen4"), "unknown reasoning parser 'qwen4'.*qwen3"),
        (("--pre-tokenizer", "llama-bpe"), "--pre-tokenizer.*GGUF"),
        (("--chat-template-date", "4.3.2026"), "--chat-template-date.*2026-03-04|date.*4.3.2026"),
    ],
)
def test_bad_values_are_refused_before_the_server_starts(arguments: tuple[str, str], message: str) -> None:
    assert re.search(message, expect_error("serve", "--model", tiny_target(), "--port", "0", *arguments))


def test_a_negative_budget_is_refused() -> None:
    result = run_foretell("serve", "--model", tiny_target(), "--reasoning-budget", "-1")
    assert result.exit_code == 2 and "--reasoning-budget" in result.output and "Traceback" not in result.output


@contextmanager
def serving(model: Path, *options: str) -> Iterator[str]:
    """The address of `foretell serve` in a process of its own."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    arguments: tuple[str | Path, ...] = ("serve", "--model", model, "--port", str(port), *options)
    with subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, env=environment()) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(1200):
                assert process.poll() is None, process.stderr and process.stderr.read()
                try:
                    if httpx2.get(f"{url}/health").is_success:
                        break
                except httpx2.TransportError:
                    pass
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()
            process.communicate(timeout=60)


def test_a_server_reads_answers_as_it_is_told(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, context=2048)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    body: dict[str, Any] = {
        "model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "seed": 1,
        "tools": [{"type": "function", "function": {"name": "stop", "parameters": {
            "type": "object", "properties": {}, "additionalProperties": False}}}],
        "tool_choice": "required", "parallel_tool_calls": False, "return_token_ids": True,
    }  # fmt: skip
    options = ("--served-model-name", "tiny", "--reasoning-budget", "4", "--chat-template-date", "2026-03-04")
    with serving(model, *options, "--tool-call-parser", "kimi_k2", "--reasoning-parser", "qwen3") as url:
        answer = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=120).json()
        assert "prompt_token_ids" in answer, answer
        prompt = httpx2.post(f"{url}/detokenize", json={"model": "tiny", "tokens": answer["prompt_token_ids"]}).json()
    message = answer["choices"][0]["message"]
    assert "04 March 2026" in prompt["prompt"], prompt
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4 and message["reasoning_content"]
    (call,) = message["tool_calls"]
    assert call["id"] == "functions.stop:0" and json.loads(call["function"]["arguments"]) == {}
