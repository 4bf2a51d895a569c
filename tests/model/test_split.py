"""Models in parts: two processes decode what one does, by tensor parallelism and by pipeline parallelism."""

import atexit
import json
import multiprocessing
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers

import foretell
from foretell.accept import Match, Rejection
from foretell.core.sampling import SamplingParams
from foretell.draft import DraftModel, TokenRecycling
from foretell.engine.budget import Budget
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod, Method
from foretell.engine.request import Request
from foretell.model.load.transformers import HFRunner, load_hf
from foretell.model.run.runner import Runner
from foretell.shape import Chain, Trie
from foretell.testing import letter_codec
from helpers import random_tokens

VOCAB, TOKENS = 37, 20
PROCESSES = multiprocessing.get_context("fork")
DEATH = "death"


def save_model(path: Path, heads: int, kv_heads: int, **values: object) -> Path:
    """A Llama of transformers with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8 * heads, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": heads}
    sizes |= {"num_key_value_heads": kv_heads, "max_position_embeddings": 64, "vocab_size": VOCAB}
    config = transformers.LlamaConfig(**sizes, bos_token_id=0, eos_token_id=36, pad_token_id=0, **values)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    model.save_pretrained(path)
    letter_codec(VOCAB).tokenizer.save(str(path / "tokenizer.json"))
    return path


def texts(runner: Runner) -> list[list[int]]:
    """Greedy and sampled texts of requests that share passes, by several methods; of the last one with a budget, whose
    choices depend on measured times.
    """
    small = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=VOCAB, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(1)
    draft = transformers.AutoModelForCausalLM.from_config(small, attn_implementation="eager")
    methods: list[tuple[AnyMethod, Budget | None]] = [
        (Method(TokenRecycling(VOCAB), Trie(0), Match()), None),
        (Method(TokenRecycling(VOCAB), Trie(9), Match()), None),
        (Method(DraftModel(HFRunner(draft)), Chain(3), Rejection()), None),
        (Method(TokenRecycling(VOCAB), Trie(9), Match()), Budget()),
    ]
    answers = []
    for method, budget in methods:
        requests = [
            Request(random_tokens(n, VOCAB, seed=n), SamplingParams(temperature=t, seed=n), TOKENS)
            for n in (3, 11, 6)
            for t in (0.0, 1.0)
        ]
        engine = Engine(runner, method, rows=2, chunk=5, prefix_caching=True, budget=budget)
        answers += [list(c.tokens) for c in engine.complete(requests)]
    return answers


def part(rank: int, port: int, path: Path, tensor: int, pipeline: int, out: Path, dies: bool) -> None:
    """One of two processes, as `torchrun` starts them."""
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = f"{port}"
    torch.set_num_threads(1)
    atexit._clear()  # What the process that runs the tests has to do at its end.
    (out / f"{rank}").write_text(f"{os.getpid()}")
    model = foretell.load(str(path), "float32", tensor_parallel=tensor, pipeline_parallel=pipeline)
    runner = model.runner()
    answers: Sequence[object] = texts(runner)
    if dies:
        os.kill(int((out / "1").read_text()), signal.SIGKILL)
        engine = Engine(runner, model.method("ngram"))
        ends = [engine.complete([Request([1, 2, 3])], raise_errors=False)[0] for _ in range(2)]
        answers = [[end.finish_reason, str(end.error)] for end in ends]
    (out / "answers").write_text(json.dumps([str(runner.backend), answers]))
    atexit._run_exitfuncs()  # Which processes of this kind leave out.


def in_two(path: Path, tensor: int, pipeline: int, out: Path, dies: bool = False) -> tuple[str, list[list[object]]]:
    """What the first of two processes wrote: its backend, and its answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out.mkdir(exist_ok=True)
    started = [PROCESSES.Process(target=part, args=(r, port, path, tensor, pipeline, out, dies)) for r in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join(240)
    assert [process.exitcode for process in started] == [0, -signal.SIGKILL if dies else 0]
    backend, answers = json.loads((out / "answers").read_text())
    return backend, answers


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("heads", "kv_heads", "tensor", "pipeline"),
    [(4, 2, 2, 1), (3, 1, 2, 1), (4, 2, 1, 2)],
    ids=["tensor", "whole attention", "pipeline"],
)
def test_two_processes_decode_what_one_does(
    heads: int, kv_heads: int, tensor: int, pipeline: int, tmp_path: Path
) -> None:
    path = save_model(tmp_path / "model", heads, kv_heads, tie_word_embeddings=heads == 3)
    backend, answers = in_two(path, tensor, pipeline, tmp_path / "out")
    assert backend == "transformers in 2 processes cpu float32"
    whole = load_hf(path, torch.float32, torch.device("cpu"))
    assert answers == texts(HFRunner(whole))
    prompt = random_tokens(3, VOCAB, seed=3)
    own = whole.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=[])
    assert answers[0] == own[0, len(prompt) :].tolist()


@pytest.mark.exhaustive
def test_the_death_of_a_process_ends_requests_and_does_not_hang(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model", 4, 2)
    _, ends = in_two(path, 2, 1, tmp_path / "out", dies=True)
    assert [end[0] for end in ends] == ["error", "error"]
    assert "start all of them again" in str(ends[1][1])


def test_a_model_in_parts_is_refused_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_model(tmp_path / "model", 4, 2)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for options, message in (
        ({"tensor_parallel": 2}, "needs 2 processes with the same command, found 1.*torchrun --nproc-per-node 2"),
        ({"pipeline_parallel": 3}, "needs 3 processes"),
        ({"tensor_parallel": 2, "pipeline_parallel": 3}, "either every layer or the list of layers, found 2 .* and 3"),
        ({"pipeline_parallel": 0}, "1 part or more"),
        ({"tensor_parallel": 2, "kv_cache_dtype": "int8"}, "for the own decoder"),
        ({"tensor_parallel": 2, "memory_limit": 1 << 20}, "memory_limit.*for the own decoder"),
    ):
        with pytest.raises(ValueError, match=message):
            foretell.load(str(path), "float32", **options)
    with pytest.raises(ValueError, match="directories of safetensors"):
        foretell.load(tensor_parallel=2)
