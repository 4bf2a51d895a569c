"""Load on servers of OpenAI's chat completions: speed at several numbers of concurrent streams, for several servers in
turn.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException, HTTPResponse
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from foretell.bench.text_table import Cell, TextTable

_TIMEOUT = 600.0
"""Seconds without a byte after which a request has failed."""

_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Server:
    """A server, and the extra fields of the requests that it gets."""

    name: str
    url: str
    fields: str = "{}"
    """A JSON object."""


def with_own_salts(servers: Sequence[Server]) -> list[Server]:
    """The servers; those that share a URL get a `cache_salt` each, unless they have one: of prompts that one of them
    has had read, the others would read nothing.
    """
    urls = [s.url.rstrip("/") for s in servers]
    return [
        replace(s, fields=json.dumps({"cache_salt": s.name} | json.loads(s.fields))) if urls.count(url) > 1 else s
        for s, url in zip(servers, urls, strict=True)
    ]


@dataclass(frozen=True)
class Workload:
    """What every server gets: greedy requests of one user message each."""

    prompts: tuple[str, ...]
    max_tokens: int


@dataclass(frozen=True)
class Answer:
    """One streamed answer; times are in seconds from the request on."""

    text: str
    tokens: int
    first: float
    last: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt's tokens, those that the server's cache had."""


@dataclass(frozen=True)
class LoadResult:
    """The answers to all prompts, with so many streams at a time."""

    server: str
    concurrency: int
    seconds: float
    answers: tuple[Answer, ...]

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all answers per second."""
        return sum(a.tokens for a in self.answers) / self.seconds

    @property
    def seconds_per_token(self) -> tuple[float, ...]:
        """Mean time between two tokens of each answer."""
        return tuple((a.last - a.first) / max(1, a.tokens - 1) for a in self.answers)


def ask(server: Server, prompt: str, max_tokens: int) -> Answer:
    """Stream one answer.

    Raises:
        ValueError: the server is not there, refuses the request, or breaks off.
    """
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **json.loads(server.fields),
    }
    address, started = urlsplit(server.url), time.perf_counter()
    text, first, last, usage = "", 0.0, 0.0, dict[str, Any]()
    connection = HTTPConnection(address.hostname or "", address.port or 80, timeout=_TIMEOUT)
    try:
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request("POST", f"{address.path.rstrip('/')}/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"{server.name}: status {response.status}: {response.read(300).decode(errors='replace')}")
        for event in _events(response):
            if "error" in event:
                raise ValueError(f"{server.name}: {str(event['error'])[:300]}")
            usage = event.get("usage") or usage
            piece = next((c["delta"].get("content") for c in event.get("choices", ())), None)
            if piece:
                last = time.perf_counter() - started
                first, text = first or last, text + piece
    except (OSError, HTTPException) as error:
        raise ValueError(f"{server.name}: no answer from {server.url}: {error}; start the server first") from error
    finally:
        connection.close()
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(text, usage.get("completion_tokens", 0), first, last, usage.get("prompt_tokens", 0), cached)


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """The objects of a stream of server-sent events."""
    rest = b""
    while data := response.read1(_READ_BYTES):  # Reading by lines would take more time than all the rest.
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                yield json.loads(line[6:])


def run_load(server: Server, workload: Workload, concurrency: int) -> LoadResult:
    """Answer all prompts, so many at a time.

    Raises:
        ValueError: a request failed.
    """
    started = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        answers = tuple(pool.map(lambda p: ask(server, p, workload.max_tokens), workload.prompts))
    return LoadResult(server.name, concurrency, time.perf_counter() - started, answers)


def run_all(
    servers: Sequence[Server],
    workload: Workload,
    concurrencies: Sequence[int],
    repeats: int,
    on_result: Callable[[LoadResult], None] | None = None,
) -> list[LoadResult]:
    """All results; the servers take turns, and each answers one prompt first that does not count.

    Raises:
        ValueError: a request failed.
    """
    for server in servers:
        ask(server, workload.prompts[0], 8)
    results = []
    for _ in range(repeats):
        for concurrency in concurrencies:
            for server in servers:
                results.append(run_load(server, workload, concurrency))
                if on_result is not None:
                    on_result(results[-1])
    return results


def load_table(results: Sequence[LoadResult]) -> TextTable:
    """Medians over the repetitions, a row per server and number of streams. The first server is compared with each
    other one; `same text`: the share of a server's answers that equal its first ones.
    """
    groups = dict[tuple[int, str], list[LoadResult]]()
    for r in results:
        groups.setdefault((r.concurrency, r.server), []).append(r)
    base, expected = results[0].server, dict[str, tuple[Answer, ...]]()
    for r in results:
        expected.setdefault(r.server, r.answers)
    rows = list[tuple[Cell, ...]]()
    for (concurrency, name), group in groups.items():
        speed = median(r.tokens_per_second for r in group)
        first = [a.first * 1e3 for r in group for a in r.answers]
        per_token = [s * 1e3 for r in group for s in r.seconds_per_token]
        same = [a.text == b.text for r in group for a, b in zip(r.answers, expected[name], strict=True)]
        of_base = median(r.tokens_per_second for r in groups[concurrency, base])
        ratio = None if name == base else of_base / speed
        speeds = speed, ratio, median(first), float(np.percentile(first, 99)), median(per_token)
        rows.append((f"{name}, {concurrency}", *speeds, f"{np.mean(same):.0%}"))
    header = ("server, streams", "tokens/s", f"{base} over it", "first token ms", "p99 ms", "ms per token", "same text")
    return TextTable(header, rows, digits=2)
