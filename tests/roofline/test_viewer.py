"""The page in a browser: it loads, shows the figures of the command line, and a saved page needs no server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chromium import needs_browser, running_browser
from foretell.cli.roofline import app
from foretell.roofline.report import format_seconds
from roofline_page import eventually, open_page, run_cli, screenshot, served_page, settle, show_state, text

pytestmark = needs_browser
ARROW_DOWN = "\ue015"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served_page() as place:
        yield place


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with running_browser(tmp_path_factory.mktemp("profile"), 1440, 900, 60) as driver:
        yield driver


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


def test_changed_inputs_show_the_figures_of_the_command_line(browser: Any, address: str) -> None:
    open_page(browser, address, "rates=4&requests=20")
    before = text(browser, "#headline")
    field = browser.find_element("css selector", "input[name=batch]:not([type=range])")
    field.clear()
    field.send_keys("32")
    device = browser.find_element("css selector", "select[name=hardware] option[value=h100-sxm]")
    device.click()
    eventually(lambda: "batch=32" in browser.current_url and "h100" in browser.current_url)
    settle(browser)
    options = ("llama-3-8b", "--hardware=h100-sxm", "--batch=32")
    expected, plan = run_cli("analyze", *options), run_cli("plan", *options)
    after, link = text(browser, "#headline"), browser.current_url
    assert after != before and after.startswith(format_seconds(expected["total"]["seconds"]))
    assert text(browser, "#methods .advice") == plan["advice"]
    speedups = browser.execute_script("return [...document.querySelectorAll('.bars b')].map(b => b.textContent)")
    assert speedups[0] == f"{plan['methods'][0]['speedup']:.2f}×"
    variants = browser.execute_script("return [...document.querySelectorAll('.variant b')].map(b => b.textContent)")
    assert variants == [f"{v['speedup']:.2f}×" for v in plan["variants"]]
    for chart in ("gain", "latency", "goodput", "bybatch", "bylength", "memorybylength"):
        assert browser.find_elements("css selector", f"#{chart} .curve"), chart
    browser.get_log("browser")  # Chromium notes that the emptied field was refused.
    browser.get("about:blank")
    browser.get(link)
    settle(browser)
    assert text(browser, "#headline") == after
    assert not browser.get_log("browser")


@pytest.mark.exhaustive
def test_a_range_answers_what_it_was_last_moved_to(browser: Any, address: str) -> None:
    open_page(browser, address, "rates=4&requests=5")
    browser.execute_script(
        "const e = document.querySelector('input[name=batch][type=range]');"
        "for (const v of [1, 2, 3, 4, 5]) { e.value = v; e.dispatchEvent(new Event('input', {bubbles: true})); }"
    )
    settle(browser)
    assert browser.execute_script("return Roofline.state.now.batch") == 32
    seconds = run_cli("analyze", "llama-3-8b", "--batch=32")["total"]["seconds"]
    assert text(browser, "#headline").startswith(format_seconds(seconds))


@pytest.mark.parametrize(
    ("state", "field", "message"),
    [
        ("batch=abc", "batch", "Batch must be a whole number, found 'abc'."),
        ("chain=0", "chain", "A chain must be at least 1, found 0."),
        ("rates=fast", "rates", "requests a second, as 1,4,16; found 'fast'."),
        pytest.param(
            "model=llama-2-70b",
            None,
            "does not fit: it needs 138 GB and NVIDIA RTX A6000 has 48 GB",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_errors_are_one_sentence(browser: Any, address: str, state: str, field: str | None, message: str) -> None:
    show_state(browser, address, state)
    assert message in text(browser, "#alert")
    marked = browser.execute_script("return [...document.querySelectorAll('[aria-invalid=true]')].map(e => e.name)")
    assert marked == ([field] if field else [])
    assert ("stale" in browser.find_element("css selector", "main").get_attribute("class")) == bool(field)
    browser.get_log("browser")  # Chromium notes refused questions itself.


@pytest.mark.exhaustive
def test_a_server_that_has_stopped_is_said(browser: Any) -> None:
    with served_page() as place:
        open_page(browser, place, "rates=4&requests=5")
    browser.execute_script("Roofline.set({batch: 3})")
    settle(browser)
    assert "does not answer: run `foretell roofline view` again" in text(browser, "#alert")
    browser.get_log("browser")


@pytest.mark.exhaustive
def test_downloads(browser: Any, address: str) -> None:
    open_page(browser, address, "model=llama-2-7b")
    lines = browser.execute_script("return Roofline.answer().csv").splitlines()
    assert lines[0].startswith("group,count,operation") and len(lines) == 18
    kind, size = browser.execute_async_script(
        "const done = arguments[0]; Roofline.picture().then(b => done([b.type, b.size]))"
    )
    assert kind == "image/png" and size > 20_000


@pytest.mark.exhaustive
def test_a_saved_page_shows_its_figures_without_a_server(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    setting = "hardware=h100-sxm&batch=8&compare=1&compare.batch=2&rates=4&requests=20&op=head%2Flm_head"
    link = f"http://127.0.0.1:8712/#{setting}"
    result = CliRunner().invoke(app, ["export", str(file), "--link", link])
    assert result.exit_code == 0, result.output
    browser.get(file.as_uri())
    settle(browser)
    options = ("llama-3-8b", "--hardware=h100-sxm", "--batch=8")
    expected, plan = run_cli("analyze", *options), run_cli("plan", *options)
    assert text(browser, "#headline").startswith(format_seconds(expected["total"]["seconds"]))
    assert text(browser, "#methods .advice") == plan["advice"]
    assert "batch 2" in text(browser, "#theirs")
    for chart in ("gain", "latency", "goodput", "bybatch", "bylength", "memorybylength"):
        assert browser.find_elements("css selector", f"#{chart} .curve"), chart
    # What cannot be changed says so; what needs no new figures works.
    notes = browser.find_elements("css selector", ".saved")
    assert "settings cannot be changed" in notes[0].text and len(notes) == 4
    enabled = browser.execute_script(
        "return [...document.getElementById('settings').elements].filter(e => e.name && !e.disabled).map(e => e.name)"
    )
    assert enabled == ["method"]
    browser.find_element("css selector", "[data-method=ngram]").click()
    settle(browser)
    assert text(browser, "#gaintitle") == "Speed-up of ngram by batch"
    assert browser.find_elements("css selector", "#gain .curve")
    assert "saved without its figures; `foretell roofline view` has them" in text(browser, "#load .advice")
    assert not browser.find_elements("css selector", "#latency .curve")
    browser.execute_script("document.querySelector('[data-key=\"layer/attention\"] rect').dispatchEvent("
                           "new MouseEvent('click', {bubbles: true}))")  # fmt: skip
    assert text(browser, "#operation h2").startswith("attention")
    browser.execute_script("document.getElementById('use').click()")
    eventually(lambda: "run `foretell roofline view`" in text(browser, "#pasted"))
    assert (
        browser.execute_script(
            "return performance.getEntriesByType('resource').filter(r => !r.name.startsWith('data:')).length"
        )
        == 0
    )
    assert "http://" not in file.read_text("utf-8").replace("http://www.w3.org/", "")
    assert not browser.get_log("browser")
    screenshot(browser, "saved")


@pytest.mark.exhaustive
def test_the_page_saves_itself_with_what_it_shows(browser: Any, address: str, tmp_path: Path) -> None:
    open_page(browser, address, "batch=8&rates=4&requests=20&method=ngram")
    shown = {part: text(browser, part) for part in ("#headline", "#methods .advice", "#gaintitle", "#load .advice")}
    saved = browser.execute_async_script(
        "const done = arguments[0], question = {now: Roofline.state.now, compared: null, method: 'ngram'};"
        "fetch('saved', {method: 'POST', headers: {'Content-Type': 'application/json'},"
        "body: JSON.stringify(question)}).then(r => r.text()).then(done)"
    )
    file = tmp_path / "saved.html"
    file.write_text(saved, "utf-8")
    browser.get(file.as_uri())
    settle(browser)
    assert {part: text(browser, part) for part in shown} == shown


def test_a_link_that_names_no_setting_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(tmp_path / "page.html"), "--link", "#batch=x"])
    assert result.exit_code == 1 and "batch must be a whole number, found 'x'" in result.output
    result = CliRunner().invoke(app, ["export", str(tmp_path / "page.html"), "--link", "#bathc=3"])
    assert result.exit_code == 1 and "did you mean batch" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_the_saved_data_close_no_script(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert CliRunner().invoke(app, ["export", str(file), "--link", "rates=4&requests=5"]).exit_code == 0
    start = file.read_text("utf-8").partition('<script id="data" type="application/json">')[2]
    assert json.loads(start.partition("</script>")[0])["saved"]["now"]["rates"] == "4"
