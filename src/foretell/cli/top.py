"""`foretell top URL`: a live view of a running server."""

import math
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.bench.server_metrics import Interval, metrics_address, read_metrics

if TYPE_CHECKING:
    from rich.console import RenderableType

app = typer.Typer(pretty_exceptions_enable=False)
API_KEY_VARIABLE = "FORETELL_API_KEY"
BARS, HISTORY = "▁▂▃▄▅▆▇█", 60
MILLISECONDS = 1000.0
PERCENTILES = (0.5, 0.95)
PHASES = ("draft", "verify", "sample", "host")


@dataclass
class View:
    """The tables of the live view."""

    url: str
    speeds: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    """Tokens per second of the last intervals."""

    def render(self, interval: Interval) -> "RenderableType":
        """All of it."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        self.speeds.append(interval.rate("generation_tokens_total"))
        table = Table(box=None, show_header=False, padding=(0, 2))
        table.add_column(style="dim")
        for name, value in self._lines(interval):
            table.add_row(name, value)
        title = Text.assemble((f"foretell top {self.url}", "bold"), f"  {time.strftime('%H:%M:%S')}")
        return Group(title, table, Text(_sparkline(self.speeds), style="cyan"))

    def _lines(self, interval: Interval) -> Iterator[tuple[str, str]]:
        after = interval.after
        running, waiting = after.total("num_requests_running"), after.total("num_requests_waiting")
        usage = after.total("kv_cache_usage_perc")
        hits = interval.ratio("prefix_cache_hits_total", "prefix_cache_queries_total")
        finished = interval.rate("request_success_total")
        yield "requests", f"{running:.0f} running, {waiting:.0f} waiting, {finished:.2f} finished/s"
        new, prompt = interval.rate("generation_tokens_total"), interval.rate("prompt_tokens_total")
        yield "tokens/s", f"{new:.1f} new, {prompt:.1f} of prompts"
        yield "cache", f"{usage:.1%} in use, {_percent(hits)} of prompts found"
        yield "first token", _times(interval, "time_to_first_token_seconds")
        yield "between passes", _times(interval, "inter_token_latency_seconds")
        drafts, accepted = "spec_decode_num_drafts_total", "spec_decode_num_accepted_tokens_total"
        accepted_share = interval.ratio(accepted, "spec_decode_num_draft_tokens_total")
        length = interval.ratio(accepted, drafts) + 1
        yield "speculation", f"{_number(length)} tokens per drafted pass, {_percent(accepted_share)} of drafts accepted"
        wasted = interval.ratio("spec_nodes_wasted_total", "spec_nodes_verified_total")
        yield "wasted", f"{_percent(wasted)} of the verified drafts"
        gain = interval.ratio("spec_plain_seconds_total", "spec_decode_seconds_total")
        predicted = after.total("spec_predicted_speedup")
        yield "speed-up", f"{_number(gain)} over plain decoding, {_number(predicted)} predicted lately"
        names = "drafts_per_request", "predicted_tokens_per_pass", "realised_tokens_per_pass"
        count, expected, obtained = (_number(after.total(f"spec_{name}")) for name in names)
        yield "budget", f"{count} drafts a request and pass; tokens: {expected} expected, {obtained} obtained"
        undrafted = after.by_label("spec_undrafted_steps_total", "reason").items()
        yield "not drafted", ", ".join(f"{count:.0f} {reason}" for reason, count in undrafted if count) or "none yet"
        means = [f"{phase} {_ms(interval.mean('step_seconds', phase=phase))}" for phase in PHASES]
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
    before, view, console = read_metrics(address, key), View(url), Console()
    if not console.is_terminal:
        for _ in range(max(count, 1)):
            time.sleep(interval)
            after = read_metrics(address, key)
            console.print(view.render(Interval(before, after)))
            before = after
        return
    with Live(console=console, screen=count == 0, auto_refresh=False) as live:
        shown = 0
        while not count or shown < count:
            time.sleep(interval)
            after = read_metrics(address, key)
            live.update(view.render(Interval(before, after)), refresh=True)
            before, shown = after, shown + 1


def _sparkline(values: "deque[float]") -> str:
    most = max(values, default=0.0)
    return "".join(BARS[min(len(BARS) - 1, int(len(BARS) * v / most))] if most else BARS[0] for v in values)


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.0%}"


def _ms(seconds: float) -> str:
    return "–" if math.isnan(seconds) else f"{MILLISECONDS * seconds:.2f} ms"


def _times(interval: Interval, histogram: str) -> str:
    bounds = [f"p{100 * share:.0f} ≤ {_ms(interval.percentile(histogram, share))}" for share in PERCENTILES]
    return ", ".join([f"mean {_ms(interval.mean(histogram))}", *bounds])
