"""FlexGen's block schedule (Sheng et al., arXiv 2303.06865) under one limit of memory: the rows of a block share every
reading of the weights, and their keys and values take the memory of blocks that would otherwise stay in it.

The policy search chooses both; a linear program is not needed, as with the rows given, more blocks in memory are never
slower. Keys, values and hidden states stay in memory: they have no tier of their own here.
"""

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretell.accept import Match
from foretell.api import Model
from foretell.draft import NoDrafter
from foretell.engine.engine import Engine
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.engine.scheduler import ROOM_FOR_DRAFTS
from foretell.model.cache.block_table import blocks_for
from foretell.model.offload.block_store import OffloadedDecoder, resident_within
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.runner import Runner
from foretell.shape import RootOnly

_PASSES = 5
"""Passes of a measurement; the median counts."""


@dataclass(frozen=True)
class PassCost:
    """What passes cost on a machine: seconds of a block and of what comes beside the blocks, by rows."""

    rows: Sequence[int]
    block_seconds: Sequence[float]
    outer_seconds: Sequence[float]
    bandwidth: float
    """Bytes of weights that are read per second."""
    sizes: Sequence[int]
    """Bytes of every block."""
    fixed_bytes: int
    """Bytes of weights that always stay in memory."""
    row_bytes: int
    """Bytes of the keys and values of a row."""
    spare_bytes: int
    """Of the cache, which the engine keeps free while it takes requests in."""


@dataclass(frozen=True)
class Policy:
    """A choice of the rows of a block, and what it predicts."""

    rows: int
    cache_bytes: int
    """Of the keys and values of the block."""
    resident_blocks: int
    read_bytes: int
    """Of a pass."""
    seconds: float
    """Of a pass."""

    def tokens_per_second(self, requests: int) -> float:
        """Of this many requests of one length, block after block; the last block may have fewer rows."""
        return requests / (-(-requests // self.rows) * self.seconds)

    def bytes_per_token(self, requests: int) -> float:
        """Weights read."""
        return self.read_bytes * -(-requests // self.rows) / requests


def pass_seconds(
    blocks: int, resident: int, ahead: int, read: float, compute: float, outer: float, passes: int = 4
) -> float:
    """Seconds of a pass after others: a thread reads the next `ahead` blocks while one runs (see `BlockStore`).

    `read`, `compute`: seconds of a block; `outer`: of a pass beside the blocks.
    """
    now = reader = begun = 0.0
    coming = deque[float]()
    for _ in range(passes):
        begun = now
        for i in range(blocks):
            if i >= resident:
                # Blocks are asked for in the order in which they are read.
                now = max(now, coming.popleft()) if coming else max(now, reader) + read
            while resident < blocks and len(coming) < ahead:
                reader = max(reader, now) + read
                coming.append(reader)
            now += compute
        now += outer
    return now - begun


def search(cost: PassCost, memory: int, most_rows: int) -> list[Policy]:
    """All policies that `memory` bytes of weights, keys and values hold, by their rows."""
    out = list[Policy]()
    for rows in range(1, most_rows + 1):
        cache = rows * cost.row_bytes + cost.spare_bytes
        room = memory - cache - cost.fixed_bytes
        if room < max(cost.sizes):
            break
        resident, places = resident_within(room, cost.sizes)
        block, outer = (float(np.interp(rows, cost.rows, y)) for y in (cost.block_seconds, cost.outer_seconds))
        read = statistics.mean(cost.sizes) / cost.bandwidth
        seconds = pass_seconds(len(cost.sizes), resident, max(0, places - 1), read, block, outer)
        out.append(Policy(rows, cache, resident, sum(cost.sizes[resident:]), seconds))
    return out


def measure_cost(model: Model, prompt: Sequence[int], most_rows: int, new_tokens: int) -> PassCost:
    """Measure a model under a limit of memory: blocks that stay in it by themselves, the disk in whole passes.

    Raises:
        ValueError: the model is not read block by block, or fewer than two of its blocks stay in memory.
    """
    network = model.network
    if (
        not isinstance(network, OffloadedDecoder)
        or not network.store.resident_blocks < network.store.count == network.config.layers
    ):
        raise ValueError(
            f"{model.name}: a block schedule needs a limit that holds the head of the model and not all of its blocks"
        )
    store = network.store
    if store.resident_blocks < 2:
        raise ValueError(
            f"{model.name}: times of blocks are measured on those that stay in memory, and the limit leaves room for "
            f"{store.resident_blocks}; it must leave room for two beside the {store.fixed_bytes:,} bytes that all need"
        )
    measured = sorted({1, *(2**i for i in range(most_rows.bit_length()) if 2**i < most_rows), most_rows})
    block, outer, last = list[float](), list[float](), store.resident_blocks
    for rows in measured:
        few, many = (_seconds(DecoderRunner(network.first_layers(n)), prompt, rows) for n in (1, last))
        block.append(max(0.0, many - few) / (last - 1))
        outer.append(max(0.0, few - block[-1]))
    read_bytes, read_seconds = store.read_bytes, store.read_seconds
    _seconds(model.runner(), prompt, 1)
    bandwidth = (store.read_bytes - read_bytes) / (store.read_seconds - read_seconds)
    row_bytes, spare = (
        blocks_for(n) * network.new_cache().block_bytes for n in (len(prompt) + new_tokens, ROOM_FOR_DRAFTS)
    )
    return PassCost(measured, block, outer, bandwidth, store.sizes, store.fixed_bytes, row_bytes, spare)


def _seconds(runner: Runner, prompt: Sequence[int], rows: int) -> float:
    """Median seconds of a pass over a token of each row, behind the prompt."""
    engine = _engine(runner, rows, len(prompt))
    request = Request(list(prompt), max_new_tokens=runner.context - len(prompt), ignore_eos=True)
    return statistics.median(_run(engine, [request] * rows, _PASSES)[1])


def _engine(runner: Runner, rows: int, prompt: int, cache_bytes: int | None = None) -> Engine:
    """An engine that decodes plainly and reads the prompts of a block in one pass."""
    plain = Method(NoDrafter(), RootOnly(), Match())
    return Engine(runner, plain, rows=rows, chunk=rows * prompt, cache_bytes=cache_bytes)


def _run(engine: Engine, requests: Sequence[Request], passes: int = 0) -> tuple[list[list[int]], list[float]]:
    """Run requests together: their tokens, and the seconds of every step that gave each of them one. `passes`: after so
    many of these steps all end.
    """
    answers, times = {engine.submit(request): list[int]() for request in requests}, list[float]()
    while engine.busy and (not passes or len(times) < passes):
        (done, tokens), begun = engine.prompt_progress, time.perf_counter()
        updates = engine.step()
        if done == tokens and len(updates) == len(requests):
            times.append(time.perf_counter() - begun)
        for update in updates:
            answers[update.request] += update.tokens
            if update.error is not None:
                raise update.error
    for number in answers:
        engine.cancel(number)
    return list(answers.values()), times


@dataclass(frozen=True)
class BlockRun:
    """What a schedule took."""

    tokens: Sequence[Sequence[int]]
    """Of every answer."""
    pass_seconds: float
    """Median over passes of one token per row."""
    read_bytes: int
    cache_bytes: int
    """Most memory of keys and values."""


def run_blocks(model: Model, prompts: Sequence[Sequence[int]], policy: Policy, new_tokens: int) -> BlockRun:
    """Decode prompts greedily, block after block of the policy's rows; a layer's weights are read once for all of them.

    Raises:
        ValueError: the model is not read block by block.
    """
    network = model.network
    if not isinstance(network, OffloadedDecoder):
        raise ValueError(f"{model.name}: the whole model is in memory; give a lower limit")
    store, answers, times, cache_bytes = network.store, list[list[int]](), list[float](), 0
    store.wait()
    read = store.read_bytes
    for first in range(0, len(prompts), policy.rows):
        block = prompts[first : first + policy.rows]
        engine = _engine(model.runner(), len(block), max(map(len, block)), policy.cache_bytes)
        tokens, seconds = _run(engine, [Request(list(p), max_new_tokens=new_tokens, ignore_eos=True) for p in block])
        answers, times, cache_bytes = answers + tokens, times + seconds, max(cache_bytes, engine.cache_bytes)
    return BlockRun(answers, statistics.median(times), store.read_bytes - read, cache_bytes)
