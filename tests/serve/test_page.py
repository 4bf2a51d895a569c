"""The page in a browser: it chats, shows where tokens come from, compares, and fits a phone."""

from collections.abc import Iterator
from typing import Any

import pytest
from serving import Server, running_server

from chromium import needs_browser, running_browser
from foretell.serve.page.document import document, headers

pytestmark = needs_browser
ENTER, RIGHT = "\ue007", "\ue014"
COLOURED = "return document.querySelectorAll('.answer .o0').length"
DONE = "return !document.querySelector('#send').textContent.includes('Stop')"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server() as found:
        yield found


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Iterator[Any]:
    with running_browser(tmp_path_factory.mktemp("profile"), 1280, 800, 10) as driver:
        driver.get(server.url)
        driver.execute_script("state.settings = {max_tokens: 40, temperature: 0, seed: 7}")
        yield driver


def run(browser: Any, script: str, *arguments: Any) -> Any:
    return browser.execute_script(script, *arguments)


def text(browser: Any, selector: str) -> str:
    return str(run(browser, "return document.querySelector(arguments[0]).textContent", selector))


def until_done(browser: Any) -> None:
    run_async = "const end = arguments[0]; const look = () => running ? setTimeout(look, 20) : end(); look()"
    browser.execute_async_script(run_async)
    assert run(browser, DONE)


def ask(browser: Any, message: str) -> None:
    browser.find_element("id", "text").send_keys(message + ENTER)
    until_done(browser)


def test_it_answers_with_drafts_in_colour_and_details_of_a_pass(browser: Any, server: Server) -> None:
    ask(browser, "abcabcabc")
    wanted = server.chat("abcabcabc", max_tokens=40, seed=7).json()["choices"][0]["message"]["content"]
    shown = run(browser, "return talk().messages[1]")
    assert shown["content"] == wanted == text(browser, ".answer") and not shown["error"]
    assert shown["stats"]["tokens"] == 40 and shown["stats"]["passes"] < 40
    assert run(browser, "return document.querySelectorAll('.answer .o0').length") > 0
    assert "tokens per pass" in text(browser, "#figures") and "suffix" in text(browser, "#legend")
    browser.find_element("css selector", ".answer").send_keys(RIGHT)
    assert "from this pass" in text(browser, "#details")
    assert not browser.get_log("browser")


def test_regenerate_edit_compare_and_further_conversations(browser: Any, server: Server) -> None:
    before = run(browser, "return talk().messages[1].content")
    run(browser, "regenerate(1)")
    until_done(browser)
    assert run(browser, "return talk().messages[1].content") == before
    run(
        browser,
        "state.settings.max_tokens = 150; state.mode = 'compare'; files = [{name: 'a.txt', text: 'abc'}]; edit(0)",
    )
    ask(browser, "abc")
    assert run(browser, "return talk().messages.length") == 2
    assert text(browser, ".verdict").startswith("Equal texts: ")
    assert len(browser.find_elements("css selector", ".columns .answer")) == 2
    coloured = run(browser, COLOURED)
    sent = run(browser, "return talk().messages[0].sent")
    assert sent.startswith("File a.txt:\nabc") and sent.endswith("abcabcabcabc")
    browser.find_element("id", "new").click()
    assert run(browser, "return [state.conversations.length, talk().messages.length]") == [2, 0]
    browser.refresh()
    assert run(browser, "return [state.conversations.length, state.settings.seed, state.mode]") == [2, 7, "compare"]
    run(browser, "open(1)")
    assert run(browser, COLOURED) == coloured, run(
        browser, "return [talk().messages[1].spans, talk().messages[1].plain]"
    )
    assert not browser.get_log("browser")


def test_it_fits_a_phone_and_a_screen_at_night(browser: Any) -> None:
    for width, scheme in ((1280, "light"), (390, "dark")):
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        )
        assert run(browser, "return document.documentElement.scrollWidth") <= width
        visible = run(browser, "return getComputedStyle(document.querySelector('#side')).visibility")
        assert visible == ("visible" if width > 600 else "hidden")
    run(browser, "document.querySelector('#menu').click()")
    assert run(browser, "return getComputedStyle(document.querySelector('#side')).visibility") == "visible"


def test_it_loads_nothing_and_runs_only_its_own_script(server: Server) -> None:
    response = server.http.get("/")
    policy = response.headers["content-security-policy"]
    assert policy == headers()["Content-Security-Policy"] and "unsafe" not in policy and "default-src 'none'" in policy
    assert response.text == document() and "://" not in document() and "/*SCRIPT*/" not in document()
