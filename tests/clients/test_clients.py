"""Clients of the server's API that are too heavy for the other tests, with the embedded model. They take some minutes
and are run by `make clients`.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import pytest

import foretell
from command import save_tiny_model

pytestmark = pytest.mark.skipif("FORETELL_TEST_CLIENTS" not in os.environ, reason="run by `make clients`")

MODEL = "smollm2-135m"
TOKENIZER = "foretell/smollm2"
"""Name of the tokenizer in the hub's cache: aiperf takes no directory where it is offline."""
SECONDS = 600.0
"""Longest wait for a command."""
QUESTION = "What is the capital of France?"
COUNT = "One, two, three,"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


@contextmanager
def serving(*options: str) -> Iterator[str]:
    """The URL of a server in a process of its own."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "foretell", "serve", "--port", str(port), *options], stderr=subprocess.DEVNULL
    )
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + SECONDS
    try:
        while not _is_up(url):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.2)
        yield url
        assert process.poll() is None, "the server ended"
    finally:
        process.terminate()
        process.wait(60)


def _is_up(url: str) -> bool:
    try:
        return httpx2.get(url + "/health", timeout=5).status_code == 200
    except httpx2.HTTPError:
        return False


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as found:
        yield found


@cache
def model() -> foretell.Model:
    return foretell.load(MODEL)


@dataclass(frozen=True)
class Offline:
    """An environment in which the hub's cache has the model's tokenizer, and the tokenizer's directory."""

    environment: Mapping[str, str]
    tokenizer: Path


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Offline:
    from transformers import PreTrainedTokenizerFast

    home = tmp_path_factory.mktemp("hub")
    repository, commit = home / "hub" / ("models--" + TOKENIZER.replace("/", "--")), "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model().codec.tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>",
        unk_token="<|endoftext|>", pad_token="<|im_end|>",
    )  # fmt: skip
    tokenizer.save_pretrained(repository / "snapshots" / commit)
    variables = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    return Offline(os.environ | variables, repository / "snapshots" / commit)


def run(environment: Mapping[str, str], folder: Path, program: str, *arguments: object) -> str:
    """What a program of this virtual environment prints."""
    command = [str(Path(sys.executable).parent / program), *map(str, arguments)]
    found = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]
    return found.stdout


def expected(tokens: int = 40) -> str:
    """The library's answer to the question."""
    return model().generate(QUESTION, max_new_tokens=tokens)[0].text


@needs("openai")
def test_openai_2(url: str) -> None:
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        options: Any = {"model": MODEL, "temperature": 0}
        chat = client.chat.completions.create(messages=MESSAGES, max_tokens=40, **options)
        assert chat.choices[0].message.content == expected()
        stream = client.chat.completions.create(messages=MESSAGES, max_tokens=40, stream=True, **options)
        assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == expected()
        response = client.responses.create(input=QUESTION, max_output_tokens=40, **options)
        assert response.output_text == expected()
        completion = client.completions.create(prompt=COUNT, max_tokens=4, logprobs=1, **options)
        assert len(completion.choices[0].logprobs.token_logprobs) == 4


@needs("anthropic")
def test_anthropic(url: str) -> None:
    import anthropic

    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        options: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 40, "extra_body": {"temperature": 0}}
        assert client.messages.create(**options).content[0].text == expected()
        with client.messages.stream(**options) as stream:
            assert "".join(stream.text_stream) == expected()


@needs("langchain_openai")
def test_langchain(url: str) -> None:
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Place(BaseModel):
        city: str
        country: str

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    options: Any = {"base_url": f"{url}/v1", "api_key": "none", "model": MODEL, "temperature": 0, "max_tokens": 40}
    chat = ChatOpenAI(**options)
    answer = chat.invoke(QUESTION)
    assert answer.content == expected() and answer.usage_metadata["output_tokens"] > 0
    assert "".join(piece.content for piece in chat.stream(QUESTION)) == expected()
    for method in ("json_schema", "function_calling"):
        found = chat.with_structured_output(Place, method=method).invoke("Paris is in France.")
        assert isinstance(found, Place)
    (call,) = chat.bind_tools([add], tool_choice="add").invoke("add 3 and 4").tool_calls
    assert call["name"] == "add" and set(call["args"]) == {"a", "b"}
    assert ChatOpenAI(**options, use_responses_api=True).invoke(QUESTION).text == expected()


@needs("litellm")
def test_litellm(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    options: Any = {"messages": MESSAGES, "api_key": "none", "max_tokens": 40, "temperature": 0}
    for provider, base in (("openai", f"{url}/v1"), ("hosted_vllm", f"{url}/v1"), ("anthropic", url)):
        found = litellm.completion(f"{provider}/{MODEL}", api_base=base, **options)
        assert found.choices[0].message.content == expected(), provider
        stream = litellm.completion(f"{provider}/{MODEL}", api_base=base, stream=True, **options)
        assert "".join(piece.choices[0].delta.content or "" for piece in stream) == expected(), provider
    text = {"prompt": COUNT, "max_tokens": 8, "temperature": 0}
    found = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", api_base=f"{url}/v1", api_key="none", **text
    )
    plain = httpx2.post(f"{url}/v1/completions", json=text, timeout=SECONDS).json()["choices"][0]["text"]
    assert plain and found.choices[0].text == plain


TASKS = {
    "own_choice": """
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: label
metric_list: [{metric: acc}]
""",
    "own_text": """
output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 12}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "own_perplexity": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}]
""",
}
QUESTIONS: list[dict[str, Any]] = [
    {"question": QUESTION, "choices": ["Paris", "a banana", "seventeen"], "label": 0},
    {"question": "Which animal barks?", "choices": ["The table", "A dog", "The number two"], "label": 1},
]


@needs("lm_eval")
def test_lm_evaluation_harness_reads_the_model_s_log_probabilities(url: str, offline: Offline, tmp_path: Path) -> None:
    data = tmp_path / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
    for name, text in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\n{source}{text}")
    model_options = (
        f"model={MODEL},base_url={url}/v1/completions,tokenizer={offline.tokenizer},num_concurrent=4,max_length=2048"
    )
    run(
        offline.environment, tmp_path, "lm_eval", "run", "--model", "local-completions", "--model_args", model_options,
        "--tasks", ",".join(TASKS), "--include_path", tmp_path, "--output_path", tmp_path / "out", "--log_samples",
    )  # fmt: skip

    def samples(task: str) -> dict[int, Any]:
        (file,) = (tmp_path / "out").rglob(f"samples_{task}_*.jsonl")
        lines = map(json.loads, file.read_text().splitlines())
        return {line["doc_id"]: line for line in lines}

    for number, question in enumerate(QUESTIONS):
        prompt = f"Question: {question['question']}\nAnswer:"
        found = [float(response[0][0]) for response in samples("own_choice")[number]["resps"]]
        assert found == pytest.approx(
            [log_likelihood(prompt, f" {choice}") for choice in question["choices"]], abs=1e-4
        )
        text = model().generate(prompt, raw=True, max_new_tokens=12, stop="\n")[0].text
        assert samples("own_text")[number]["resps"][0][0] == text
        rolling = samples("own_perplexity")[number]["resps"][0]
        # The harness puts the token of the beginning before the text.
        assert float(rolling[0] if isinstance(rolling, list) else rolling) == pytest.approx(
            log_likelihood("<|im_start|>", question["question"]), abs=1e-4
        )


def log_likelihood(prompt: str, continuation: str) -> float:
    """The library's logarithm of a continuation's probability."""
    tokens = len(model().tokens(prompt + continuation, True, allow_special_tokens=True))
    new = tokens - len(model().tokens(prompt, True, allow_special_tokens=True))
    request = model().request(
        prompt + continuation, raw=True, max_new_tokens=1, prompt_logprobs=0, allow_special_tokens=True
    )
    (completion,) = model().engine().complete([request])
    return sum(completion.prompt_logprobs[-new:])


@needs("guidellm")
def test_guidellm(url: str, offline: Offline, tmp_path: Path) -> None:
    run(
        offline.environment, tmp_path, "guidellm", "run", "--backend", f"kind=openai_http,target={url},model={MODEL}",
        "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6",
        "--tokenizer", f"kind=huggingface_auto,model={offline.tokenizer}",
        "--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=16",
        "--output", f"kind=json,path={tmp_path / 'report.json'}", "--disable-console-interactive",
    )  # fmt: skip
    metrics = json.loads((tmp_path / "report.json").read_text())["benchmarks"][0]["metrics"]
    totals = metrics["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (6, 0, 0)
    assert metrics["output_token_count"]["successful"]["mean"] == 16


@needs("aiperf")
def test_aiperf(url: str, offline: Offline, tmp_path: Path) -> None:
    run(
        offline.environment, tmp_path, "aiperf", "profile", "--model-names", MODEL, "--url", url,
        "--endpoint-type", "chat", "--streaming", "--tokenizer", TOKENIZER,
        "--concurrency", 2, "--request-count", 6, "--isl", 32, "--osl", 16,
        "--extra-inputs", "ignore_eos:true", "--ui", "none", "--no-gpu-telemetry", "--workers-max", 1,
        "--artifact-dir", tmp_path / "out",
    )  # fmt: skip
    found = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == 6 and not (found.get("error_request_count") or {}).get("avg")
    filled = (
        "time_to_first_token", "inter_token_latency", "output_sequence_length", "output_token_throughput",
        "usage_prompt_tokens", "usage_prompt_cache_read_tokens", "spec_decode_draft_tokens",
        "spec_decode_acceptance_length",
    )  # fmt: skip
    assert [name for name in filled if not found[name]["avg"] > 0] == []
    assert found["usage_completion_tokens"]["avg"] == 16


@needs("vllm")
@pytest.mark.parametrize(("backend", "path"), [("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions")])
def test_vllm_bench_serve(url: str, offline: Offline, tmp_path: Path, backend: str, path: str) -> None:
    run(
        offline.environment, tmp_path, "vllm", "bench", "serve", "--backend", backend, "--endpoint", path,
        "--base-url", url, "--model", MODEL, "--tokenizer", offline.tokenizer, "--dataset-name", "random",
        "--random-input-len", 32, "--random-output-len", 16, "--num-prompts", 6, "--max-concurrency", 2, "--ignore-eos",
        "--save-result", "--result-filename", tmp_path / "result.json",
    )  # fmt: skip
    found = json.loads((tmp_path / "result.json").read_text())
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (6, 0, 96)


@needs("schemathesis")
def test_schemathesis_finds_no_500(offline: Offline, tmp_path: Path) -> None:
    tiny = save_tiny_model(tmp_path / "tiny", context=64)
    with serving("--model", str(tiny), "--dtype", "float32") as url:
        found = run(
            offline.environment, tmp_path, "st", "run", f"{url}/openapi.json", "--checks", "not_a_server_error",
            "--phases", "examples,coverage,fuzzing", "--max-examples", 30, "--max-time", 150, "--seed", 1,
            "--suppress-health-check", "filter_too_much", "--request-timeout", 300, "--no-color", "--warnings", "off",
        )  # fmt: skip
        counts = re.findall(r"(\d+) generated", found)
        assert counts and int(counts[-1]) > 100, found[-2000:]


def test_every_schema_is_answered_validly_or_its_keyword_is_named(url: str) -> None:
    sys.path.append(str(Path(__file__).parents[1] / "serve"))
    from schemas import check_schemas

    with httpx2.Client(base_url=url, timeout=SECONDS) as http:
        report = check_schemas(
            http,
            lambda case: f"Give one short value that fits the JSON schema: {json.dumps(case.schema)[:300]}",
            temperature=0,
            frequency_penalty=1.5,
        )
    assert not report.wrong, "\n".join(report.wrong)
    assert report.answered >= 200 and report.refused >= 90
