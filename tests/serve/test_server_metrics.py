"""`/metrics` under our prefix and vLLM's, and the structured logs."""

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import NAME, SETTINGS, Server, running_server, wait_for

from foretell.engine.budget_statistics import COST, BudgetStatistics, Forecast
from foretell.engine.engine import Engine
from foretell.engine.request import Request, Update
from foretell.engine.statistics import RequestStatistics, StepCounts, StepTime
from foretell.serve.metrics.registry import MetricTables
from foretell.serve.metrics.request_log import JsonFormatter
from foretell.serve.metrics.requests import RequestMetrics
from foretell.serve.metrics.steps import StepMetrics

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

NAMES = re.compile(r"foretell:\w+")
PHASES = ("draft", "verify", "sample", "host")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(replace(SETTINGS, metrics_prefixes=("vllm",), log_requests=True)) as found:
        yield found


def scrape(server: Server) -> Samples:
    response = server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4") and "_created" not in response.text
    samples = [s for family in text_string_to_metric_families(response.text) for s in family.samples]
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for s in samples}


def grown(before: Samples, after: Samples, name: str, **labels: str) -> float:
    """How much the samples of a name with these labels have grown together."""

    def total(samples: Samples) -> float:
        return sum(v for (n, found), v in samples.items() if n == name and labels.items() <= dict(found).items())

    return total(after) - total(before)


def test_requests_are_counted_as_their_answers_say(server: Server) -> None:
    before = scrape(server)
    found = server.chat("abcabcabc", max_tokens=40).json()
    server.chat("abcabcabc", max_tokens=40, speculative={"max_drafts": 0})
    server.wait_until_idle()
    assert server.chat(n=0).status_code == 400 and server.http.get("/nothing/here").status_code == 404
    after = scrape(server)
    usage, speculation = found["usage"], found["metrics"]["speculative_decoding"]
    for prefix in ("foretell:", "vllm:"):

        def more(name: str, prefix: str = prefix, **labels: str) -> float:
            return grown(before, after, prefix + name, **labels)

        assert more("prompt_tokens_total", model_name=NAME, engine="0") == 2 * usage["prompt_tokens"]
        assert more("generation_tokens_total") == 80 and more("request_success_total", finished_reason="length") == 2
        assert more("prefix_cache_hits_total") == usage["prompt_tokens"] - 1
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
            assert more(f"{name}_seconds_count") == 2
        assert more("inter_token_latency_seconds_count") == speculation["num_spec_steps"] - 1 + 39
        assert more("spec_decode_num_draft_tokens_total", method="suffix") == speculation["num_draft_tokens"]
        accepted = speculation["num_accepted_draft_tokens"]
        assert more("request_params_n_sum") == more("request_num_preemptions_count") == 2
        assert more("request_max_num_generation_tokens_sum") == 80
        assert (
            more("iteration_tokens_total_sum")
            == more("generation_tokens_total")
            + more("spec_decode_num_draft_tokens_total")
            - accepted
            + usage["prompt_tokens"]
            - 1
        ), "the prompt of the first, and every token but the last once"
        assert more("spec_decode_num_accepted_tokens_total") == accepted > 0
        assert more("spec_decode_num_accepted_tokens_per_pos_total") == accepted
        assert more("http_requests_total", handler="/v1/chat/completions", status="200") == 2
        assert more("http_requests_total", handler="/v1/chat/completions", status="400") == 1
        assert more("http_requests_total", handler="other", status="404") == 1
    verified = grown(before, after, "foretell:spec_nodes_verified_total")
    assert verified - accepted == grown(before, after, "foretell:spec_nodes_wasted_total")
    assert grown(before, after, "vllm:spec_nodes_verified_total") == 0 < verified
    steps = [grown(before, after, "foretell:step_seconds_count", phase=phase) for phase in PHASES]
    assert len(set(steps)) == 1 and steps[0] >= 40
    idle = [v for (n, _), v in after.items() if n.endswith((":num_requests_running", ":kv_cache_usage_perc"))]
    assert idle == [0] * 4


def test_running_requests_show_and_aborted_ones_count(server: Server) -> None:
    before = scrape(server)
    server.engine.delay = 0.01
    connection = server.start({"max_tokens": 300, "stream": True})
    wait_for(lambda: any(s.new_tokens for s in server.engine.statistics.values()))
    during = scrape(server)
    connection.close()
    server.wait_until_idle()
    server.engine.delay = 0.0
    assert grown(before, during, "foretell:num_requests_running") == 1
    assert 0 < grown(before, during, "foretell:kv_cache_usage_perc") < 1
    assert grown(before, scrape(server), "vllm:request_success_total", finished_reason="abort") == 1


def test_logs_are_json_and_have_texts_only_if_asked(server: Server, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "foretell.serve"):
        server.post(
            "/v1/completions", {"prompt": "secret", "max_tokens": 3, "temperature": 0}, headers={"X-Request-Id": "mine"}
        )
        with running_server() as quiet:
            quiet.chat("secret")
    lines = [json.loads(JsonFormatter().format(r)) for r in caplog.records if hasattr(r, "fields")]
    asked, silent = [line for line in lines if line["event"] == "request"]
    assert asked["request_id"] == "mine" and asked["prompt"] == "secret" and len(asked["answer"]) >= 1
    assert asked["finish_reason"] == "length" and asked["completion_tokens"] == 3 and asked["method"] == "suffix"
    assert "secret" not in json.dumps(silent) and "answer" not in silent and silent["request_id"]
    paths = [line["path"] for line in lines if line["event"] == "http"]
    assert "/v1/completions" in paths and "/health" not in paths


def test_the_dashboard_asks_for_metrics_that_there_are(server: Server) -> None:
    server.chat("abcabcabc", max_tokens=30)
    board = json.loads((Path(__file__).parents[2] / "deploy" / "grafana.json").read_text("utf-8"))
    asked = {name for panel in board["panels"] for t in panel.get("targets", ()) for name in NAMES.findall(t["expr"])}
    assert len(asked) > 25 and asked <= {name for name, _ in scrape(server)}


def test_expected_and_obtained_gains_are_measured(server: Server) -> None:
    before = scrape(server)
    for _ in range(3):
        server.chat("abcabcabc", max_tokens=60)
        server.chat("abcabcabc", max_tokens=60, speculative={"max_drafts": 0})
    server.wait_until_idle()
    after = scrape(server)
    with_drafts, without = (grown(before, after, "foretell:spec_steps_total", drafts=d) for d in ("yes", "no"))
    assert with_drafts > 0 and without >= 3 * 59
    assert grown(before, after, "foretell:spec_undrafted_requests_total", reason="asked") == 3
    obtained = grown(before, after, "foretell:spec_obtained_tokens_total")
    assert obtained >= 3 * 59 and grown(before, after, "foretell:spec_expected_tokens_total") >= 3 * 59
    plain, spent = (grown(before, after, f"foretell:spec_{n}_seconds_total") for n in ("plain", "decode"))
    assert plain > 0 and spent > 0
    for name in ("realised", "predicted"):
        (speedup,) = [v for (n, _), v in after.items() if n == f"foretell:spec_{name}_speedup"]
        assert 0.05 < speedup < 20
    values = {n: v for (n, _), v in after.items()}
    assert values["foretell:kv_cache_unowned_rows"] == 0
    assert values["foretell:process_resident_memory_bytes"] > 1e6 and values["foretell:process_open_fds"] > 3


def test_step_metrics_compare_drafting_with_plain_decoding() -> None:
    """Passes of one second each; drafts give three tokens where two were expected."""
    tables = MetricTables(())
    metrics = StepMetrics(tables, (NAME, "0"))

    def read_by_passes() -> float:
        samples = (s for family in text_string_to_metric_families(tables.text().decode()) for s in family.samples)
        return next(s.value for s in samples if s.name == "foretell:iteration_tokens_total_count")

    budget = SimpleNamespace(last=None, statistics=BudgetStatistics())
    engine = SimpleNamespace(budget=budget, last_step=None, busy=True)
    plain = StepCounts(requests=1, read=1, reads_prompt=False, new=1)
    drafted = StepCounts(1, 4, False, drafted=3, accepted=2, new=3)
    prompt = StepCounts(1, 64, True, new=1)
    for counts in [prompt, *[plain, drafted] * 200]:
        engine.last_step = StepTime(0.25 if counts.drafted else 0.0, 1.0, 2.0, 0.0, counts)
        budget.last = Forecast(1.25, 1.0, 2.0) if counts.drafted else Forecast(1.0, 1.0, 1.0)
        metrics.step(cast(Engine, engine), 2.0)
    assert read_by_passes() % 32 == 0  # Steps of a busy engine are counted together,
    engine.busy = False
    metrics.step(cast(Engine, engine), 2.0)
    assert read_by_passes() == 402  # and the last ones of an idle engine at once.
    # Half of the steps take 1.25 s for 3 tokens, which plain decoding takes 3 s for.
    assert metrics.realised_speedup() == pytest.approx((1 + 3) / (1 + 1.25), rel=0.05)
    assert metrics.predicted_speedup() == pytest.approx((1 + 2) / (1 + 1.25), rel=0.05)
    assert metrics.drafts_per_request() == pytest.approx(1.5, rel=0.05)
    assert metrics.predicted_tokens() == pytest.approx((1 + 2) / 2, rel=0.05)
    assert metrics.realised_tokens() == pytest.approx((1 + 3) / 2, rel=0.05)


def test_decisions_against_drafts_are_counted() -> None:
    def samples(label: str) -> dict[tuple[str, str], float]:
        found = text_string_to_metric_families(tables.text().decode())
        return {(s.name, s.labels.get(label, "")): s.value for family in found for s in family.samples}

    tables = MetricTables(())
    requests = RequestMetrics(tables, (NAME, "0"), lambda request: "suffix")
    for most in (None, 0, 0):
        requests.opened(1, Request([1], max_drafts=most))
        requests.updated(1, 1.0, Update(1, (5,), "a", 0, finish_reason="length", statistics=RequestStatistics()))
    steps, statistics = StepMetrics(tables, (NAME, "0")), BudgetStatistics()
    budget = SimpleNamespace(statistics=statistics, last=Forecast())
    engine = SimpleNamespace(budget=budget, last_step=StepTime(0.0, 1.0, 1.0), busy=False)
    for on, off in ((0, 1), (1, 2), (0, 1)):  # The last one is the first step of a new engine.
        statistics.switched_on, statistics.switched_off, statistics.undrafted[COST] = on, off, 3 * off
        steps.step(cast(Engine, engine), 1.0)
    assert [samples("to")["foretell:spec_controller_switches_total", to] for to in ("off", "on")] == [3, 1]
    found = samples("reason")
    assert [found["foretell:spec_undrafted_steps_total", r] for r in ("cost", "load", "measured")] == [9, 0, 0]
    assert found["foretell:spec_undrafted_requests_total", "asked"] == 2


def test_refusals_and_waiting_requests_are_counted_by_reason() -> None:
    limits = replace(SETTINGS.limits, queued_requests=0)
    with running_server(replace(SETTINGS, limits=limits), rows=1) as small:
        small.engine.delay = 0.02
        connection = small.start({"max_tokens": 300, "stream": True})
        wait_for(lambda: small.service.jobs.live == 1)
        assert small.chat().status_code == 429
        found = scrape(small)
        connection.close()
    values = {(n, dict(labels).get("reason")): v for (n, labels), v in found.items()}
    assert values["foretell:admission_rejections_total", "queue"] == 1
    assert values["foretell:admission_rejections_total", "key"] == 0
    assert values["foretell:num_requests_waiting_by_reason", "reader"] == 0
