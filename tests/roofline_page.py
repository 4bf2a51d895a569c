"""The roofline's page for tests in a browser: served, opened with a state, read and photographed."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from foretell.cli.roofline import app
from foretell.roofline.hardware import known_hardware
from foretell.roofline.viewer.answers import Answers
from foretell.roofline.viewer.server import serve
from foretell.roofline.viewer.settings import Known

SHOTS = os.environ.get("FORETELL_SCREENSHOTS")
"""A folder to keep the screenshots of the documentation in."""


@contextmanager
def served_page() -> Iterator[str]:
    """The address of the page."""
    server = serve(Answers(Known(known_hardware(), {})), 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()
    thread.join()


@contextmanager
def window(browser: Any, width: int, height: int) -> Iterator[None]:
    """A window of that size; below 600 columns it is a phone's."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    yield
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@contextmanager
def dark_mode(browser: Any) -> Iterator[None]:
    """The colours of a dark system."""
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": dark})
    yield
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def screenshot(browser: Any, name: str, width: int = 1440, height: int = 900) -> None:
    """Keep a picture for the documentation, where a folder for them is given."""
    if SHOTS:
        with window(browser, width, height):
            browser.execute_async_script("setTimeout(arguments[0], 900)")
            browser.save_screenshot(str(Path(SHOTS) / f"roofline-{name}.png"))


def text(browser: Any, selector: str) -> str:
    """The text of an element."""
    return str(browser.execute_script("return document.querySelector(arguments[0]).textContent", selector))


def run_cli(*arguments: str) -> Any:
    """What `foretell roofline` prints as JSON."""
    result = CliRunner().invoke(app, [*arguments, "--json"])
    return json.loads(result.stdout)


def open_page(browser: Any, address: str, state: str = "") -> None:
    """Open the page with a state in its address."""
    browser.get("about:blank")
    browser.get(f"{address}#{state}")
    settle(browser)


def show_state(browser: Any, address: str, state: str) -> None:
    """Put a state into the address of the page, which is opened only where another one is shown."""
    if browser.current_url.partition("#")[0] != address:
        open_page(browser, address)
    browser.execute_script("location.hash = arguments[0]", state)
    settle(browser)


def settle(browser: Any) -> None:
    """Wait until the page has drawn all that it asked for."""
    browser.execute_async_script(
        "const done = arguments[0], look = () => document.querySelector('main').ariaBusy === 'false' ? done() : "
        "setTimeout(look, 10); setTimeout(look, 0)"
    )


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never held"
        time.sleep(0.02)
