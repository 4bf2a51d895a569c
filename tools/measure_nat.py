"""All kinds of sequence-to-sequence models on one task: trained for the same processor time on original and on
distilled pairs, and measured beside an autoregressive model of the same size.

    python tools/measure_nat.py --out compared

The task is English to German in a small grammar (`english_to_german.py`), in parts of words. The same command goes on
after an interruption; its budget of processor time is less than an hour of two idle cores. BLEU needs `pip install
sacrebleu`. Times are processor time of all threads, medians over rounds in which all rows take turns.
"""

import argparse
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from english_to_german import generate_pairs

from foretell.cli.interrupt import Interrupt
from foretell.lab.nat.checkpoint import load_model
from foretell.lab.nat.decode import DecodeOptions
from foretell.lab.nat.distill import distilled
from foretell.lab.nat.evaluate import NatReport, evaluate
from foretell.lab.nat.network import NatModel
from foretell.lab.nat.pairs import Pair, read_pairs, write_pairs
from foretell.lab.nat.train import NatSettings, NatTrainer, write_card

_AR, _RAW, _DISTILLED = "autoregressive", "train.tsv", "distilled.tsv"
_TRAININGS = (
    (_AR, _RAW), ("cmlm", _RAW), ("glat", _RAW), ("cmlm", _DISTILLED), ("glat", _DISTILLED), ("fertility", _DISTILLED),
    ("sundae", _DISTILLED),
)  # fmt: skip
"""Kind and pairs; the first model is the teacher."""
_CMLM, _GLAT, _FERTILITY, _SUNDAE = (f"{kind}-distilled" for kind in ("cmlm", "glat", "fertility", "sundae"))
_ROWS: tuple[tuple[str, dict[str, int]], ...] = (
    (_AR, {}), ("cmlm", {"iterations": 1}), ("cmlm", {}), ("cmlm", {"iterations": 10}), ("glat", {}),
    (_CMLM, {"iterations": 1}), (_CMLM, {}), (_CMLM, {"iterations": 10}),
    (_CMLM, {"length_candidates": 1}), (_CMLM, {"length_candidates": 5}),
    (_GLAT, {}), (_FERTILITY, {}), (_FERTILITY, {"fertility_samples": 8}), (_SUNDAE, {}),
)  # fmt: skip
"""What is measured: a model with options of decoding."""
_DRAFTERS = ("cmlm", _CMLM, _GLAT, _FERTILITY, _SUNDAE)
_ROUNDS, _BATCH = 3, 64


def prepare(given: SimpleNamespace, out: Path) -> dict[str, NatModel]:
    """Write the pairs and train the models that the folder lacks; all models by name."""
    if not (out / _RAW).exists():
        write_pairs(out / _RAW, generate_pairs(given.pairs, given.seed))
    if not (out / "test.tsv").exists():
        known = {p.source for p in read_pairs(out / _RAW)}
        write_pairs(out / "test.tsv", generate_pairs(given.test_pairs, given.seed + 1, True, known))
    names = list[str]()
    for kind, pairs in _TRAININGS:
        if pairs == _DISTILLED and not (out / pairs).exists():
            print("distilling", flush=True)
            c = (teacher := load_model(out / _AR)).config
            taught = distilled(read_pairs(out / _RAW), teacher)
            # Outputs that do not end teach nothing, and are too long for fertilities.
            write_pairs(out / pairs, (p for p in taught if len(c.target.encode(p.references[0])) < c.max_target))
        names.append(kind if pairs == _RAW else f"{kind}-distilled")
        words = {"subwords": given.subwords} if kind == _AR else {"words_of": str(out / _AR)}
        trainer = NatTrainer(
            NatSettings(
                kind=kind, data=str(out / pairs), out=str(out / names[-1]), minutes=given.minutes, lr=given.lr,
                hidden=given.hidden, ffn=4 * given.hidden, layers=given.layers, seed=given.seed, **words,
            )
        )  # fmt: skip
        with Interrupt() as interrupt:
            trainer.run(lambda interrupt=interrupt: interrupt.requested)
        write_card(trainer, shlex.join(["python", *sys.argv]))
        size = sum(p.numel() for p in trainer.model.parameters())
        steps, loss = len(trainer.curve), trainer.curve[-1].loss
        print(f"{names[-1]}: {size:,} parameters, {steps:,} steps, last loss {loss:.3f}", flush=True)
    return {name: load_model(out / name) for name in names}


def measure(models: dict[str, NatModel], pairs: list[Pair], timed: int) -> None:
    """Print a row of the table for each model with its options, and for each as a drafter."""
    ar = models[_AR]

    def run(name: str, options: dict[str, int], drafts: bool, part: list[Pair], batch: int) -> NatReport:
        given = DecodeOptions.model_validate(options)
        if drafts:
            return evaluate(ar, part, given, drafter=models[name])
        return evaluate(models[name], part, given, batch, ar if "fertility_samples" in options else None)

    rows = [(name, options, False) for name, options in _ROWS] + [(name, {}, True) for name in _DRAFTERS]
    print(f"measuring on {len(pairs)} pairs", flush=True)
    quality = [run(*row, pairs, 1 if row[2] else _BATCH) for row in rows]
    rounds = [[run(*row, pairs[:timed], 1) for row in rows] for _ in range(_ROUNDS)]
    times = np.array([[r.cpu_milliseconds for r in turn] for turn in rounds])
    print("| model | options | BLEU | right | passes | CPU ms | speed | speed in batches of 64 |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for i, ((name, options, drafts), whole) in enumerate(zip(rows, quality, strict=True)):
        bleu = "-" if whole.bleu is None else f"{whole.bleu:.1f}"
        passes = f"{rounds[0][i].passes:.1f}" + (f" + {rounds[0][i].draft_passes:.1f}" if drafts else "")
        speed, batched = (
            statistics.median(times[:, 0] / times[:, i]),
            quality[0].cpu_milliseconds / whole.cpu_milliseconds,
        )
        same = f"{whole.same_as_verifier:.1%} greedy's" if drafts else f"{batched:.2f}"
        label = f"{_AR}, drafted by {name}" if drafts else name
        said = " ".join(f"{key.replace('_', ' ')} {value}" for key, value in options.items())
        print(
            f"| {label} | {said} | {bleu} | {whole.exact_match:.1%} | {passes} | {np.median(times[:, i]):.1f} | "
            f"{speed:.2f} | {same} |",
            flush=True,
        )


def parse(arguments: Sequence[str] | None) -> SimpleNamespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of pairs and models")
    parser.add_argument("--pairs", type=int, default=40_000, help="pairs to train on")
    parser.add_argument("--test-pairs", type=int, default=500, help="held-out pairs")
    parser.add_argument("--timed-pairs", type=int, default=100, help="of them, those that are timed one by one")
    parser.add_argument("--minutes", type=float, default=11.0, help="processor time of each of the seven trainings")
    parser.add_argument("--subwords", type=int, default=1000, help="parts of words of each side")
    parser.add_argument("--hidden", type=int, default=256, help="width")
    parser.add_argument("--layers", type=int, default=3, help="layers of encoder and decoder each")
    parser.add_argument("--lr", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments, SimpleNamespace())


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and measure."""
    given = parse(arguments)
    models = prepare(given, given.out)
    config = models[_AR].config
    test = [p for p in read_pairs(given.out / "test.tsv") if len(config.source.encode(p.source)) <= config.max_source]
    measure(models, test, given.timed_pairs)


if __name__ == "__main__":
    main()
