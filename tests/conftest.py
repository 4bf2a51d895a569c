"""What every test runs under: one thread, the same generated examples in every run, a folder for temporary files that
is removed at the end, and a cache of packed weights of its own. With FORETELL_CHECK_TYPES=1 the shapes and types of the
package are checked at every call, where beartype is installed.

Which tests run is the choice of --exhaustive. The exhaustive tests are those marked `exhaustive` and, of the tests
marked `covering`, the cases that add no combination of settings. With checked types, which take several times as long,
they are also the cases that add no value of any setting, the tests marked `exhaustive_types` and `ENGINE_TESTS`; a part
of them runs together with all tests that are not exhaustive.
"""

import argparse
import gc
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import groupby
from threading import Thread
from typing import TYPE_CHECKING, Any

import hypothesis
import numpy as np
import pytest
import torch
from jaxtyping import install_import_hook

from covering import Share, covering_cases, read_share

if TYPE_CHECKING:
    from openai import OpenAI
    from serving import Server

gc.disable()  # until all tests are collected

# A run that fails by chance says nothing about the change that it checks. HYPOTHESIS_PROFILE=explore draws others.
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.register_profile("explore", derandomize=False)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# Folders of `tmp_path` stay where pytest keeps them for some runs; the others are removed.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
_temporary = tempfile.TemporaryDirectory(prefix="foretell-tests-")
tempfile.tempdir = os.environ["TMPDIR"] = _temporary.name

# Packed weights of tests stay out of the user's cache.
os.environ["FORETELL_CACHE"] = f"{_temporary.name}/cache"
# A calibration of this machine would be the default device of plans.
os.environ["XDG_CONFIG_HOME"] = f"{_temporary.name}/config"

CHECKED = bool(os.environ.get("FORETELL_CHECK_TYPES"))
ENGINE_TESTS = ("tests/draft/", "tests/accept/test_lossy.py")
"""Tests that mostly run an engine. With checked types they are exhaustive: the representatives of all methods in
`test_general` make the same calls.
"""
if CHECKED:
    install_import_hook("foretell", "typecheck.check" if find_spec("beartype") else None)
torch.set_num_threads(1)
# Kernels of GPUs run in Triton's interpreter where there is none; it must be chosen before they are imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def interpreted_products() -> Iterator[None]:
    """Triton's interpreter multiplies by NumPy. On some processors NumPy's products of a row depend on the other rows,
    and a GPU's do not, so here they are rounded from float64.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        yield
        return
    plain = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if any(x.dtype.primitive_bitwidth == 8 and x.dtype.is_floating() for x in (a, b)):
            return plain(self, a, b, d, *options)
        sums = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(d.data.dtype)
        return interpreter.TensorHandle(sums + d.data, d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive", metavar="none|all|K/N", type=_share, default=Share(0, 1),
        help="which exhaustive tests to run: none of them but all others (the default), all of them, or the K-th of N "
        "parts, chosen by the hash of a test's name; with checked types all others run, too; tests that are named with "
        ":: always run",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Where processes share the tests, the one that hands them out compiles the kernels meanwhile."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        Thread(target=_compile_kernels, daemon=True).start()


def _compile_kernels() -> None:
    from foretell.model.kernels import build

    build.load()


def _share(text: str) -> Share:
    try:
        return read_share(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is none of: none, all, or a part such as 2/3") from None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that --exhaustive does not choose."""
    if any("::" in argument for argument in config.args):
        return
    share: Share = config.getoption("--exhaustive")
    exhaustive = set[pytest.Item]()
    for _, cases in groupby(items, lambda item: item.nodeid.partition("[")[0]):
        exhaustive |= _exhaustive(list(cases))
    others = share.number == 0 or CHECKED
    chosen = {item for item in items if (item.nodeid in share if item in exhaustive else others)}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def pytest_collection_finish() -> None:
    """Take what the imports made out of the collector's work: it is many times what a test makes."""
    gc.enable()
    gc.collect()
    gc.freeze()


def _exhaustive(cases: Sequence[pytest.Item]) -> set[pytest.Item]:
    """The exhaustive ones among the cases of one test."""
    kept = [case for case in cases if not _is_exhaustive(case)]
    covering = kept[0].get_closest_marker("covering") if kept else None
    strength = 1 if CHECKED else covering.args[0] if covering else 0
    # One name per `parametrize`; a test without it has no settings.
    settings: list[list[str]] = [case.callspec._idlist if hasattr(case, "callspec") else [] for case in kept]
    chosen = {kept[number] for number in covering_cases(settings, strength)} if strength else set(kept)
    return set(cases) - chosen


def _is_exhaustive(case: pytest.Item) -> bool:
    if CHECKED and (case.get_closest_marker("exhaustive_types") or case.nodeid.startswith(ENGINE_TESTS)):
        return True
    return case.get_closest_marker("exhaustive") is not None


@pytest.fixture(scope="module")
def server() -> "Iterator[Server]":
    """A server of a tiny model; a module that needs another has a fixture of its own."""
    from serving import running_server

    with running_server() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: "Server") -> "Iterator[OpenAI]":
    """OpenAI's client of the server."""
    from openai import OpenAI

    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as connected:
        yield connected
