"""Timing this machine for `foretell roofline calibrate`: the engine's own passes, behind the narrow callable the
analyzer takes.
"""

import os
import platform
import statistics
import time
from collections.abc import Iterator
from datetime import date

import numpy as np
import torch

from foretell.bench.random_model import random_network
from foretell.core.tree import TokenTree, tree_from_lists
from foretell.load import DEFAULT_MODEL, load
from foretell.model.config import ModelConfig
from foretell.model.runner import DecoderRunner, Network
from foretell.roofline.calibrate import PROBES, Measure
from foretell.roofline.formats import Format, parse
from foretell.roofline.names import look_up

DTYPES = {"bfloat16": "16", "int8": "8", "float32": "32"}
PROMPT_CHUNK = 256
PATIENCE = 2.0
"""Seconds after which a measurement ends whatever the machine does meanwhile."""
MOST_USED, MOST_SPREAD = 0.15, 0.5
"""What others may use of the processors, and how much longer than the fastest the median may be, before a machine
counts as busy.
"""


def form(precision: str) -> Format:
    """The analyzer's name of a dtype.

    Raises:
        ValueError: no dtype the engine runs.
    """
    return parse(look_up(DTYPES, precision, "dtype"))


def title() -> str:
    """What the processor calls itself."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return f"{names[0] if names else platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def source() -> str:
    """Where the figures come from."""
    return f"foretell roofline calibrate, {date.today().isoformat()}, torch {torch.__version__}"


def disturbance() -> str | None:
    """What shows that other work competes for this machine; None: nothing does."""
    used = _share_in_use()
    if used > MOST_USED:
        return f"other programs use {used:.0%} of the processors"
    block = torch.ones(1 << 22)

    def seconds() -> float:
        start = time.perf_counter()
        block.sum()
        return time.perf_counter() - start

    seconds()
    times = [seconds() for _ in range(100)]
    spread = statistics.median(times) / min(times) - 1
    return f"the same work takes {spread:.0%} longer than at its fastest" if spread > MOST_SPREAD else None


def _share_in_use() -> float:
    """Share of the processors' time that others use while this program sleeps; 0 where the system does not tell."""

    def ticks() -> tuple[int, int]:
        with open("/proc/stat", encoding="ascii") as file:
            each = [int(x) for x in file.readline().split()[1:9]]
        return each[3] + each[4], sum(each)

    try:
        idle, total = ticks()
        time.sleep(0.5)
        idle_then, total_then = ticks()
    except (OSError, ValueError, IndexError):
        return 0.0
    return 1 - (idle_then - idle) / max(1, total_then - total)


def memory() -> float:
    """Bytes of memory in this machine."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def probes(precision: str, repeat: int) -> Iterator[tuple[ModelConfig, Measure]]:
    """The calibration networks with random weights, one in memory at a time."""
    for config in PROBES:
        network = random_network(config, precision, torch.device("cpu"))  # type: ignore[arg-type]
        yield config, timer(network, repeat)


def embedded(precision: str, repeat: int) -> tuple[Measure, ModelConfig]:
    """The embedded model's timer, and its configuration."""
    model = load(DEFAULT_MODEL, dtype=precision)
    return timer(model.network, repeat), model.config


def timer(of: Network, repeat: int) -> Measure:
    """Seconds of a pass over n new tokens after s cached ones: the fastest, once `repeat` more were no faster; with all
    logits.
    """
    runner = DecoderRunner(of)

    def measure(tokens: int, context: int) -> float:
        runner.truncate(0, context)
        while runner.length(0) < context:
            piece = chain(min(PROMPT_CHUNK, context - runner.length(0)))
            runner.forward([0], piece, scored=np.zeros((1, piece.nodes), bool))
            runner.commit(0, list(range(piece.nodes)))
        tree, best, since = chain(tokens), float("inf"), 0
        # Other work on the machine only ever adds time: go on until the fastest pass has stood for a while.
        until = time.perf_counter() + PATIENCE
        while since < repeat and (start := time.perf_counter()) < until:
            runner.forward([0], tree)
            took = time.perf_counter() - start
            since = 0 if took < 0.98 * best else since + 1
            best = min(best, took)
        return best

    return measure


def chain(tokens: int) -> TokenTree:
    """A chain of the same token."""
    return tree_from_lists([[1] * tokens], [list(range(-1, tokens - 1))])
