"""Records put together into `results.json`."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from foretell.bench.competitor import PLAIN
from foretell.bench.machine import describe
from foretell.bench.metrics import DEFINITIONS, figures, mean, per_question, price, spec_bench
from foretell.bench.schema import Contender, Record, Results, Settings


def collect(
    records: Sequence[Record], settings: Settings, lossless: Mapping[str, bool], memory: Mapping[str, int] | None = None
) -> Results:
    """All figures of a run. `lossless` names its contenders in order, `memory` their peaks in bytes where measured."""
    by_name = {name: [r for r in records if r.contender == name] for name in lossless}
    own = f"{PLAIN}/{settings.dtypes[0]}"
    peers = {n: rs for n, rs in by_name.items() if is_peer(n)}
    contenders = []
    for name, mine in by_name.items():
        plain = by_name.get(f"{PLAIN}/{name.split('/')[1]}") if not is_peer(name) else None
        plain = by_name.get(own, []) if plain is None else plain
        contenders.append(_contender(name, mine, plain, peers, lossless[name], (memory or {}).get(name)))
    return Results(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=describe(settings.device),
        settings=settings,
        repeats=1 + max((r.repeat for r in records), default=0),
        definitions=DEFINITIONS,
        contenders=tuple(contenders),
    )


def is_peer(name: str) -> bool:
    """Whether a contender of this name is another runtime."""
    return name.startswith(("transformers-", "llama.cpp-"))


def _contender(
    name: str,
    mine: Sequence[Record],
    plain: Sequence[Record],
    peers: Mapping[str, Sequence[Record]],
    lossless: bool,
    memory: int | None,
) -> Contender:
    categories = {}
    for category in dict.fromkeys(r.category for r in mine if r.refused is None):

        def here(records: Sequence[Record], category: str = category) -> list[Record]:
            return [r for r in records if r.category == category]

        categories[category] = figures(here(mine), here(plain), {n: here(rs) for n, rs in peers.items()})
    compared = [r for r in mine if r.compared]
    return Contender(
        name=name,
        peer=is_peer(name),
        lossless=lossless,
        categories=categories,
        pooled=figures(mine, plain, peers),
        mean=mean(list(categories.values())),
        spec_bench=spec_bench(mine, plain),
        identical=sum(r.divergence is None for r in compared),
        compared=len(compared),
        divergences=tuple(r.divergence for r in compared if r.divergence is not None),
        refused={r.question: r.refused for r in mine if r.refused is not None},
        price=price(mine),
        peak_memory_bytes=memory,
        per_question=tuple(per_question(mine)),
    )
