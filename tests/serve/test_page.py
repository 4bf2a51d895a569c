"""The page in a browser: it chats, shows where tokens come from, compares, and fits a phone."""

from collections.abc import Iterator
from typing import Any

import pytest
from serving import Server

from chromium import needs_browser, running_browser
from foretell.serve.page.document import document, headers

pytestmark = needs_browser
ENTER, RIGHT = "\ue007", "\ue014"
COLOURED = "return document.querySelectorAll('.answer span[class^=o]').length"
DONE = "return !document.querySelector('#send').textContent.includes('Stop')"


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
    run_async = "const end = arguments[0]; const look = () => running.size ? setTimeout(look, 20) : end(); look()"
    browser.execute_async_script(run_async)
    assert run(browser, DONE)


def ask(browser: Any, message: str) -> None:
    browser.find_element("id", "text").send_keys(message + ENTER)
    until_done(browser)


def test_it_answers_with_drafts_in_colour_and_details_of_a_pass(browser: Any, server: Server) -> None:
    ask(browser, "abcabcabc")
    wanted = server.chat("abcabcabc", max_tokens=40, seed=7).json()["choices"][0]["message"]["content"]
    shown = run(browser, "return talk().messages[1]")
    assert shown["content"] == wanted and not shown["error"]
    assert text(browser, ".answer > .text").split() == wanted.split()
    assert shown["stats"]["tokens"] == 40 and shown["stats"]["passes"] < 40
    assert run(browser, COLOURED) > 0, shown["passes"]
    assert "tokens a pass" in text(browser, ".figures") and "copied from the text" in text(browser, ".legend")
    assert shown["note"] == "Cut at the most new tokens."
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
        "state.settings.max_tokens = 150; state.mode = 'compare'; talk().messages[0].files = [FILE]".replace(
            "FILE", "{name: 'a.txt', text: 'abc'}"
        ),
    )
    run(browser, "edit(0)")
    assert "a.txt" in text(browser, "#attached")
    ask(browser, "abc")
    assert run(browser, "return talk().messages.length") == 2
    assert text(browser, ".verdict").startswith("Equal texts: ")
    assert len(browser.find_elements("css selector", ".columns .answer")) == 2
    coloured = run(browser, COLOURED)
    sent = run(browser, "return withFiles(talk().messages[0])")
    assert sent.startswith("File a.txt:\nabc") and sent.endswith("abcabcabcabc")
    browser.find_element("id", "new").click()
    assert run(browser, "return [state.conversations.length, talk().messages.length]") == [2, 0]
    run(browser, "saveSettings()")
    browser.refresh()
    assert run(browser, "return [state.conversations.length, state.settings.seed, state.mode]") == [1, 7, "compare"]
    run(browser, "open(state.conversations[0].id)")
    assert run(browser, COLOURED) == coloured
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
    small = (
        "return [...document.querySelectorAll('button, .button, summary, .switch span')].filter(e => e.offsetParent)"
        ".filter(e => Math.min(e.offsetWidth, e.offsetHeight) < 44).map(e => e.textContent)"
    )
    assert run(browser, small) == []
    run(browser, "document.querySelector('#menu').click()")
    assert run(browser, "return getComputedStyle(document.querySelector('#side')).visibility") == "visible"
    assert run(browser, small) == []
    run(browser, "document.elementFromPoint(380, 400).click()")
    assert not run(browser, "return document.querySelector('#side').classList.contains('open')")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


STREAM = """
window.served = (parts, ends = true) => { window.fetch = async (url, { signal } = {}) => new Response(
  new ReadableStream({ async start(c) {
    const say = (text) => c.enqueue(new TextEncoder().encode(`data: ${text}\\n\\n`));
    for (const part of parts) {
      say(JSON.stringify({ choices: [{ delta: { content: part } }], foretell: { passes: [
        { tokens: [{ token: part, origin: "eagle" }], drafted: [], draft_ms: 1, verify_ms: 1 }] } }));
      if (window.slow) await new Promise((go) => setTimeout(go, window.slow));
      if (signal?.aborted) { c.error(new DOMException("", "AbortError")); return; }
    }
    if (ends) say("[DONE]");
    c.close();
  } })); };
"""
"""Answers the page with given pieces of text, in the place of a server."""


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    """The page with an empty store, whose answers the test gives."""
    run(browser, "running.forEach(c => c.abort()); localStorage.clear()")
    browser.get(server.url)
    run(browser, "running.clear(); localStorage.clear(); load(); render();" + STREAM)
    yield browser
    run(browser, "window.slow = 0; running.forEach(c => c.abort())")


def test_a_stream_that_is_cut_says_so(page: Any) -> None:
    run(page, "served(['half of', ' an'], false)")
    ask(page, "a")
    assert "ended before the answer did" in text(page, ".error") and "half of an" in text(page, ".answer")


@pytest.mark.exhaustive
def test_a_reload_keeps_the_question_and_what_was_answered(page: Any) -> None:
    run(page, "served(Array(400).fill('word ')); window.slow = 20")
    page.find_element("id", "text").send_keys("my question" + ENTER)
    page.execute_async_script("setTimeout(arguments[0], 1500)")
    page.refresh()
    assert run(page, "return talk().messages[0].content") == "my question"
    assert "word word" in text(page, ".answer")
    page.execute_async_script("setTimeout(arguments[0], 4100)")
    page.refresh()
    assert "closed before this answer ended" in text(page, ".note")


@pytest.mark.exhaustive
def test_tabs_share_conversations_and_one_of_them_answers(page: Any, server: Server) -> None:
    run(page, "served(Array(400).fill('word ')); window.slow = 20")
    page.find_element("id", "text").send_keys("first tab" + ENTER)
    first = page.current_window_handle
    page.switch_to.new_window("tab")
    try:
        page.get(server.url)
        assert run(page, "return talk().messages[0].content") == "first tab"
        run(page, "$('#text').value = 'x'; send()")
        assert "Another tab" in text(page, "#notice")
        run(page, "begin(); talk().messages.push({role: 'user', content: 'second tab'}); save(talk())")
    finally:
        page.close()
        page.switch_to.window(first)
    page.execute_async_script("setTimeout(arguments[0], 200)")
    contents = run(page, "return state.conversations.map(c => c.messages[0].content)")
    assert contents == ["second tab", "first tab"]
    assert run(page, "return running.size") == 1


def test_deleting_another_conversation_leaves_the_answer_alone(page: Any) -> None:
    run(page, "served(['one']); talk().title = 'old'")
    ask(page, "a")
    run(page, "begin(); served(Array(300).fill('b ')); window.slow = 20")
    page.find_element("id", "text").send_keys("b" + ENTER)
    run(page, "remove(state.conversations.find(c => c.messages[0].content === 'a').id)")
    assert run(page, "return [talk().messages[0].content, running.size]") == ["b", 1]
    run(page, "remove(state.current)")
    assert run(page, "return [talk().messages.length, running.size]") == [0, 0]


def test_regenerating_stops_the_answer_before_and_a_stop_is_no_error(page: Any) -> None:
    run(page, "served(Array(300).fill('b ')); window.slow = 20")
    page.find_element("id", "text").send_keys("b" + ENTER)
    run(page, "regenerate(1)")
    page.execute_async_script("setTimeout(arguments[0], 200)")
    assert run(page, "return [running.size, talk().messages.length]") == [1, 2]
    run(page, "send()")
    until_done(page)
    assert text(page, ".note") == "Stopped." and not run(page, "return document.querySelectorAll('.error').length")


MARKDOWN = """# Title

Some **bold and `code`** text, *slanted*, [link](https://example.org/a) and <b>tags</b>.

1. one
2. two
   more
- a
  - b

| h | i |
|---|---|
| 1 | 2 |

> quoted

```python
def f():
    return "**not bold**"
```
end"""


def test_markdown_is_drawn_with_the_colours_of_its_tokens(page: Any) -> None:
    run(page, "served([...arguments[0]])", MARKDOWN)
    ask(page, "a")
    count = "return document.querySelectorAll('.answer ' + arguments[0]).length"
    counts = {tag: run(page, count, tag) for tag in ("h3", "strong code", "em", "a", "td", "blockquote", "pre", "b")}
    assert counts == {"h3": 1, "strong code": 1, "em": 1, "a": 1, "td": 2, "blockquote": 1, "pre": 1, "b": 0}
    assert text(page, ".answer pre") == 'def f():\n    return "**not bold**"'
    assert run(page, "return [...document.querySelectorAll('.item .marker')].map(e => e.textContent)") == [
        "1.", "2.", "•", "•",
    ]  # fmt: skip
    assert run(page, count, "pre .o5") > 20 and run(page, count, "strong .o5") > 5
    piecewise = run(page, "return document.querySelector('.answer > .text').innerHTML")
    run(page, "render()")
    assert run(page, "return document.querySelector('.answer > .text').innerHTML") == piecewise


def test_long_lines_of_code_scroll_in_their_column(page: Any) -> None:
    run(page, "served(['```\\n' + 'x = 1; '.repeat(60)]); state.mode = 'compare'")
    ask(page, "a")
    for selector in ("#log", ".columns > div", ".columns > div:last-child"):
        wide = "const e = document.querySelector(arguments[0]); return e.scrollWidth - e.clientWidth"
        assert run(page, wide, selector) <= 0
    run(page, "state.mode = 'on'")


@pytest.mark.exhaustive
def test_a_long_answer_is_drawn_by_its_end_only(page: Any) -> None:
    for line in ("word " * 12 + "\n\n", "x = y + 1\n"):
        start = "```\n" if "=" in line else ""
        run(page, "served([arguments[0] + arguments[1].repeat(4000)])", start, line)
        ask(page, "a")
        run(
            page,
            "const box = [...document.querySelectorAll('.answer')].at(-1), create = document.createElement;"
            "window.made = 0;"
            "document.createElement = function (...a) { window.made++; return create.apply(this, a); };"
            "box.message.content += 'tail'; box.update(); document.createElement = create;",
        )
        assert run(page, "return window.made") < 60


def test_it_loads_nothing_and_runs_only_its_own_script(server: Server) -> None:
    response = server.http.get("/")
    policy = response.headers["content-security-policy"]
    assert policy == headers()["Content-Security-Policy"] and "unsafe" not in policy and "default-src 'none'" in policy
    assert response.text == document() and "://" not in document() and "/*SCRIPT*/" not in document()
