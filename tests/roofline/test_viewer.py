"""The page in a browser: it loads, agrees with the command line, and fits a laptop and a phone."""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chromium import needs_browser, running_browser
from foretell.cli.roofline import app
from foretell.roofline.hardware import known_hardware
from foretell.roofline.viewer.page import page
from foretell.roofline.viewer.server import serve

pytestmark = needs_browser
ARROW_DOWN = "\ue015"
SHOTS = os.environ.get("FORETELL_SCREENSHOTS")
"""A folder to keep the screenshots of the documentation in."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = serve(lambda: page(known_hardware()), 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with running_browser(tmp_path_factory.mktemp("profile"), 1440, 900, 20) as driver:
        yield driver


def screenshot(browser: Any, name: str, width: int = 1440, height: int = 900) -> None:
    if SHOTS:
        browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        browser.execute_async_script("setTimeout(arguments[0], 500)")
        browser.save_screenshot(str(Path(SHOTS) / f"roofline-{name}.png"))
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def text(browser: Any, selector: str) -> str:
    return str(browser.execute_script("return document.querySelector(arguments[0]).textContent", selector))


def run_cli(*arguments: str) -> Any:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    return json.loads(result.stdout)


def open_page(browser: Any, address: str, state: str = "") -> None:
    browser.get("about:blank")
    browser.get(f"{address}#{state}")
    settle(browser)


def settle(browser: Any) -> None:
    """Wait until what the page draws after its first paint is there."""
    browser.execute_async_script("setTimeout(arguments[0], 90)")


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
)


def command(state: str) -> list[str]:
    pairs = dict(p.split("=") for p in state.split("&"))
    square = pairs.pop("square", None)
    return ["analyze", pairs.pop("model"), *[f"--{k}={v}" for k, v in pairs.items()], *(["--square"] if square else [])]


@pytest.mark.parametrize("state", QUESTIONS)
def test_the_page_agrees_with_the_command_line(browser: Any, address: str, state: str) -> None:
    open_page(browser, address, state)
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


@pytest.mark.parametrize(
    "state",
    [
        "model=llama-3-8b&hardware=a100-80g",
        "model=mixtral-8x7b&hardware=h100-sxm&batch=4",
        "model=opt-30b&hardware=l40s&batch=64&devices=1",
    ],
)
def test_the_methods_agree_with_the_command_line(browser: Any, address: str, state: str) -> None:
    open_page(browser, address, state)
    found = {g["name"]: g for g in browser.execute_script("return Roofline.methods.plan(Roofline.state.now)")}
    expected = run_cli("plan", *command(state)[1:])
    assert {n for n, g in found.items() if "unavailable" in g} == set(expected["unavailable"])
    for row in expected["methods"][:-1]:
        mine = found[row["method"]]
        assert (mine["nodes"], mine["depth"]) == (row["nodes"], row["depth"])
        assert mine["speedup"] == pytest.approx(row["speedup"], rel=1e-9)
        assert mine["goodput"] == pytest.approx(row["goodput"], rel=1e-9)
    top = expected["methods"][0]
    gain = f"{top['speedup']:.2f}× ({top['low']:.2f} to {top['high']:.2f})"
    assert text(browser, ".advice") == f"Use {top['method']}: {gain} predicted."


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
    settle(browser)
    after, link = text(browser, "#headline"), browser.current_url
    assert before != after and "batch=32" in link
    browser.get("about:blank")
    browser.get(link)
    assert text(browser, "#headline") == after


def test_two_settings_side_by_side(browser: Any, address: str) -> None:
    open_page(browser, address, "model=llama-3-8b&hardware=a100-80g&op=layer%2Fgate_proj")
    browser.find_element("id", "keep").click()
    browser.execute_script("Roofline.set({weights: '4g128', batch: 8})")
    settle(browser)
    assert "as fast as the compared setting" in text(browser, "#headline")
    assert browser.find_elements("css selector", "#graph .versus") and browser.find_elements(
        "css selector", "#roof .roofline.other"
    )
    link = browser.current_url
    open_page(browser, address, link.partition("#")[2])
    assert "as fast as the compared setting" in text(browser, "#headline")
    screenshot(browser, "compare")


@pytest.mark.parametrize(
    ("state", "message"),
    [
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
    open_page(browser, address, state)
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


def test_it_fits_a_phone_and_dark_mode(browser: Any, address: str) -> None:
    for width in (390, 1024):
        browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        open_page(browser, address, "model=qwen3-30b-a3b&hardware=h100-sxm&batch=16")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    screenshot(browser, "phone", 390, 2600)
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    open_page(
        browser,
        address,
        "model=deepseek-v3&hardware=h200&devices=8&stage=verify&batch=32&context=4096&weights=fp8&activations=fp8",
    )
    screenshot(browser, "dark", 1440, 1500)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_the_export_opens_from_disk_and_loads_nothing(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert CliRunner().invoke(app, ["export", str(file)]).exit_code == 0
    browser.get(file.as_uri())
    assert "per pass" in text(browser, "#headline")
    assert (
        browser.execute_script(
            "return performance.getEntriesByType('resource').filter(r => !r.name.startsWith('data:')).length"
        )
        == 0
    )
    assert "http://" not in file.read_text("utf-8").replace("http://www.w3.org/", "")
