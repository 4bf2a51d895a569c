"""What a predictor of neurons and heads knows beside a constant set: Deja Vu's table (arXiv 2310.17157).

    foretell train decoder --activation relu --layers 4 --hidden 256 --ffn 1024 --vocab 512 --sequence 128 \\
        --batch-tokens 1024 --steps 2000 --out relu
    python tools/measure_sparsity.py relu --seed 0

Both read Python's library; what is measured is in modules that neither the training nor the fit has seen. A token needs
the units that add most to the output of their layer, and no neuron that is zero. Predictors of low rank are fitted to
what tokens need, and compared with the units that are needed most often (constant) and with what is needed itself
(oracle), with as many units each. Recall is the share of the needed units that are read; weights are those of the
feed-forward networks, or of the queries and the output of attention, the predictors' included. Times are those of a
pass over one token, with the CPU kernels in bfloat16, over a pass of the dense model: a constant set of neurons takes
that of the first neurons, in multiples of 64, as a smaller model has them. `--only-times` measures these alone, for a
model whose numbers do not matter.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int

from foretell.api import Model
from foretell.bench.own_backend import OwnForwardBackend
from foretell.bench.step import time_passes
from foretell.lab.reproduce.lab import library_sources
from foretell.lab.sparsify.activations import BlockActivations, block_activations
from foretell.lab.sparsify.predictors import (
    PredictorSettings,
    fit_predictor,
    head_sizes,
    largest,
    needed_heads,
    needed_neurons,
    neuron_sizes,
)
from foretell.load import OpenCheckpoint, load, open_checkpoint
from foretell.model.block.activation import activated
from foretell.model.block.decoder import Decoder
from foretell.model.block.layer import DecoderBlock, FeedForward
from foretell.model.block.linear import Linear
from foretell.model.block.sparsity import FirstNeurons, NeuronRule, PredictedNeurons, Predictor, sparse_decoder
from foretell.model.config.model import ModelConfig
from foretell.model.kernels.structures import prefix_size
from foretell.model.load.build import build_decoder
from foretell.model.load.reference import resolve_reference
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.training.full_forward import full_forward
from foretell.retrieval.corpus import tokenize_documents

Tensor = torch.Tensor
_LENGTH = 128
"""Tokens of a piece of text."""
_RESAMPLES = 4000
_RUN = 32
"""Neurons that are read together where all are, as the weights are packed."""
_TIMED, _ROUNDS = 8, 9
"""Pieces of text after which passes are timed, and rounds of that."""


@dataclass(frozen=True)
class Texts:
    """Pieces of text: to fit to or to count on, and of other modules."""

    fit: Int[Tensor, "n s"]
    held: Int[Tensor, "m s"]


def read_texts(opened: OpenCheckpoint, fit: int, held: int, seed: int) -> Texts:
    """Pieces of Python's library at random, of so many tokens."""
    codec, (other, learned) = opened.read_codec(), library_sources()
    generator = torch.Generator().manual_seed(seed)

    def draw(documents: Sequence[str], tokens: int) -> Int[Tensor, "n s"]:
        stream = torch.from_numpy(np.concatenate(list(tokenize_documents(documents, codec))).astype(np.int64))
        starts = torch.randint(len(stream) - _LENGTH, (tokens // _LENGTH, 1), generator=generator)
        return stream[starts + torch.arange(_LENGTH)]

    order = torch.randperm(len(learned), generator=generator)[: 4 + fit // 1000]
    return Texts(draw([learned[i] for i in order], fit), draw(list(other.values()), held))


class NeededNeurons(FeedForward):
    """A network of which every token reads the share of the neurons that it needs most: the oracle."""

    def __init__(self, dense: FeedForward, share: float) -> None:
        super().__init__(dense.gate_up, dense.down, dense.activation)
        self.share = share

    def forward(self, x: Float[Tensor, "*t d"]) -> Float[Tensor, "*t d"]:
        """The dense network with the other neurons at zero."""
        inner = activated(self.gate_up(x), self.activation)
        needed = largest(neuron_sizes(inner, self.down.weight), 1 - self.share)
        out: Tensor = self.down(inner.masked_fill(~needed, 0))
        return out


class NeededHeads(Linear):
    """The output of attention, of which every token reads the share of the heads that it needs most."""

    def __init__(self, dense: Linear, heads: int, share: float) -> None:
        super().__init__(dense.weight.data)
        self.heads, self.share = heads, share

    def forward(self, x: Float[Tensor, "*t i"]) -> Float[Tensor, "*t o"]:
        """Apply to the last axis."""
        needed = largest(head_sizes(x, self.weight, self.heads), 1 - self.share)
        return super().forward(x.masked_fill(~needed.repeat_interleave(x.shape[-1] // self.heads, -1), 0))


@dataclass
class Choice:
    """How units are chosen in all layers, and what that finds: `hits` of the units that are `needed`, and `read` of all
    of them, which are `units`, summed over tokens held out.
    """

    rules: list[Predictor] = field(default_factory=list)
    hits: float = 0.0
    needed: float = 0.0
    read: float = 0.0
    units: float = 0.0

    def add(self, rule: Predictor, x: Float[Tensor, "t d"], needed: Bool[Tensor, "t u"]) -> None:
        """Add a layer."""
        chosen = rule.choose(x)
        self.rules.append(rule)
        self.hits += float((chosen & needed).sum())
        self.needed += float(needed.sum())
        self.read += float(chosen.sum())
        self.units += needed.numel()


def constant_set(needed: Bool[Tensor, "t u"], hidden: int, share: float) -> Predictor:
    """A rule that reads the share of the units that are needed most often, whatever the token."""
    often, count = needed.float().mean(0), max(1, round(share * needed.shape[1]))
    bias = torch.zeros_like(often).scatter_(0, often.topk(count).indices, 1.0)
    return Predictor(torch.zeros(1, hidden), torch.zeros(len(bias), 1), 0.5, bias)


def fit_choices(
    opened: OpenCheckpoint, texts: Texts, shares: Mapping[str, Sequence[float]], settings: PredictorSettings
) -> dict[tuple[str, float, str], Choice]:
    """Predictors and constant sets of all layers, by unit ("neurons", "heads"), share and kind."""
    config, out = opened.config, dict[tuple[str, float, str], Choice]()
    torch.manual_seed(settings.seed)
    needs: Mapping[str, tuple[str, Callable[[BlockActivations, float], Bool[Tensor, "t u"]]]] = {
        "neurons": ("gate_up", needed_neurons),
        "heads": ("qkv", lambda block, sparsity: needed_heads(block, config, sparsity)),
    }
    both = (block_activations(config, opened.weights, part) for part in (texts.fit, texts.held))
    for fit, held in zip(*both, strict=True):
        for unit, (role, needed) in needs.items():
            x, other = fit.inputs[role], held.inputs[role]
            for share in shares[unit]:
                wanted, tested = needed(fit, 1 - share), needed(held, 1 - share)
                chosen = replace(settings, sparsity=1 - share, rank=min(settings.rank, wanted.shape[1]))
                predictor, _ = fit_predictor(x, wanted, chosen)
                fixed = constant_set(wanted, config.hidden, share)
                for kind, rule in (("predictor", predictor), ("constant", fixed)):
                    out.setdefault((unit, share, kind), Choice()).add(rule, other, tested)
    return out


def block_rules(config: ModelConfig, unit: str, rules: Sequence[Predictor]) -> list[PredictedNeurons]:
    """Rules of blocks whose tokens read the units that rules choose, and all others."""
    everything = constant_set(torch.ones(1, config.ffn // _RUN, dtype=torch.bool), config.hidden, 1.0)
    if unit == "neurons":
        return [PredictedNeurons(**vars(rule)) for rule in rules]
    return [PredictedNeurons(**vars(everything), unit=_RUN, heads=rule) for rule in rules]


def pass_times(
    model: Model, choices: Mapping[tuple[str, float, str], Choice], pieces: Int[Tensor, "n s"]
) -> dict[tuple[str, float, str], str]:
    """The time of a pass over one token after each piece of text, over that of the dense model: the median of the
    ratios, and the smallest and the largest.
    """
    dense, config = model.checkpoint.load_network(lambda decoder: decoder, "bfloat16"), model.config
    runners = {"dense": DecoderRunner(dense)}
    for (unit, share, kind), choice in choices.items():
        rules: Sequence[NeuronRule] = block_rules(config, unit, choice.rules)
        if (unit, kind) == ("neurons", "constant"):
            rules = [FirstNeurons(prefix_size(share, config.ffn))] * config.layers
        network = model.checkpoint.sparse_network(dense, rules)
        runners[f"{unit} {share} {kind}"] = DecoderRunner(network)
    backends, ratios = [OwnForwardBackend(name, runner) for name, runner in runners.items()], list[dict[str, float]]()
    for piece in pieces:
        timings = time_passes(backends, piece.tolist(), [1], _ROUNDS, lambda _: None)
        (whole,) = (t.median_ms for t in timings if t.competitor == "dense")
        ratios.append({t.competitor: t.median_ms / whole for t in timings} | {"ms": whole})
    print(f"a pass of the dense model takes {np.median([r['ms'] for r in ratios]):.2f} ms")
    spread = {key: [r[f"{key[0]} {key[1]} {key[2]}"] for r in ratios] for key in choices}
    return {key: f"{np.median(r):.2f} [{min(r):.2f}, {max(r):.2f}]" for key, r in spread.items()}


def chosen_decoder(decoder: Decoder, unit: str, rules: Sequence[Predictor]) -> Decoder:
    """The model of which tokens read the units that rules choose, and all others."""
    return sparse_decoder(decoder, block_rules(decoder.config, unit, rules))


def oracle_decoder(opened: OpenCheckpoint, unit: str, share: float) -> Decoder:
    """The model of which tokens read the units that they need."""
    decoder = dense_decoder(opened)
    for block in decoder.blocks:
        assert isinstance(block, DecoderBlock) and isinstance(block.mlp, FeedForward)
        if unit == "neurons":
            block.mlp = NeededNeurons(block.mlp, share)
        else:
            assert isinstance(block.output, Linear)
            block.output = NeededHeads(block.output, opened.config.heads, share)
    return decoder


def dense_decoder(opened: OpenCheckpoint) -> Decoder:
    """The model in float32."""
    return build_decoder(opened.config, opened.weights, torch.float32, torch.device("cpu"))


@torch.inference_mode()
def losses(decoder: Decoder, pieces: Int[Tensor, "n s"]) -> Float[np.ndarray, " n"]:
    """Nats per token of every piece."""
    out = list[float]()
    for piece in pieces:
        x = full_forward(decoder, decoder.embed(piece[None, :-1]))
        out.append(float(F.cross_entropy(decoder.logits(decoder.final_norm(x[0])), piece[1:])))
    return np.array(out)


def ratio_of(over: Float[np.ndarray, " n"], under: Float[np.ndarray, " n"], seed: int) -> str:
    """The ratio of two perplexities with its 95 % interval over pieces, resampled together."""
    gain = over - under
    drawn = np.random.default_rng(seed).choice(gain, (_RESAMPLES, len(gain))).mean(1)
    low, high = np.exp(np.quantile(drawn, (0.025, 0.975)))
    return f"{np.exp(gain.mean()):.2f} [{low:.2f}, {high:.2f}]"


def weights_read(opened: OpenCheckpoint, unit: str, choice: Choice) -> float:
    """What a token reads of the numbers of the feed-forward networks, or of the queries and outputs of attention, the
    predictors included, over all of them.
    """
    c, (rule, *_) = opened.config, choice.rules
    numbers = 3 * c.hidden * c.ffn if unit == "neurons" else 2 * c.hidden * c.heads * c.head_dim
    predictor = rule.inputs.numel() + rule.outputs.numel() + rule.bias.numel()
    return choice.read / choice.units + predictor / numbers


def predict(opened: OpenCheckpoint, args: argparse.Namespace) -> Iterator[str]:
    """The table of predictors beside constant sets and oracles."""
    texts = read_texts(opened, args.fit_tokens, args.held_tokens, args.seed)
    settings = PredictorSettings(rank=args.rank, steps=args.fit_steps, seed=args.seed)
    shares = {"neurons": args.shares, "heads": args.head_shares}
    choices, dense = fit_choices(opened, texts, shares, settings), dense_decoder(opened)
    times = pass_times(load(args.model, "bfloat16"), choices, texts.held[:_TIMED])
    if args.only_times:
        yield from (f"{' '.join(map(str, key))}: {time}" for key, time in times.items())
        return
    plain = losses(dense, texts.held)
    active = np.mean(
        [
            float((b.inputs["down"] != 0).float().mean())
            for b in block_activations(opened.config, opened.weights, texts.held)
        ]
    )
    yield (
        f"{texts.held.numel():,} tokens held out, fitted to {texts.fit.numel():,}; {active:.1%} of the neurons are not "
        f"zero; perplexity of the dense model {np.exp(plain.mean()):.2f}"
    )
    yield (
        "| read | recall: predictor | constant | perplexity: oracle | predictor | constant | constant over predictor "
        "| weights read | time: predictor | constant |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    )
    for unit, parts in shares.items():
        for share in parts:
            both = choices[unit, share, "predictor"], choices[unit, share, "constant"]
            decoders = [oracle_decoder(opened, unit, share), *(chosen_decoder(dense, unit, c.rules) for c in both)]
            oracle, own, fixed = (losses(decoder, texts.held) for decoder in decoders)
            recalls = " | ".join(f"{c.hits / c.needed:.1%}" for c in both)
            passes = " | ".join(times[unit, share, kind] for kind in ("predictor", "constant"))
            perplexities = " | ".join(f"{np.exp(loss.mean()):.2f}" for loss in (oracle, own, fixed))
            yield (
                f"| {both[0].read / both[0].units:.1%} of the {unit} ({share:.1%}) | {recalls} | {perplexities} "
                f"| {ratio_of(fixed, own, args.seed)} | {weights_read(opened, unit, both[0]):.1%} | {passes} |"
            )


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--seed", type=int, default=0, help="of the texts, the fit and the intervals")
    parser.add_argument("--fit-tokens", type=int, default=32768)
    parser.add_argument("--held-tokens", type=int, default=8192)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--fit-steps", type=int, default=300)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.2, 0.3])
    parser.add_argument("--head-shares", type=float, nargs="+", default=[0.125, 0.25, 0.375])
    parser.add_argument("--only-times", action="store_true")
    args = parser.parse_args()
    opened = open_checkpoint(resolve_reference(args.model))
    for line in predict(opened, args):
        print(line, flush=True)


if __name__ == "__main__":
    main()
