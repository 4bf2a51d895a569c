"""Hostile histories of a server, and how fast ordinary requests are answered after each: its draft budget learns from
all that it has served, and must not be the worse for it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from foretell.bench.soak_client import CHAT, WORDS, BusyError, KnownAnswers, SoakClient, SoakTarget
from foretell.bench.text_table import TextTable

_PROMPTS = tuple(f"Write {n} sentences about a {word}." for n, word in enumerate(WORDS[:10], 2))
_BURST, _PAUSE = 64, 60.0
"""Requests at once, and seconds without any."""
_SAMPLED = {"temperature": 1.0, "seed": 1}


@dataclass(frozen=True)
class HistoryResult:
    """Tokens per second of ten ordinary requests, one at a time, before all histories and after one of them."""

    name: str
    before: float
    after: float


def run_histories(target: SoakTarget, count: int, report: Callable[[str], None]) -> list[HistoryResult]:
    """Put a server through all histories, of `count` requests where they have many. `report` is told their names.

    Raises:
        SoakError: an answer failed. BusyError: an ordinary request was refused. OSError: no connection.
    """
    client, results = SoakClient(target, KnownAnswers(), 0), list[HistoryResult]()
    _speed(client)  # what is done once
    before = _speed(client)
    for name, run in _HISTORIES.items():
        report(name)
        run(client, count)
        results.append(HistoryResult(name, before, _speed(client)))
    return results


def histories_table(results: Sequence[HistoryResult]) -> TextTable:
    """The speeds and their quotients."""
    rows = [(r.name, r.before, r.after, r.after / r.before) for r in results]
    return TextTable(("history", "tokens/s before", "tokens/s after", "after / before"), rows)


def _speed(client: SoakClient) -> float:
    """Tokens per second of ordinary requests, whose prompts are not in the cache."""
    salt, tokens, started = str(client.rng.random()), 0, time.monotonic()
    for prompt in _PROMPTS:
        answer = client.post(CHAT, client.chat(prompt, temperature=0, cache_salt=salt))
        tokens += answer["usage"]["completion_tokens"]
    return float(tokens / (time.monotonic() - started))


def _short_answers(client: SoakClient, count: int) -> None:
    for i in range(count):
        client.post(CHAT, client.chat(client.text(5), max_tokens=1 + i % 2))


def _greedy_then_sampled(client: SoakClient, count: int) -> None:
    for sampling in ({"temperature": 0.0}, _SAMPLED):
        for _ in range(count):
            client.post(CHAT, client.chat(client.text(5), **sampling))


def _burst(client: SoakClient, count: int) -> None:
    def ask(prompt: str) -> None:
        with suppress(BusyError):
            client.post(CHAT, client.chat(prompt))

    with ThreadPoolExecutor(_BURST) as pool:
        list(pool.map(ask, [client.text(5) for _ in range(_BURST)]))


def _pause(client: SoakClient, count: int) -> None:
    time.sleep(_PAUSE)


_HISTORIES: Mapping[str, Callable[[SoakClient, int], None]] = {
    "answers of one or two tokens": _short_answers,
    "greedy, then sampled": _greedy_then_sampled,
    f"a burst of {_BURST}": _burst,
    "a pause": _pause,
}
