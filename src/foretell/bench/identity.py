"""Whether a server under load gives the text of plain decoding: every answer is compared with that of the same request
alone and without drafts.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from foretell.bench.load_test import Server, Workload, ask
from foretell.bench.text_table import TextTable

PLAIN = {"speculative": {"max_drafts": 0}}
_FIRST_SEED = 1000
_SHOWN = 30
"""Characters of the texts that are shown from their first difference on."""


@dataclass(frozen=True)
class Difference:
    """An answer that differs: the prompt, and both texts from their first difference on."""

    prompt: str
    text: str
    plain: str

    def __str__(self) -> str:
        return f"{self.prompt[:_SHOWN]!r}: {self.text[:_SHOWN]!r}, and plainly {self.plain[:_SHOWN]!r}"


@dataclass(frozen=True)
class IdentityResult:
    """The answers of a server with so many streams at a time, half of them greedy and half sampled with a seed."""

    server: str
    concurrency: int
    sampled: bool
    answers: int
    differences: tuple[Difference, ...]

    @property
    def share(self) -> float:
        """Share of the answers that are equal."""
        return 1 - len(self.differences) / self.answers


def check_identity(
    server: Server,
    workload: Workload,
    concurrencies: Sequence[int],
    on_result: Callable[[IdentityResult], None] | None = None,
) -> list[IdentityResult]:
    """Compare all answers, greedy and with a seed per prompt at temperature 1.

    Raises:
        ValueError: a request failed.
    """
    requests = [_Case(server, p, i, sampled) for i, p in enumerate(workload.prompts) for sampled in (False, True)]
    plain = [case.ask(workload.max_tokens, plain=True) for case in requests]
    found = list[IdentityResult]()
    for concurrency in concurrencies:
        with ThreadPoolExecutor(concurrency) as pool:
            texts = list(pool.map(lambda case: case.ask(workload.max_tokens), requests))
        for sampled in (False, True):
            pairs = [
                (case, *pair) for case, *pair in zip(requests, texts, plain, strict=True) if case.sampled is sampled
            ]
            differences = tuple(_difference(case.prompt, text, other) for case, text, other in pairs if text != other)
            found.append(IdentityResult(server.name, concurrency, sampled, len(pairs), differences))
            if on_result is not None:
                on_result(found[-1])
    return found


@dataclass(frozen=True)
class _Case:
    """A request of the check."""

    server: Server
    prompt: str
    number: int
    sampled: bool

    def ask(self, max_tokens: int, plain: bool = False) -> str:
        """The text of its answer."""
        sampling = {"temperature": 1, "seed": _FIRST_SEED + self.number} if self.sampled else {"temperature": 0}
        fields = json.loads(self.server.fields) | sampling | (PLAIN if plain else {})
        return ask(replace(self.server, fields=json.dumps(fields)), self.prompt, max_tokens).text


def identity_table(results: Sequence[IdentityResult]) -> TextTable:
    """A row per server and number of streams."""

    def rows() -> Iterator[tuple[str, int, str, str]]:
        for greedy, sampled in zip(results[::2], results[1::2], strict=True):
            name = f"{greedy.server}, {greedy.concurrency}"
            yield name, greedy.answers + sampled.answers, f"{greedy.share:.1%}", f"{sampled.share:.1%}"

    return TextTable(("server, streams", "answers", "equal, temperature 0", "equal, with seeds"), list(rows()))


def _difference(prompt: str, text: str, plain: str) -> Difference:
    at = next((i for i, (a, b) in enumerate(zip(text, plain, strict=False)) if a != b), min(len(text), len(plain)))
    return Difference(prompt, text[at:], plain[at:])
