"""Whether a server gives one text for one request: every answer, under load, with drafts, with a cold cache and a warm
one, is compared with that of the same request alone, without drafts and with a cold cache.

Answers of one server in a file, so that another one, or the same after a restart, can be compared with them.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from uuid import uuid4

from foretell.bench.load_test import Answer, Server, ask
from foretell.bench.text_table import TextTable
from foretell.utils.validation import parse_json

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


def identity_cases(concurrencies: Sequence[int]) -> list[IdentityCase]:
    """All cases: at every number of streams without and with drafts, each with a cold and a warm cache."""
    return [IdentityCase(n, *rest) for n, *rest in product(concurrencies, (False, True), (False, True))]


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
    """Compare the answers of every case with the expected ones.

    Every stream sends each of its requests twice. The field `cache_salt` keeps the cache of a request apart from that
    of all others, so that it is cold the first time and warm the second.

    Raises:
        ValueError: a request failed.
    """
    results = list[IdentityResult]()
    cases = identity_cases(concurrencies)
    for cold, warm in zip(cases[::2], cases[1::2], strict=True):
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


def save_answers(path: Path, requests: Sequence[IdentityRequest], answers: Sequence[str], max_tokens: int) -> None:
    """Write one JSON object per line: prompt, seed (null: greedy), longest answer in tokens, text.

    Raises:
        ValueError: the file cannot be written.
    """
    lines = (
        json.dumps(_key(request, max_tokens) | {"text": text}, ensure_ascii=False)
        for request, text in zip(requests, answers, strict=True)
    )
    try:
        path.write_text("".join(line + "\n" for line in lines), "utf-8")
    except OSError as error:
        raise ValueError(f"{path}: the answers cannot be written: {error.strerror}") from error


def read_answers(path: Path, requests: Sequence[IdentityRequest], max_tokens: int) -> list[str]:
    """The saved texts of these requests.

    Raises:
        ValueError: the file cannot be read, is damaged, or lacks a request.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: no answers can be read: {getattr(error, 'strerror', None) or error}") from error
    texts = dict[str, str]()
    for number, line in enumerate(lines, 1):
        entry = parse_json(line, f"{path}, line {number}")
        text = entry.pop("text", None) if isinstance(entry, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"{path}, line {number}: an object with a text was expected, found {line!r:.80}")
        texts[json.dumps(entry, sort_keys=True)] = text
    keys = [json.dumps(_key(request, max_tokens), sort_keys=True) for request in requests]
    if missing := sum(key not in texts for key in keys):
        raise ValueError(
            f"{path} lacks {missing} of the {len(keys)} requests: give the --tasks, --requests and --max-new-tokens "
            "with which it was saved"
        )
    return [texts[key] for key in keys]


def _key(request: IdentityRequest, max_tokens: int) -> dict[str, object]:
    return {"prompt": request.prompt, "seed": request.seed, "max_tokens": max_tokens}
