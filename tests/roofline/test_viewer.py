"""The page in a browser: it loads, agrees with the command line, and fits a laptop and a phone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chromium import needs_browser, running_browser
from foretell.cli.roofline import app
from foretell.roofline.arrivals import poisson_requests
from roofline_page import open_page, run_cli, screenshot, served_page, settle, show_state, text

pytestmark = needs_browser
ARROW_DOWN = "\ue015"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served_page() as found:
        yield found


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with running_browser(tmp_path_factory.mktemp("profile"), 1440, 900, 20) as driver:
        yield driver


QUESTIONS = (
    "model=llama-2-7b&context=2048&fusion=none&runtime=datasheet",
    "model=llama-3.1-70b&hardware=a100-80g&devices=8&weights=4g128&head=16&runtime=compiled",
    "model=llama-3.1-8b&hardware=h100-sxm&weights=fp8&activations=fp8&head=16&batch=4",
    "model=llama-2-7b&hardware=h100-sxm&batch=32&stage=verify&tokens=9&runtime=eager",
    "model=llama-2-7b&stage=prefill&context=2048&fusion=none&square=true",
    "model=llama-3-70b&hardware=h100-sxm&stage=verify&tokens=64&batch=16&devices=8&weights=fp8&activations=fp8&kv=8",
    "model=mixtral-8x7b&hardware=a100-80g&stage=chat&batch=3&context=700&generate=90&weights=4g128",
    "model=deepseek-v3&hardware=b200&stage=chunked&batch=5&context=3000&chunk=700&devices=8&fusion=full",
    "model=gemma-3-27b&hardware=rtx-5090&context=90000&kv=2g32z&weights=4&activations=4",
    "model=opt-6.7b&hardware=v100&stage=prefill&context=100&weights=3",
    "model=gpt-j-6b&hardware=m1-ultra&stage=verify&tokens=9&batch=2",
    "model=qwen3-30b-a3b&hardware=aim&context=5&bandwidth=500&peak=2&capacity=80",
    "model=qwen3-next-80b-a3b&hardware=h200&stage=chunked&chunk=300&context=700&batch=4&devices=2",
)


def command(state: str) -> list[str]:
    pairs = dict(p.split("=") for p in state.split("&"))
    square = pairs.pop("square", None)
    return ["analyze", pairs.pop("model"), *[f"--{k}={v}" for k, v in pairs.items()], *(["--square"] if square else [])]


@pytest.mark.parametrize("state", QUESTIONS)
def test_the_page_agrees_with_the_command_line(browser: Any, address: str, state: str) -> None:
    show_state(browser, address, state)
    found = browser.execute_script(
        "const a = Roofline.answer(); return {seconds: a.seconds, ops: a.ops, bytes: a.bytes, link: a.total[6], "
        "memory: a.memory,"
        "batch: a.largestBatch, context: a.longestContext, fits: a.fits, tokens: a.tokens,"
        "lines: Object.fromEntries(a.lines.map(l => [l.key, [l.cost[0], l.bytes, l.seconds, l.bound]]))}"
    )
    expected = run_cli(*command(state))
    total, memory = expected["total"], expected["memory"]
    for key in ("seconds", "ops", "bytes", "link", "tokens"):
        assert found[key] == pytest.approx(total[key], rel=1e-9), key
    for key in ("weights", "kv", "activations", "total"):
        assert found["memory"][key] == pytest.approx(memory[key], rel=1e-9), key
    assert (found["batch"], found["context"], found["fits"]) == (
        memory["largest_batch"],
        memory["longest_context"],
        memory["fits"],
    )
    for op in expected["operations"]:
        ops, moved, seconds, bound = found["lines"].pop(f"{op['group']}/{op['operation']}")
        assert (ops, moved, seconds) == pytest.approx((op["ops"], op["bytes"], op["seconds"]), rel=1e-9), op[
            "operation"
        ]
        assert bound == op["bound"]
    assert not found["lines"]


PLANS = (
    ("model=llama-3-8b&hardware=a100-80g", ""),
    ("model=mixtral-8x7b&hardware=h100-sxm&batch=4", ""),
    ("model=opt-30b&hardware=l40s&batch=64&devices=1", ""),
    ("model=llama-3-8b&hardware=h100-sxm&batch=8", "accept=0.7&share=0.25&density=0.1"),
    ("model=llama-2-13b&hardware=a100-80g&runtime=eager", "draft=vicuna-7b&nodes=20"),
    ("model=llama-3-70b&hardware=h100-sxm&devices=4&batch=32&weights=fp8&activations=fp8", "chain=4"),
    ("model=qwen3-30b-a3b&hardware=h100-sxm&batch=3&weights=4g128&head=16", "tree=60x5&tau=3.5"),
    ("model=qwen3-next-80b-a3b&hardware=h200&batch=2&devices=2", ""),
)


@pytest.mark.parametrize(("state", "drafts"), PLANS)
def test_the_methods_agree_with_the_command_line(browser: Any, address: str, state: str, drafts: str) -> None:
    show_state(browser, address, f"{state}&{drafts}")
    found = {g["name"]: g for g in browser.execute_script("return Roofline.methods.plan(Roofline.state.now)")}
    options = dict(pair.split("=") for pair in drafts.split("&") if pair)
    given = [f"--{'tokens' if name == 'chain' else name}={value}" for name, value in options.items()]
    expected = run_cli("plan", *command(state)[1:], *given)
    assert {n for n, g in found.items() if "unavailable" in g} == set(expected["unavailable"])
    for row in expected["methods"][:-1]:
        mine = found[row["method"]]
        assert (mine["nodes"], mine["depth"], mine["basis"]) == (row["nodes"], row["depth"], row["basis"])
        assert (mine["speedup"], mine["goodput"]) == pytest.approx((row["speedup"], row["goodput"]), rel=1e-9)
        assert mine["range"] == pytest.approx((row["low"], row["high"]), rel=1e-9)
    variants = browser.execute_script("return Roofline.variants.list(Roofline.state.now)")
    assert {v["name"]: v["seconds"] for v in variants} == pytest.approx(
        {v["variant"]: v["seconds"] for v in expected["variants"]}, rel=1e-9
    )
    top, says = expected["methods"][0], text(browser, "#methods .advice")
    if top["low"] > 1:
        gain = f"{top['speedup']:.2f}× ({top['low']:.2f} to {top['high']:.2f})"
        assert says == f"Use {top['method']}: {gain} predicted."


@pytest.mark.parametrize(
    ("state", "offload", "tier", "place"),
    [
        ("model=llama-2-70b&hardware=rtx-4090", (1, 0), "ddr", "device"),
        ("model=mixtral-8x7b&hardware=h100-sxm&batch=8&stage=verify", (0.5, 0.25), "nvme", "device"),
        ("model=llama-3-70b&hardware=a6000&stage=chat&generate=40&batch=2", (0.75, 1), "ddr-server", "host"),
    ],
)
def test_offloading_agrees_with_the_command_line(
    browser: Any, address: str, state: str, offload: tuple[float, float], tier: str, place: str
) -> None:
    weights, kv = offload
    where = f"&offloadWeights={weights}&offloadKv={kv}&tier={tier}&offloadCompute={place}"
    show_state(browser, address, state + where)
    found = browser.execute_script("return Roofline.answer().offload")
    options = (f"--offload=weights={weights},kv={kv}", f"--tier={tier}", f"--offload-compute={place}")
    expected = run_cli(*command(state), *options)["offload"]
    for key in ("seconds", "resident", "fetched"):
        assert found[key] == pytest.approx(expected[key], rel=1e-9), key
    assert found["bound"] == expected["bound"]
    quick = browser.execute_script("return Roofline.engine.quick(Roofline.state.now).seconds")
    assert quick == pytest.approx(expected["seconds"], rel=1e-9)


PAGE_NAMES = {"rate": "rates", "tokens": "chain"}
"""Settings of the page that have another name than the command line's option."""


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("eagle3", {"rate": "2,12", "requests": 60}),
        ("draft_model", {"rate": "0.5", "requests": 50, "draft": "llama-3.2-1b", "tokens": 5}),
        ("medusa", {"rate": "40", "requests": 150, "tree": "20x4", "tau": 2.5}),
        ("ngram", {"rate": "30", "requests": 80, "running": 8, "prompt": 3000, "output": 90}),
    ],
)
def test_the_simulated_load_agrees_with_the_command_line(
    browser: Any, address: str, method: str, options: dict[str, Any]
) -> None:
    show_state(browser, address, "model=llama-3-8b&hardware=h100-sxm")
    found = browser.execute_script(
        "const load = Roofline.arrivals.prepare({...Roofline.state.now, ...arguments[0]}, arguments[1]);"
        "return load.rates.map(load.at)",
        {PAGE_NAMES.get(name, name): value for name, value in options.items()},
        method,
    )
    expected = run_cli("load", "llama-3-8b", f"--method={method}", *[f"--{k}={v}" for k, v in options.items()])
    assert len(found) == len(expected)
    for mine, row in zip(found, expected, strict=True):
        assert mine["plain"]["rate"] == pytest.approx(row["rate"], rel=1e-9)
        for kind, prefix in (("plain", ""), ("drafted", "drafted_")):
            for name in ("ttft", "tpot", "latency"):
                both = [row[f"{prefix}{name}_p50"], row[f"{prefix}{name}_p99"]]
                assert mine[kind][name] == pytest.approx(both, rel=1e-9), name
            totals = [row[f"{prefix}{key}"] for key in ("mean_latency", "goodput", "tokens_per_second")]
            mine_totals = [mine[kind][key] for key in ("meanLatency", "goodput", "tokensPerSecond")]
            assert mine_totals == pytest.approx(totals, rel=1e-9)


def test_the_page_draws_the_arrivals_of_the_command_line(browser: Any, address: str) -> None:
    open_page(browser, address)
    found = browser.execute_script("return Roofline.arrivals.poisson(2.5, 700, 10, 90)")
    expected = poisson_requests(2.5, 700, 10, 90)
    assert [r["output"] for r in found] == [r.output for r in expected]
    assert [r["arrival"] for r in found] == pytest.approx([r.arrival for r in expected], rel=1e-9)


def test_it_loads_draws_and_accepts_clicks_and_keys(browser: Any, address: str) -> None:
    open_page(browser, address)
    assert not browser.get_log("browser")
    assert len(browser.find_elements("css selector", "#graph .op")) == 17
    browser.execute_script(
        "document.querySelector('[data-key=\"layer/attention\"]').dispatchEvent(new MouseEvent('click', {bubbles: "
        "true}))"
    )
    assert text(browser, "#operation h2").startswith("attention")
    assert "#op=layer%2Fattention" in browser.current_url
    browser.execute_script("document.querySelector('.op.chosen').focus()")
    browser.switch_to.active_element.send_keys(ARROW_DOWN)
    assert text(browser, "#operation h2").startswith("o_proj")
    assert browser.execute_script("return document.activeElement.dataset.key") == "layer/o_proj"
    assert browser.find_elements("css selector", "#roof .dot.chosen")
    screenshot(browser, "page")


def test_typing_changes_the_numbers_and_the_link_restores_them(browser: Any, address: str) -> None:
    open_page(browser, address)
    before = text(browser, "#headline")
    field = browser.find_element("css selector", "input[name=batch]:not([type=range])")
    field.clear()
    field.send_keys("32")
    for _ in range(20):
        settle(browser)
        if "batch=32" in browser.current_url:
            break
    after, link = text(browser, "#headline"), browser.current_url
    assert before != after and "batch=32" in link
    browser.get("about:blank")
    browser.get(link)
    settle(browser)
    assert text(browser, "#headline") == after


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("batch=abc", "batch must be a whole number between 1 and 1,048,576; “abc” is not"),
        ("batch=2.5", "“2.5” is not"),
        ("batch=", "it is empty"),
        ("offloadWeights=2", "offloaded part of weights must lie between 0 and 1; “2” is not"),
        ("offloadWeights=1&tier=tape", "no memory tier called “tape”"),
        ("offloadWeights=1&hardware=aim", "states no link to host memory"),
        ("accept=1.5", "acceptance must lie between 0 and 1; “1.5” is not"),
        ("tree=6", "A tree is drafted nodes x depth, as 60x6; “6” is not"),
        ("tree=3x5", "A tree of depth 5 needs"),
        ("chain=4&tree=60x6", "Give a chain or a tree, not both"),
        ("tau=3", "give one of them, too"),
        ("chain=4&tau=9", "tokens per pass must lie between 1 and 5"),
        ("nodes=0", "largest tree must be a whole number between 1 and 256"),
        ("density=0", "density must lie above 0"),
        ("draft=gpt-5", "no draft model called “gpt-5”"),
        ("rates=fast", "rates must be requests a second"),
        ("requests=0", "requests must be a whole number between 1 and 2,000"),
        ("ttft=-1", "limit must be positive"),
        ("model=llama-3-9b", "no model called “llama-3-9b”"),
        ("hardware=a9000", "no hardware called “a9000”"),
        ("bandwidth=-5", "bandwidth must be a positive number"),
        ("batch=0", "batch must be a whole number between 1"),
        ("devices=5&hardware=h100-sxm", "cannot share the 32 heads"),
        ("devices=2&hardware=aim", "states no link"),
        ("model=llama-2-70b", "does not fit: it needs 138 GB and NVIDIA RTX A6000 has 48 GB"),
    ],
)
def test_errors_are_one_sentence(browser: Any, address: str, state: str, message: str) -> None:
    show_state(browser, address, state)
    assert message in text(browser, "#alert")
    assert not browser.get_log("browser")


def test_downloads(browser: Any, address: str) -> None:
    open_page(browser, address, "model=llama-2-7b")
    lines = browser.execute_script("return Roofline.table()").splitlines()
    assert lines[0].startswith("group,count,operation") and len(lines) == 18
    kind, size = browser.execute_async_script(
        "const done = arguments[0]; Roofline.picture().then(b => done([b.type, b.size]))"
    )
    assert kind == "image/png" and size > 20_000


def test_the_export_opens_from_disk_and_loads_nothing(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert CliRunner().invoke(app, ["export", str(file)]).exit_code == 0
    browser.get(file.as_uri())
    assert "per pass" in text(browser, "#headline")
    browser.execute_script("document.getElementById('use').click()")
    settle(browser)
    assert "run `foretell roofline view`" in text(browser, "#pasted")
    assert (
        browser.execute_script(
            "return performance.getEntriesByType('resource').filter(r => !r.name.startsWith('data:')).length"
        )
        == 0
    )
    assert "http://" not in file.read_text("utf-8").replace("http://www.w3.org/", "")
