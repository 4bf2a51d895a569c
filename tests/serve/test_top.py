"""`foretell top`."""

import re

import pytest
from serving import running_server

from command import expect_error, run_foretell
from foretell.bench.server_metrics import Interval, Snapshot, metrics_address

BEFORE = """
# HELP foretell:x_seconds text
foretell:x_seconds_bucket{le="0.1"} 1.0
foretell:x_seconds_bucket{le="1.0"} 1.0
foretell:x_seconds_bucket{le="+Inf"} 1.0
foretell:x_seconds_count 1.0
foretell:x_seconds_sum 0.05
foretell:n_total{a="b\\"c",d="e"} 4.0
vllm:n_total 100.0
"""
AFTER = (
    BEFORE.replace("} 1.0", "} 11.0").replace('le="0.1"} 11.0', 'le="0.1"} 3.0').replace("_count 1.0", "_count 11.0")
)


def test_rates_means_and_percentiles() -> None:
    then = Snapshot.parse(BEFORE, 0.0)
    now = Snapshot.parse(AFTER.replace("0.05", "5.05").replace(" 4.0", " 10.0"), 2.0)
    found = Interval(then, now)
    assert found.rate("n_total") == 3 and found.rate("n_total", d="e") == 3 and found.rate("n_total", d="f") == 0
    assert found.mean("x_seconds") == pytest.approx(0.5)
    assert found.percentile("x_seconds", 0.1) == 0.1 and found.percentile("x_seconds", 0.5) == 1.0
    assert Interval(now, then).more("n_total") == 4


def test_it_shows_a_running_server_and_says_what_is_wrong() -> None:
    assert metrics_address("host:80/v1") == "http://host:80/metrics"
    with running_server() as server:
        server.chat("abcabc", max_tokens=30)
        server.chat("abcabc", max_tokens=60, speculative={"max_drafts": 0})
        shown = run_foretell("top", server.url, "--interval", "0.1", "--count", "2").stdout
        assert shown.count("tokens/s") == 2, shown
        assert "0 running" in shown and "2 length" in shown
        budget = re.search(
            r"([0-9.]+) drafts a request and pass; tokens: ([0-9.]+) expected, ([0-9.]+) obtained", shown
        )
        assert budget and float(budget[2]) >= 1 and float(budget[3]) >= 1
    assert "does not answer" in expect_error("top", server.url)
    assert "is no address" in expect_error("top", "ftp://x")
