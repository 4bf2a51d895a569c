"""Measures what a server's step costs beside the engine's: answers over HTTP and of an engine here, in turn.

    python tools/measure_server.py --method autoregressive --requests 1 --repeats 12 -- --stream-interval-ms 0

What stands after `--` goes to `foretell serve`. Milliseconds of a decoding step per request: of a stream from its first
piece on, of a whole answer in all, and of the engine those of steps that read no prompt; medians, and medians of the
ratios of neighbours.
"""

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

import foretell
from foretell import Model, SamplingParams

PORT = 8099
PROMPT = "The history of the town begins with the river and the people who lived beside it."


def ask(body: dict[str, object]) -> tuple[float, float]:
    """Seconds of an answer in all, and since its first piece."""
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=600)
    started = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        sys.exit(response.read().decode())
    response.readline()
    first = time.perf_counter()
    response.read()
    return time.perf_counter() - started, time.perf_counter() - first


def from_server(options: argparse.Namespace, stream: bool) -> float:
    """Milliseconds per token of as many requests at once."""
    bodies = [
        {"prompt": f"{PROMPT} {time.time()} {i}", "max_tokens": options.new_tokens, "temperature": 0, "stream": stream}
        | {"ignore_eos": True}
        for i in range(options.requests)
    ]
    with ThreadPoolExecutor(options.requests) as clients:
        slowest, since_first = map(max, zip(*clients.map(ask, bodies), strict=True))
    seconds: float = since_first if stream else slowest
    return 1e3 * seconds / int(options.new_tokens)


def from_engine(model: Model, options: argparse.Namespace) -> float:
    """The same of an engine in this thread."""
    engine, seconds, tokens = model.engine(options.method, rows=options.requests), 0.0, 0
    for i in range(options.requests):
        prompt = f"{PROMPT} {time.time()} {i}"
        request = model.request(prompt, SamplingParams(), max_new_tokens=options.new_tokens, ignore_eos=True)
        engine.submit(replace(request, cache_salt=str(i)))
    while engine.busy:
        started = time.perf_counter()
        new = sum(len(update.tokens) for update in engine.step())
        if not engine.last_step.counts.reads_prompt:
            seconds, tokens = seconds + time.perf_counter() - started, tokens + new
    return 1e3 * seconds / tokens * int(options.requests)


def main() -> None:
    """Read the command line, start the server, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--method", default="autoregressive")
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("server", nargs="*", help="options of `foretell serve`")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    common = ["--model", options.model, "--method", options.method, "--threads", str(options.threads)]
    command = [sys.executable, "-m", "foretell", "serve", *common, "--port", str(PORT), *options.server]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        model = foretell.load(options.model)
        kinds: dict[str, Callable[[], float]] = {
            "engine": lambda: from_engine(model, options),
            "whole answers": lambda: from_server(options, stream=False),
            "streams": lambda: from_server(options, stream=True),
        }
        while server.poll() is None and not _answers():
            time.sleep(0.2)
        rounds = [{name: measured() for name, measured in kinds.items()} for _ in range(options.repeats + 1)][1:]
    finally:
        server.terminate()
        server.wait()
    for name in kinds:
        ratios = [each[name] / each["engine"] for each in rounds]
        print(f"{name}: {statistics.median(each[name] for each in rounds):.2f} ms, {statistics.median(ratios):.3f}")


def _answers() -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=5)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False


if __name__ == "__main__":
    main()
