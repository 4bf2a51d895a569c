"""Hot neurons on one side, cold ones on another, both at work at once: PowerInfer's policy (arXiv 2312.12456), run.

    foretell train decoder --activation relu --layers 4 --hidden 256 --ffn 1024 --vocab 512 --sequence 128 \\
        --batch-tokens 1024 --steps 2000 --out relu
    python tools/measure_division.py relu --seed 0

A side is a thread with its own part of the neurons. It gives the sum of those that a token reads, and not before its
memory would have read them at so many bytes per second, as a device would; no weight changes sides. The neurons that
Python's library makes non-zero most often are hot, as `foretell calibrate placement` chooses them. Each arrangement
continues beginnings of other modules, and has to write what the undivided model writes.

Times are those of the neurons of a token, without attention and without choosing. Simulated: the mean of what the
slower side takes for the bytes that it reads for each token. Measured: the median of what passes with the threads took.
Forecast: what the roofline says from the counted frequencies alone.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from measure_sparsity import dense_decoder, read_texts

from foretell.api import Model
from foretell.engine.request import Request
from foretell.lab.sparsify.activations import block_activations
from foretell.load import OpenCheckpoint, open_checkpoint
from foretell.model.block.activation import gated
from foretell.model.block.decoder import Decoder
from foretell.model.block.layer import DecoderBlock, FeedForward
from foretell.model.block.sparsity import (
    GateThreshold,
    NeuronRule,
    PredictedNeurons,
    SparseFeedForward,
    sparse_decoder,
)
from foretell.model.load.reference import resolve_reference
from foretell.model.offload.neuron_placement import place_neurons
from foretell.model.offload.sparsity_file import read_sparsity
from foretell.roofline.neurons import Side, Sides

Tensor = torch.Tensor


def neuron_bytes(hidden: int) -> int:
    """Of the rows of gate, up and down in float32."""
    return 3 * hidden * 4


class EmulatedDevice:
    """A thread whose results take as long as its memory at `bandwidth` bytes per second, or longer."""

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth = bandwidth
        self._thread = ThreadPoolExecutor(1)

    def submit(self, work: Callable[[], Tensor], read: int) -> Future[Tensor]:
        """Start work that reads so many bytes."""
        return self._thread.submit(self._run, work, read)

    def _run(self, work: Callable[[], Tensor], read: int) -> Tensor:
        until = time.perf_counter() + read / self.bandwidth
        out = work()
        time.sleep(max(0.0, until - time.perf_counter()))
        return out


class Part:
    """The neurons of a layer that are on one side, a row of gate, up and down each."""

    def __init__(self, dense: FeedForward, neurons: Int[Tensor, " n"], device: EmulatedDevice) -> None:
        gate, up = dense.gate_up.weight.data.chunk(2)
        self.neurons, self.device, self.activation = neurons, device, dense.activation
        self.gate, self.up, self.down = gate[neurons], up[neurons], dense.down.weight.data.T[neurons]

    def start(self, x: Float[Tensor, "t d"], chosen: Bool[Tensor, "t f"]) -> tuple[Future[Tensor], int]:
        """The sum of those of its neurons that each token chooses, and how many it reads: those of any token. Prompts,
        of several tokens, do not wait for the memory.
        """
        mine = chosen[:, self.neurons]
        read = mine.any(0).nonzero().flatten()

        def work() -> Tensor:
            gate, up = x @ self.gate[read].T, x @ self.up[read].T
            out: Tensor = (gated(gate, up, self.activation) * mine[:, read]) @ self.down[read]
            return out

        size = neuron_bytes(x.shape[1]) * len(read) if len(x) == 1 else 0
        return self.device.submit(work, size), len(read)


class DividedFeedForward(SparseFeedForward):
    """A network whose neurons are on two sides that work at the same time. `dense`: every token reads all of them;
    `seconds` and `reads`: of passes over one token, the latter per side.
    """

    def __init__(self, sparse: SparseFeedForward, parts: Sequence[Part], dense: bool) -> None:
        super().__init__(sparse, sparse.rule)
        self.parts, self.dense = parts, dense
        self.seconds, self.reads = list[float](), list[list[int]]()

    def forward(self, x: Float[Tensor, "*t d"]) -> Float[Tensor, "*t d"]:
        """The sum of both sides."""
        flat = x.flatten(0, -2)
        chosen = self.choose(flat)
        chosen = torch.ones_like(chosen) if self.dense else chosen
        start = time.perf_counter()
        begun = [part.start(flat, chosen) for part in self.parts]
        out = torch.stack([future.result() for future, _ in begun]).sum(0)
        if len(flat) == 1:
            self.seconds.append(time.perf_counter() - start)
            self.reads.append([n for _, n in begun])
        return out.view(x.shape)


@dataclass(frozen=True)
class Arrangement:
    """The neurons of every layer in an order, of which the first `hot` are on the fast side; `dense`: all are read."""

    order: Int[Tensor, "l f"]
    hot: tuple[int, ...]
    dense: bool = False

    def forecast(self, frequency: Float[Tensor, "l f"], sides: Sides, neuron_bytes: int) -> float:
        """What the roofline says of the seconds of a token."""
        read = torch.ones_like(frequency) if self.dense else frequency.gather(1, self.order)
        rows = zip(read.double().numpy(), self.hot, strict=True)
        return sum(sides.layer_seconds(row, hot, neuron_bytes) for row, hot in rows)


def divide(
    decoder: Decoder, rules: Sequence[NeuronRule], arrangement: Arrangement, devices: Sequence[EmulatedDevice]
) -> tuple[Decoder, list[DividedFeedForward]]:
    """The model of sparse networks with its neurons on two sides, and its networks."""
    out, networks = sparse_decoder(decoder, rules), list[DividedFeedForward]()
    for block, order, hot in zip(out.blocks, arrangement.order, arrangement.hot, strict=True):
        assert isinstance(block, DecoderBlock) and isinstance(block.mlp, SparseFeedForward)
        sides = zip((order[:hot], order[hot:]), devices, strict=True)
        parts = [Part(block.mlp, neurons, device) for neurons, device in sides]
        networks.append(DividedFeedForward(block.mlp, parts, arrangement.dense))
        block.mlp = networks[-1]
    return out, networks


def count_reads(opened: OpenCheckpoint, rules: Sequence[NeuronRule], pieces: Int[Tensor, "n s"]) -> Int[Tensor, "l f"]:
    """How often the tokens of a text read every neuron."""
    counts = list[Tensor]()
    for block, rule in zip(block_activations(opened.config, opened.weights, pieces), rules, strict=True):
        mlp = block.block.mlp
        assert isinstance(mlp, FeedForward) and isinstance(rule, GateThreshold | PredictedNeurons)
        with torch.inference_mode():
            counts.append(SparseFeedForward(mlp, rule).choose(block.inputs["gate_up"]).sum(0))
    return torch.stack(counts)


def arrangements(counts: Int[Tensor, "l f"], share: float, seed: int) -> dict[str, Arrangement]:
    """By name; `share` of all neurons fit on the fast side."""
    layers, neurons = counts.shape
    capacity = round(share * counts.numel())
    whole = tuple(neurons * (i < capacity // neurons) for i in range(layers))
    most = counts.argsort(dim=1, descending=True, stable=True)
    hot = place_neurons(counts.numpy(), capacity).hot
    generator = torch.Generator().manual_seed(seed)
    anyhow = torch.stack([torch.randperm(neurons, generator=generator) for _ in range(layers)])
    return {
        "all on the slow side, dense": Arrangement(most, (0,) * layers, True),
        "whole layers, dense": Arrangement(most, whole, True),
        "all on the slow side": Arrangement(most, (0,) * layers),
        "whole layers": Arrangement(most, whole),
        "divided at random": Arrangement(anyhow, hot),
        "divided by frequency": Arrangement(most, hot),
        "all on the fast side": Arrangement(most, (neurons,) * layers),
    }


@dataclass(frozen=True)
class Run:
    """What an arrangement wrote; the neurons that each token read, by layer and side; and the seconds of each token."""

    texts: list[tuple[int, ...]]
    reads: Int[np.ndarray, "l n 2"]
    seconds: Float[np.ndarray, " n"]

    def simulated(self, sides: Sides, neuron_bytes: int) -> float:
        """Mean seconds of a token, of which every layer takes as long as its slower side."""
        pair = (side.bandwidth for side in (sides.fast, sides.slow))
        return float((neuron_bytes * self.reads / np.array(list(pair))).max(-1).sum(0).mean())

    def fast_share(self) -> float:
        """Share of the reads on the fast side."""
        return float(self.reads[..., 0].sum() / self.reads.sum())


def run(
    opened: OpenCheckpoint,
    rules: Sequence[NeuronRule],
    arrangement: Arrangement,
    bandwidths: Sequence[float],
    prompts: Int[Tensor, "n s"],
    tokens: int,
) -> Run:
    """Write with an arrangement."""
    decoder, networks = divide(dense_decoder(opened), rules, arrangement, [EmulatedDevice(b) for b in bandwidths])
    texts = write(as_model(opened, decoder), prompts, tokens)
    return Run(texts, np.array([m.reads for m in networks]), np.sum([m.seconds for m in networks], 0))


def write(model: Model, prompts: Int[Tensor, "n s"], tokens: int) -> list[tuple[int, ...]]:
    """Greedy continuations, one after the other."""
    requests = [Request(prompt.tolist(), max_new_tokens=tokens, eos=model.eos) for prompt in prompts]
    return [tuple(done.tokens) for done in model.engine(rows=1).complete(requests)]


def as_model(opened: OpenCheckpoint, decoder: Decoder) -> Model:
    """A model of the checkpoint's tokenizer."""
    return Model("divided", opened.config, opened.read_codec(), decoder, "float32", opened.eos)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--sparsity", type=Path, help="of `foretell train sparsity`; default: neurons above zero")
    parser.add_argument("--seed", type=int, default=0, help="of the texts and the random division")
    parser.add_argument("--share", type=float, nargs="+", default=[0.25, 0.5], help="of the neurons on the fast side")
    parser.add_argument("--bandwidths", type=float, nargs=2, default=[22.5, 2.0], help="MB/s of both sides")
    parser.add_argument("--count-tokens", type=int, default=16384)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16, help="of a continuation")
    parser.add_argument("--timed-tokens", type=int, default=2, help="of one that is timed; 0: none is")
    args = parser.parse_args()
    opened = open_checkpoint(resolve_reference(args.model))
    config = opened.config
    rules: Sequence[NeuronRule] = [GateThreshold(0.0)] * config.layers
    if args.sparsity:
        rules = read_sparsity(args.sparsity, "", config).rules
    texts = read_texts(opened, args.count_tokens, 128 * args.prompts, args.seed)
    prompts, counts = texts.held[:, : args.prompt_tokens], count_reads(opened, rules, texts.fit)
    frequency, size = counts.double() / texts.fit.numel(), neuron_bytes(config.hidden)
    bandwidths = [1e6 * b for b in args.bandwidths]
    sides = Sides(Side("fast", bandwidths[0]), Side("slow", bandwidths[1]))
    undivided = write(as_model(opened, sparse_decoder(dense_decoder(opened), rules)), prompts, args.tokens)
    dense = write(as_model(opened, dense_decoder(opened)), prompts, args.tokens)
    same = sum(a == b for a, b in zip(dense, undivided, strict=True))
    print(
        f"a token reads {float(frequency.mean()):.1%} of the neurons; {same} of {len(dense)} texts are the dense ones"
    )
    print(
        "| fast side | arrangement | reads on it | ms per token: forecast | simulated | measured | same texts |\n"
        "|---|---|---:|---:|---:|---:|---:|",
        flush=True,
    )
    for share in args.share:
        for name, arrangement in arrangements(counts, share, args.seed).items():
            if name.startswith("all on") and share != args.share[0]:
                continue
            written = run(opened, rules, arrangement, [np.inf, np.inf], prompts, args.tokens)
            equal = sum(a == b for a, b in zip(written.texts, dense if arrangement.dense else undivided, strict=True))
            measured = ""
            if args.timed_tokens:
                timed = run(opened, rules, arrangement, bandwidths, prompts, args.timed_tokens)
                measured = f"{1e3 * np.median(timed.seconds):.0f}"
            print(
                f"| {share:.0%} | {name} | {written.fast_share():.1%} "
                f"| {1e3 * arrangement.forecast(frequency, sides, size):.0f} "
                f"| {1e3 * written.simulated(sides, size):.0f} | {measured} | {equal} of {len(prompts)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
