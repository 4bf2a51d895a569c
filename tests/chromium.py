"""A headless browser for the tests of pages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER and find_spec("selenium")),
    reason="the browser test needs chromium, chromedriver and selenium: pip install selenium",
)
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--force-color-profile=srgb",
)  # fmt: skip


@contextmanager
def running_browser(profile: Path, width: int, height: int, script_seconds: float) -> Iterator[Any]:
    """A browser with a window of this size; `profile`: an empty folder."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for flag in (*_FLAGS, f"--window-size={width},{height}", f"--user-data-dir={profile}"):
        options.add_argument(flag)
    assert CHROMIUM is not None
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(script_seconds)
    try:
        yield driver
    finally:
        driver.quit()
