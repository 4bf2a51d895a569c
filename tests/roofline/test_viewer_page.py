"""The page as people use it: every control, by pointer, keyboard and on a phone, in light and dark."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from chromium import needs_browser, running_browser
from roofline_page import dark_mode, eventually, open_page, run_cli, screenshot, served_page, settle, text, window

pytestmark = needs_browser
ENTER, ESCAPE = "\ue007", "\ue00c"
CONFIG = (
    '{"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,'
    ' "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 4096}'
)
"""Llama-2-7b."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served_page() as found:
        yield found


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with running_browser(tmp_path_factory.mktemp("profile"), 1440, 900, 20) as driver:
        yield driver


@pytest.mark.exhaustive
def test_two_settings_side_by_side_are_both_named(browser: Any, address: str) -> None:
    open_page(browser, address, "model=llama-3-8b&hardware=a6000&op=layer%2Fgate_proj")
    browser.find_element("id", "keep").click()
    browser.execute_script("Roofline.set({hardware: 'a100-80g', weights: '4g128', batch: 8})")
    settle(browser)
    before = run_cli("analyze", "llama-3-8b")
    now = run_cli("analyze", "llama-3-8b", "--hardware=a100-80g", "--weights=4g128", "--batch=8")
    times = before["total"]["seconds"] / now["total"]["seconds"]
    ratio = f"{float(f'{times:.3g}'):g}"
    assert text(browser, "#ratio") == f"This setting is {ratio}× as fast as the compared one."
    mine, theirs = text(browser, "#mine"), text(browser, "#theirs")
    assert "NVIDIA A100" in mine and "batch 8" in mine and "weights 4g128" in mine
    assert "NVIDIA RTX A6000" in theirs and "batch 1" in theirs and "weights 16" in theirs
    marked = browser.execute_script("return [...document.querySelectorAll('#theirs b')].map(b => b.textContent)")
    assert marked == ["NVIDIA RTX A6000", "batch 1", "weights 16"]
    # One convention: above 1, this setting is the faster one, for the pass and for each operation.
    key = "layer/gate_proj"
    node = browser.execute_script(
        'return document.querySelector(`[data-key="${arguments[0]}"] .versus`).textContent', key
    )
    seconds = [next(o["seconds"] for o in a["operations"] if o["operation"] == "gate_proj") for a in (before, now)]
    times = seconds[0] / seconds[1]
    assert times > 1 and node == f"{float(f'{times:.2g}'):g}×"
    assert text(browser, "#totals dl").startswith("thiscompared")
    assert browser.find_elements("css selector", "#roof .roofline.other")
    link = browser.current_url
    open_page(browser, address, link.partition("#")[2])
    assert text(browser, "#theirs") == theirs
    screenshot(browser, "compare")
    browser.find_element("id", "swap").click()
    settle(browser)
    assert text(browser, "#mine") == theirs and text(browser, "#theirs") == mine
    browser.find_element("id", "keep").click()
    settle(browser)
    assert not browser.find_element("id", "pair").is_displayed()


CONTROLS = """
const form = document.getElementById("settings"),
  done = arguments[1],
  seen = [],
  settled = (then) => document.querySelector("main").ariaBusy === "false" ? then() : setTimeout(settled, 5, then);
function next(inputs) {
  if (!inputs.length) return done(seen);
  const [input, ...others] = inputs;
  // A chain excludes a tree, and other controls depend on the stage and the device: each starts anew.
  Roofline.state.method = "";
  Roofline.set({ ...Roofline.data.defaults, ...base });
  const before = location.hash;
  if (input.type === "checkbox") input.checked = !input.checked;
  else if (input.type === "radio") {
    if (input.checked) return next(others);
    input.checked = true;
  } else if (input.tagName === "SELECT") {
    const other = [...input.options].find((o) => o.value !== input.value);
    input.value = other.value;
  } else if (input.type === "range") input.value = Number(input.value) + 1;
  else input.value = typed[input.name] || "3";
  input.dispatchEvent(new Event("change", { bubbles: true }));
  const moved = before !== location.hash;
  settled(() => {
    const alert = document.getElementById("alert");
    seen.push([input.name, moved, alert.hidden || /does not fit/.test(alert.textContent)]);
    next(others);
  });
}
const typed = arguments[0],
  base = { offloadWeights: "0.5", offloadCompute: "host", batch: 2, requests: 4, rates: "4" };
next([...form.elements].filter((e) => e.name && e.tagName !== "FIELDSET"));
"""
TYPED = {
    "capacity": "80", "offloadWeights": "0.25", "offloadKv": "0.25", "accept": "0.6", "tree": "8x3", "share": "0.4",
    "density": "0.3", "rates": "1,2", "batch": "4", "context": "2048", "requests": "20",
}  # fmt: skip


@pytest.mark.exhaustive
def test_every_control_reacts_to_change_alone(browser: Any, address: str) -> None:
    open_page(browser, address, "model=llama-3-8b&hardware=h100-sxm")
    browser.set_script_timeout(120)
    seen = browser.execute_async_script(CONTROLS, TYPED)
    browser.set_script_timeout(20)
    names = {name for name, _, _ in seen}
    defaults = set(browser.execute_script("return Object.keys(Roofline.data.defaults)"))
    assert names == defaults - {"config"} | {"method"}
    # Tokens per pass alone are half a setting: the page asks for a chain or tree.
    assert [name for name, moved, fine in seen if not (moved and fine)] == ["tau"]
    browser.get_log("browser")  # Chromium notes the refused question itself.


@pytest.mark.exhaustive
def test_half_typed_figures_are_no_exception(browser: Any, address: str) -> None:
    open_page(browser, address, "batch=2")
    field = browser.find_element("css selector", "input[name=batch]:not([type=range])")
    field.send_keys(".5")
    settle(browser)
    assert "a whole number, found '2.5'" in text(browser, "#alert") and field.get_attribute("aria-invalid") == "true"
    assert "stale" in browser.find_element("css selector", "main").get_attribute("class")
    field.clear()
    field.send_keys("4")
    settle(browser)
    assert field.get_attribute("aria-invalid") is None and not browser.find_element("id", "alert").is_displayed()
    for name in ("accept", "tree", "rates"):
        browser.execute_script("document.getElementById('drafts').open = true")
        browser.execute_script(
            "const e = document.getElementsByName(arguments[0])[0]; e.value = 'x';"
            "e.dispatchEvent(new Event('input', {bubbles: true}))",
            name,
        )
        settle(browser)
        assert "found 'x'" in text(browser, "#alert")
        browser.execute_script("Roofline.set({[arguments[0]]: Roofline.data.defaults[arguments[0]]})", name)
    settle(browser)
    assert not browser.find_element("id", "alert").is_displayed()
    browser.get_log("browser")


SAVED = """
const saved = [], click = HTMLAnchorElement.prototype.click;
HTMLAnchorElement.prototype.click = function () { saved.push(this.download); };
navigator.clipboard.writeText = async (text) => { saved.push(text); };
for (const id of ["link", "table", "picture", "save"]) document.getElementById(id).click();
const done = arguments[0], until = () => {
  if (saved.length < 4) return setTimeout(until, 20);
  HTMLAnchorElement.prototype.click = click;
  done([saved, copied]);
};
let copied = "";
setTimeout(() => { copied = document.getElementById("link").textContent; until(); }, 300);
"""


@pytest.mark.exhaustive
def test_buttons_copy_the_link_and_save_table_and_picture(browser: Any, address: str) -> None:
    open_page(browser, address, "model=llama-2-7b&batch=3")
    saved, copied = browser.execute_async_script(SAVED)
    files = [f"llama-2-7b-decode.{kind}" for kind in ("csv", "png", "html")]
    assert sorted(saved) == sorted([browser.current_url, *files])
    assert copied == "Copied"


@pytest.mark.exhaustive
def test_what_a_prediction_rests_on_is_shown(browser: Any, address: str) -> None:
    open_page(browser, address, "model=llama-3-8b&hardware=a100-80g&method=eagle3")
    assert "Acceptance published: arXiv 2503.01840: 6.18 tokens per pass on llama-3" in text(browser, "#methods .why")
    plan = run_cli("plan", "llama-3-8b", "--hardware=a100-80g")
    chosen = next(m for m in plan["methods"] if m["method"] == "eagle3")
    assert f"{chosen['low']:.2f} to {chosen['high']:.2f}" in text(browser, "#methods .why")
    # The range is drawn: where its bar begins and ends, as parts of the track.
    left, width, even = browser.execute_script(
        "const q = (s) => parseFloat(document.querySelector(`[data-method=eagle3] ${s}`).style.left),"
        "s = document.querySelector('[data-method=eagle3] s');"
        "return [q('s'), parseFloat(s.style.width), q('u')]"
    )
    assert left / even == pytest.approx(chosen["low"], rel=1e-3)
    assert (left + width) / even == pytest.approx(chosen["high"], rel=1e-3)
    assert browser.find_elements("css selector", "#gain .band")
    browser.execute_script("Roofline.set({accept: '0.8'})")
    settle(browser)
    assert "Acceptance given: your setting" in text(browser, "#methods .why")


def test_the_simulated_load_is_drawn(browser: Any, address: str) -> None:
    open_page(browser, address, "model=llama-3-8b&hardware=h100-sxm&rates=1,4&requests=30&method=ngram")
    assert "ngram, 3 drafted" in text(browser, "#load .advice")
    assert len(browser.find_elements("css selector", "#latency .mark")) == 4
    assert len(browser.find_elements("css selector", "#goodput .curve.other")) == 2
    open_page(browser, address, "model=llama-3-8b&hardware=a100-80g")
    browser.execute_script("document.getElementById('more').scrollIntoView()")
    screenshot(browser, "methods")


@pytest.mark.exhaustive
def test_the_graph_is_searched_zoomed_and_panned(browser: Any, address: str) -> None:
    with window(browser, 1440, 900):
        search_zoom_and_pan(browser, address)


def search_zoom_and_pan(browser: Any, address: str) -> None:
    open_page(browser, address, "model=llama-3-8b")
    inside = browser.execute_script(
        "const box = document.querySelector('[data-key=\"head/lm_head\"]').getBoundingClientRect(),"
        "frame = document.getElementById('canvas').getBoundingClientRect();"
        "return box.bottom <= frame.bottom && frame.bottom <= innerHeight"
    )
    assert inside, "the head is on the first screen"
    zone = browser.execute_script(
        "return [...document.querySelectorAll('#roof .zonename')].map(t => t.getBBox()).map(b => b.x + b.width)"
    )
    assert max(zone) <= browser.execute_script("return document.getElementById('roof').viewBox.baseVal.width")
    search = browser.find_element("id", "search")
    search.send_keys("proj")
    assert text(browser, "#found") == "7 of 17"
    assert len(browser.find_elements("css selector", "#graph .op.match")) == 7
    search.send_keys(ENTER)
    assert text(browser, "#operation h2").startswith("q_proj")
    search.send_keys(ENTER)
    assert text(browser, "#operation h2").startswith("k_proj")
    search.send_keys(ESCAPE)
    assert not browser.find_elements("css selector", "#graph .op.match, #graph .op.dim")

    def width() -> float:
        return float(browser.execute_script("return document.getElementById('graph').getBoundingClientRect().width"))

    before = width()
    for _ in range(4):
        browser.find_element("id", "in").click()
    assert width() == pytest.approx(before * 1.25**4, rel=0.01)
    assert "more operation" in text(browser, "#below")
    browser.execute_script("document.getElementById('canvas').scrollTop = 0")
    drag = """
    const canvas = document.getElementById("canvas"), fire = (target, type, y) =>
      target.dispatchEvent(
        new PointerEvent(type, {pointerType: "mouse", button: 0, clientX: 600, clientY: y, bubbles: true}));
    fire(canvas, "pointerdown", 500); fire(window, "pointermove", 380); fire(window, "pointerup", 380);
    return canvas.scrollTop;
    """
    assert browser.execute_script(drag) == 120
    browser.find_element("id", "out").click()
    browser.find_element("id", "fit").click()
    assert browser.execute_script(
        "const c = document.getElementById('canvas'); return c.scrollHeight <= c.clientHeight + 1"
    )
    assert not browser.get_log("browser")


def test_terms_are_explained(browser: Any, address: str) -> None:
    open_page(browser, address)
    used = set(browser.execute_script("return [...document.querySelectorAll('[data-term]')].map(e => e.dataset.term)"))
    known = set(browser.execute_script("return Object.keys(Tips.terms)"))
    assert used <= known
    browser.execute_script(
        "document.querySelector('dfn').dispatchEvent("
        "new PointerEvent('pointerover', {pointerType: 'mouse', bubbles: true}))"
    )
    assert "One run of all layers" in text(browser, "#tip") and browser.find_element("id", "tip").is_displayed()
    browser.find_element("css selector", "body").send_keys(ESCAPE)
    assert not browser.find_element("id", "tip").is_displayed()
    browser.execute_script(
        "document.querySelector('label[data-term=fusion] .term').dispatchEvent("
        "new PointerEvent('pointerdown', {pointerType: 'touch', bubbles: true}))"
    )
    assert "without writing what is between them" in text(browser, "#tip")
    listed = browser.execute_script("return document.querySelectorAll('#glossary dt').length")
    assert listed == len(known)


def says_pasted(browser: Any, message: str) -> bool:
    return message in text(browser, "#pasted")


@pytest.mark.exhaustive
def test_a_pasted_configuration_is_analysed(browser: Any, address: str) -> None:
    open_page(browser, address, "model=llama-2-7b&weights=8")
    expected = browser.execute_script("return Roofline.answer().csv")
    browser.execute_script("document.getElementById('paste').open = true")
    field = browser.find_element("id", "config")
    for wrong, message in (("{", "not JSON"), ("[1]", "one object"), ('{"model_type": "mamba"}', "mamba")):
        field.clear()
        field.send_keys(wrong)
        browser.find_element("id", "use").click()
        eventually(partial(says_pasted, browser, message))
    browser.get_log("browser")  # Chromium notes refused requests itself.
    field.clear()
    field.send_keys(CONFIG)
    browser.find_element("id", "use").click()
    eventually(lambda: browser.execute_script("return Roofline.answer().name") == "pasted-decode")
    assert browser.execute_script("return Roofline.answer().csv") == expected
    link = browser.current_url
    open_page(browser, address, link.partition("#")[2])
    assert browser.execute_script("return Roofline.answer().csv") == expected
    assert not browser.get_log("browser")


CONTRAST = """
const rgb = (text) => (text.match(/[\\d.]+/g) || []).map(Number),
  over = (top, below) => { const a = top[3] === undefined ? 1 : top[3];
    return [0, 1, 2].map((i) => top[i] * a + below[i] * (1 - a)); },
  linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4),
  light = (c) => { const f = c.map((v) => linear(v / 255));
    return 0.2126 * f[0] + 0.7152 * f[1] + 0.0722 * f[2]; };
function behind(element) {
  const box = element.closest(".op");
  if (box) return rgb(getComputedStyle(box.querySelector(".box")).fill);
  const layers = [];
  for (let e = element; e; e = e.parentElement) layers.unshift(rgb(getComputedStyle(e).backgroundColor));
  return layers.reduce((below, top) => over(top, below), [255, 255, 255]);
}
const bad = new Set();
for (const e of document.querySelectorAll("body *")) {
  if (["SCRIPT", "STYLE", "OPTION", "OPTGROUP", "TITLE"].includes(e.tagName)) continue;
  const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()),
    box = e.getBoundingClientRect();
  if (!own || !box.width || !e.checkVisibility()) continue;
  const style = getComputedStyle(e), back = behind(e),
    front = over(rgb(e instanceof SVGElement ? style.fill : style.color), back),
    [a, b] = [light(front), light(back)].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
  const size = parseFloat(style.fontSize) * (e.closest("#graph") ?
    document.getElementById("graph").getBoundingClientRect().width /
    document.getElementById("graph").viewBox.baseVal.width : 1);
  const name = `${e.tagName}.${e.getAttribute("class")} ${e.textContent.slice(0, 20)}`;
  if (ratio < 4.5) bad.add(`${name}: contrast ${ratio.toFixed(2)}`);
  if (arguments[0] && size < 11.99) bad.add(`${name}: ${size.toFixed(1)} px`);
}
return [...bad];
"""
"""Visible text whose contrast is below WCAG AA's 4.5, or (with an argument) that is smaller than 12 px."""
COMPARED = "model=qwen3-30b-a3b&hardware=h100-sxm&batch=16&compare=1&offloadKv=0.1&stage=verify"


@pytest.mark.parametrize(
    "state",
    [
        COMPARED,
        pytest.param("stage=prefill&context=4096&hardware=h100-sxm", marks=pytest.mark.exhaustive),
        pytest.param("batch=x", marks=pytest.mark.exhaustive),
    ],
)
def test_contrast_is_that_of_wcag_aa(browser: Any, address: str, state: str) -> None:
    open_page(browser, address, state)
    browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    if state == "batch=x":
        browser.execute_script("document.querySelector('main').classList.remove('stale')")
    assert browser.execute_script(CONTRAST, False) == []
    with dark_mode(browser):
        assert browser.execute_script(CONTRAST, False) == []


TARGETS = """
const small = [];
for (const e of document.querySelectorAll("button, select, input, textarea, summary, .op")) {
  if (!e.checkVisibility()) continue;
  // A radio button or a box is pressed on its label, too.
  const target = ["radio", "checkbox"].includes(e.type) ? e.closest("label") : e,
    box = target.getBoundingClientRect();
  if (box.height < 43.9 || box.width < 43.9) small.push(`${e.tagName} ${e.name || e.id}: ${box.width} x ${box.height}`);
}
return small;
"""


@pytest.mark.parametrize(
    "state", [COMPARED, pytest.param("model=deepseek-v3&hardware=h200&devices=8", marks=pytest.mark.exhaustive)]
)
def test_it_fits_a_phone(browser: Any, address: str, state: str) -> None:
    with window(browser, 390, 844):
        open_page(browser, address, state)
        browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
        assert browser.execute_script(CONTRAST, True) == []
        assert browser.execute_script(TARGETS) == []


@pytest.mark.exhaustive
def test_it_fits_a_small_screen(browser: Any, address: str) -> None:
    with window(browser, 1024, 768):
        open_page(browser, address, COMPARED)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 1024
    open_page(browser, address, "model=qwen3-30b-a3b&hardware=h100-sxm&batch=16")
    screenshot(browser, "phone", 390, 2600)


@pytest.mark.exhaustive
def test_dark_mode_of_a_large_model(browser: Any, address: str) -> None:
    with dark_mode(browser):
        state = "model=deepseek-v3&hardware=h200&devices=8&stage=verify&batch=32&context=4096&weights=fp8"
        open_page(browser, address, f"{state}&activations=fp8")
        assert browser.execute_script("return Roofline.answer().name") == "deepseek-v3-verify"
        screenshot(browser, "dark", 1440, 1500)


def test_everything_is_reached_by_the_keyboard(browser: Any, address: str) -> None:
    open_page(browser, address, "model=llama-3-8b&hardware=a100-80g")
    browser.execute_script("document.activeElement.blur()")
    reached = browser.execute_script(
        "return [...document.querySelectorAll('button, select, input, textarea, summary, [tabindex]')]"
        ".filter(e => e.checkVisibility() && e.tabIndex < 0 && !e.classList.contains('op')).map(e => e.outerHTML)"
    )
    assert reached == []
    assert len(browser.find_elements("css selector", "#graph .op[tabindex='0']")) == 1
    browser.find_element("css selector", "body").send_keys("/")
    assert browser.switch_to.active_element.get_attribute("id") == "search"
    browser.find_element("css selector", "[data-method=rest]").send_keys(ENTER)
    assert "method=rest" in browser.current_url
    # Focus stays where it was, though the list is drawn anew.
    settle(browser)
    assert browser.execute_script("return document.activeElement.dataset.method") == "rest"
