"""`foretell top URL`: a live view of a running server."""

import math
import os
import re
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)
API_KEY_VARIABLE = "FORETELL_API_KEY"
SECONDS = 10.0
"""For an answer of the server."""
MOST_BYTES = 16 << 20
PREFIXES = ("foretell:", "vllm:")
"""Of the metrics; those of other servers are read where they have the same names."""
BARS, HISTORY = "▁▂▃▄▅▆▇█", 60
MILLISECONDS = 1000.0
PERCENTILES = (0.5, 0.95)
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
PHASES = ("draft", "verify", "sample", "host")


@dataclass(frozen=True)
class Snapshot:
    """The metrics of a server at a time: values by name without prefix, and labels."""

    at: float
    values: Mapping[tuple[str, frozenset[tuple[str, str]]], float]

    @staticmethod
    def parse(text: str, at: float) -> "Snapshot":
        """Read Prometheus' text format.

        Raises:
            ValueError: no metric of a known prefix is in it.
        """
        found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        prefix = next((p for p in PREFIXES if f"\n{p}" in f"\n{text}"), None)
        if prefix is None:
            raise ValueError("the address has no metrics of Foretell; give the address of a `foretell serve`")
        for line in text.splitlines():
            match = _SAMPLE.fullmatch(line.strip()) if line.startswith(prefix) else None
            if match is not None:
                name, labels, value = match.groups()
                found[name.removeprefix(prefix), frozenset(_LABEL.findall(labels or ""))] = float(value)
        return Snapshot(at, found)

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples of a name with these labels."""
        wanted = labels.items()
        return sum(v for (n, found), v in self.values.items() if n == name and wanted <= dict(found).items())

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums of a name by the value of a label."""
        out = defaultdict[str, float](float)
        for (n, found), value in self.values.items():
            if n == name and label in dict(found):
                out[dict(found)[label]] += value
        return out


@dataclass(frozen=True)
class Interval:
    """What happened between two readings; all rates are per second."""

    before: Snapshot
    after: Snapshot

    def more(self, name: str, **labels: str) -> float:
        """How much a counter has grown; a server that was started again counts from 0."""
        grown = self.after.total(name, **labels) - self.before.total(name, **labels)
        return grown if grown >= 0 else self.after.total(name, **labels)

    def rate(self, name: str, **labels: str) -> float:
        """Growth of a counter per second."""
        return self.more(name, **labels) / max(self.after.at - self.before.at, 1e-9)

    def ratio(self, name: str, over: str) -> float:
        """Growth of a counter over that of another; not a number if that has not grown."""
        below = self.more(over)
        return self.more(name) / below if below else math.nan

    def mean(self, histogram: str, **labels: str) -> float:
        """Mean of the values that a histogram counted."""
        count = self.more(f"{histogram}_count", **labels)
        return self.more(f"{histogram}_sum", **labels) / count if count else math.nan

    def percentile(self, histogram: str, share: float) -> float:
        """Upper bound of the bucket that holds this percentile."""
        now, then = (s.by_label(f"{histogram}_bucket", "le") for s in (self.after, self.before))
        counts = sorted((float(bound), now[bound] - then[bound]) for bound in now)
        whole = counts[-1][1] if counts else 0
        return next((bound for bound, count in counts if whole > 0 and count >= share * whole), math.nan)


@dataclass
class View:
    """The tables of the live view."""

    url: str
    speeds: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    """Tokens per second of the last intervals."""

    def render(self, found: Interval) -> "RenderableType":
        """All of it."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        self.speeds.append(found.rate("generation_tokens_total"))
        table = Table(box=None, show_header=False, padding=(0, 2))
        table.add_column(style="dim")
        for name, value in self._lines(found):
            table.add_row(name, value)
        title = Text.assemble((f"foretell top {self.url}", "bold"), f"  {time.strftime('%H:%M:%S')}")
        return Group(title, table, Text(_sparkline(self.speeds), style="cyan"))

    def _lines(self, found: Interval) -> Iterator[tuple[str, str]]:
        after = found.after
        running, waiting = after.total("num_requests_running"), after.total("num_requests_waiting")
        usage = after.total("kv_cache_usage_perc")
        hits = found.ratio("prefix_cache_hits_total", "prefix_cache_queries_total")
        finished = found.rate("request_success_total")
        yield "requests", f"{running:.0f} running, {waiting:.0f} waiting, {finished:.2f} finished/s"
        new, prompt = found.rate("generation_tokens_total"), found.rate("prompt_tokens_total")
        yield "tokens/s", f"{new:.1f} new, {prompt:.1f} of prompts"
        yield "cache", f"{usage:.1%} in use, {_percent(hits)} of prompts found"
        yield "first token", _times(found, "time_to_first_token_seconds")
        yield "between passes", _times(found, "inter_token_latency_seconds")
        drafts, accepted = "spec_decode_num_drafts_total", "spec_decode_num_accepted_tokens_total"
        accepted_share = found.ratio(accepted, "spec_decode_num_draft_tokens_total")
        length = found.ratio(accepted, drafts) + 1
        yield "speculation", f"{_number(length)} tokens per drafted pass, {_percent(accepted_share)} of drafts accepted"
        wasted = found.ratio("spec_nodes_wasted_total", "spec_nodes_verified_total")
        yield "wasted", f"{_percent(wasted)} of the verified drafts"
        means = [f"{phase} {_ms(found.mean('step_seconds', phase=phase))}" for phase in PHASES]
        yield "step", ", ".join(means)
        checks = after.by_label("shadow_checks_total", "result")
        if any(checks.values()):
            yield "shadow checks", ", ".join(f"{count:.0f} {result}" for result, count in checks.items() if count)
        reasons = sorted(after.by_label("request_success_total", "finished_reason").items())
        yield "finished", ", ".join(f"{count:.0f} {reason}" for reason, count in reasons) or "none yet"


@app.command()
def top(
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of the server.")] = "http://127.0.0.1:8000",
    interval: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="Time between two readings.")] = 1.0,
    count: Annotated[int, typer.Option(metavar="N", min=0, help="End after so many readings; 0: never.")] = 0,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help=f"API key of the server; otherwise ${API_KEY_VARIABLE}.")
    ] = None,
) -> None:
    """Watch a running server: requests, tokens per second, latencies, speculation and the parts of a step."""
    from rich.console import Console
    from rich.live import Live

    address = metrics_address(url)
    key = api_key or os.environ.get(API_KEY_VARIABLE, "").partition(",")[0]
    before, view, console = read(address, key), View(url), Console()
    if not console.is_terminal:
        for _ in range(max(count, 1)):
            time.sleep(interval)
            after = read(address, key)
            console.print(view.render(Interval(before, after)))
            before = after
        return
    with Live(console=console, screen=count == 0, auto_refresh=False) as live:
        shown = 0
        while not count or shown < count:
            time.sleep(interval)
            after = read(address, key)
            live.update(view.render(Interval(before, after)), refresh=True)
            before, shown = after, shown + 1


def metrics_address(url: str) -> str:
    """The address of the metrics of a server.

    Raises:
        ValueError: no HTTP address.
    """
    full = url if "://" in url else f"http://{url}"
    parts = urlsplit(full)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url} is no address of a server; give one such as http://127.0.0.1:8000")
    return f"{parts.scheme}://{parts.netloc}/metrics"


def read(address: str, key: str) -> Snapshot:
    """The metrics now.

    Raises:
        ValueError: the server does not answer, asks for a key, or has no metrics.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urlopen(Request(address, headers=headers), timeout=SECONDS) as answer:
            return Snapshot.parse(answer.read(MOST_BYTES).decode("utf-8", "replace"), time.monotonic())
    except HTTPError as error:
        if error.code == 401:
            raise ValueError(f"{address} asks for an API key; give it with --api-key") from None
        raise ValueError(f"{address} answers {error.code} {error.reason}") from None
    except (URLError, OSError) as error:
        raise ValueError(f"{address} does not answer: {getattr(error, 'reason', error)}") from None


def _sparkline(values: "deque[float]") -> str:
    most = max(values, default=0.0)
    return "".join(BARS[min(len(BARS) - 1, int(len(BARS) * v / most))] if most else BARS[0] for v in values)


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.0%}"


def _ms(seconds: float) -> str:
    return "–" if math.isnan(seconds) else f"{MILLISECONDS * seconds:.2f} ms"


def _times(found: Interval, histogram: str) -> str:
    bounds = [f"p{100 * share:.0f} ≤ {_ms(found.percentile(histogram, share))}" for share in PERCENTILES]
    return ", ".join([f"mean {_ms(found.mean(histogram))}", *bounds])
