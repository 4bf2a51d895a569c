"""Whether a server gives one text for one request: every answer, under load, with drafts, with a cold cache and a warm
one, is compared with that of the same request alone, without drafts and with a cold cache.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from uuid import uuid4

from foretell.bench.load_test import Answer, Server, ask
from foretell.bench.text_table import TextTable

PLAIN = {"speculative": {"max_drafts": 0}}
_FIRST_SEED = 1000
_SHOWN = 30
"""Characters of the texts that are shown from their first difference on."""


@dataclass(frozen=True)
class IdentityRequest:
    """A request of the check: greedy without a seed, at temperature 1 with one."""

    prompt: str
    seed: int | None

    def fields(self) -> dict[str, object]:
        """Its sampling parameters."""
        return {"temperature": 0} if self.seed is None else {"temperature": 1, "seed": self.seed}


@dataclass(frozen=True)
class IdentityCase:
    """How the requests are sent: so many at a time, with drafts or without, the second time if the cache is warm."""

    concurrency: int
    drafts: bool
    warm: bool

    def __str__(self) -> str:
        drafts, cache = "drafts" if self.drafts else "no drafts", "warm" if self.warm else "cold"
        return f"{self.concurrency}, {drafts}, {cache}"


@dataclass(frozen=True)
class Difference:
    """An answer that differs: its request, and both texts from their first difference on."""

    request: IdentityRequest
    text: str
    expected: str

    def __str__(self) -> str:
        return f"{self.request.prompt[:_SHOWN]!r}: {self.text[:_SHOWN]!r}, and expected {self.expected[:_SHOWN]!r}"


@dataclass(frozen=True)
class IdentityResult:
    """The answers of a server in one case. `cached`: share of the prompts' tokens that its cache had."""

    server: str
    case: IdentityCase
    greedy: int
    sampled: int
    cached: float
    differences: tuple[Difference, ...]

    def share(self, sampled: bool) -> float:
        """Share of the greedy answers, or of those with seeds, that are as expected; 1 where there are none."""
        wrong = sum((d.request.seed is not None) is sampled for d in self.differences)
        return 1 - wrong / max(1, self.sampled if sampled else self.greedy)


def identity_requests(prompts: Sequence[str], count: int | None = None) -> list[IdentityRequest]:
    """Every prompt greedily and with a seed; `count`: so many requests, for which the prompts are repeated with a
    number behind them.
    """
    count = 2 * len(prompts) if count is None else count
    pairs = (divmod(i // 2, len(prompts)) for i in range(count))
    texts = [prompts[n] if not k else f"{prompts[n]} ({k + 1})" for k, n in pairs]
    return [IdentityRequest(text, _FIRST_SEED + i // 2 if i % 2 else None) for i, text in enumerate(texts)]


def expected_answers(server: Server, requests: Sequence[IdentityRequest], max_tokens: int) -> list[str]:
    """The text of every request alone, without drafts and with a cold cache.

    Raises:
        ValueError: a request failed.
    """
    alone, run = IdentityCase(1, False, False), uuid4().hex
    return [_ask(server, request, max_tokens, alone, f"{run}-{i}").text for i, request in enumerate(requests)]


def check_identity(
    server: Server,
    requests: Sequence[IdentityRequest],
    max_tokens: int,
    expected: Sequence[str],
    concurrencies: Sequence[int],
    on_result: Callable[[IdentityResult], None] | None = None,
) -> list[IdentityResult]:
    """Compare the answers of every case with the expected ones: at every number of streams without and with drafts,
    each with a cold and a warm cache.

    Every stream sends each of its requests twice. The field `cache_salt` keeps the cache of a request apart from that
    of all others, so that it is cold the first time and warm the second.

    Raises:
        ValueError: a request failed.
    """
    results = list[IdentityResult]()
    for streams, drafts in product(concurrencies, (False, True)):
        cold, warm = (IdentityCase(streams, drafts, warm=warm) for warm in (False, True))
        run = uuid4().hex

        def twice(numbered: tuple[int, IdentityRequest], case: IdentityCase = cold, run: str = run) -> list[Answer]:
            number, request = numbered
            return [_ask(server, request, max_tokens, case, f"{run}-{number}") for _ in range(2)]

        with ThreadPoolExecutor(cold.concurrency) as pool:
            answers = list(pool.map(twice, enumerate(requests)))
        for time, case in enumerate((cold, warm)):
            results.append(_compare(server.name, case, requests, [pair[time] for pair in answers], expected))
            if on_result is not None:
                on_result(results[-1])
    return results


def _compare(
    server: str,
    case: IdentityCase,
    requests: Sequence[IdentityRequest],
    answers: Sequence[Answer],
    expected: Sequence[str],
) -> IdentityResult:
    differences = tuple(
        _difference(request, answer.text, text)
        for request, answer, text in zip(requests, answers, expected, strict=True)
        if answer.text != text
    )
    sampled = sum(request.seed is not None for request in requests)
    cached = sum(a.cached_tokens for a in answers) / max(1, sum(a.prompt_tokens for a in answers))
    return IdentityResult(server, case, len(requests) - sampled, sampled, cached, differences)


def _ask(server: Server, request: IdentityRequest, max_tokens: int, case: IdentityCase, salt: str) -> Answer:
    fields: Mapping[str, object] = {
        **json.loads(server.fields),
        **request.fields(),
        **({} if case.drafts else PLAIN),
        "cache_salt": salt,
    }
    return ask(replace(server, fields=json.dumps(fields)), request.prompt, max_tokens)


def identity_table(results: Sequence[IdentityResult]) -> TextTable:
    """A row per server and case."""

    def rows() -> Iterator[tuple[str, int, str, str, str]]:
        for r in results:
            name, answers = f"{r.server}, {r.case}", r.greedy + r.sampled
            yield name, answers, f"{r.cached:.1%}", f"{r.share(False):.1%}", f"{r.share(True):.1%}"

    header = ("server, streams, drafts, cache", "answers", "cached", "equal, temperature 0", "equal, with seeds")
    return TextTable(header, list(rows()))


def _difference(request: IdentityRequest, text: str, expected: str) -> Difference:
    pairs = enumerate(zip(text, expected, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(text), len(expected)))
    return Difference(request, text[at:], expected[at:])
