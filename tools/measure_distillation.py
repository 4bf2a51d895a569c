"""What distillation does for a draft model: DistillSpec's table (arXiv 2310.08461), and learning while serving over a
change of topic (arXiv 2310.07177).

    python tools/measure_distillation.py --seed 0

The draft model that is installed for the target is trained further on one topic, sums told as stories, with every
divergence and every source of answers: `truth`, the right answers, written by rule; `target`, the target's own;
`draft`, what the draft model writes while it learns. Acceptance is that of speculative sampling after the
tokens of the target's answers, at temperature 1, to further questions of the topic; intervals hold 95 % of 4,000
samples of these. Then requests of the topic, of another and of the first are served by the draft model that learned the
right answers, which the target does not give: as it is, and learning from every correction. Acceptance is that of first
drafts, greedy.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int

from foretell.api import Model
from foretell.core.sampling import SamplingParams
from foretell.lab.reproduce.counts import Counts
from foretell.load import load
from foretell.speculator.network.draft_model import DraftNetwork
from foretell.train.data.dataset import DatasetManifest, DatasetWriter, DocumentRecord
from foretell.train.data.features import compute_hidden_states
from foretell.train.loop.accelerator import create_accelerator
from foretell.train.loop.job import feature_source, find_recipe, prepare
from foretell.train.loop.settings import DatasetWeight, TrainingSettings
from foretell.train.loop.trainer import Trainer, TrainingCallback

SOURCES = ("truth", "target", "draft")
_NAMES = ("Ana", "Ben", "Carla", "David", "Elif", "Farid", "Grace", "Hugo", "Ines", "Jamal", "Keiko", "Liam")
_THINGS = ("apples", "stamps", "marbles", "books", "pencils", "shells", "coins", "tickets", "cards", "eggs")
Sum = Callable[[int, int, int], int]
_SUMS: tuple[tuple[str, str, Sum], ...] = (
    ("{n} has {a} {t} and buys {b} more. How many {t} does {n} have now?", "{a} + {b}", lambda a, b, c: a + b),
    ("{n} has {a} {t} and gives {c} of them away. How many are left?", "{a} - {c}", lambda a, b, c: a - c),
    ("{n} has {a} {t}, finds {b} and loses {c}. How many {t} is that?", "{a} + {b} - {c}", lambda a, b, c: a + b - c),
    ("There are {c} {t} in each of {b} boxes. How many {t} does {n} count?", "{c} * {b}", lambda a, b, c: c * b),
    ("{n} pays {c} dollars for each of {b} {t}. What does {n} pay?", "{c} * {b}", lambda a, b, c: c * b),
)
_JOBS = ("sorts", "counts", "removes", "prints", "reverses", "groups", "compares", "stores", "filters", "adds up")
_OBJECTS = ("the words of a text", "the rows of a table", "the digits of a number", "duplicates in a list")
_TOPIC_CODE = [f"Write a Python function that {job} {thing}." for job in _JOBS for thing in _OBJECTS]
_TRAINING, _TESTED, _TOKENS = 192, 48, 48
_ROWS = 16
_WINDOW = 10


def sums(count: int, rng: random.Random) -> list[tuple[str, str]]:
    """Different questions of the topic with their right answers."""
    out = dict[str, str]()
    while len(out) < count:
        question, term, value = rng.choice(_SUMS)
        a, b, c = rng.randint(20, 99), rng.randint(2, 19), rng.randint(2, 19)
        words = {"n": rng.choice(_NAMES), "t": rng.choice(_THINGS), "a": a, "b": b, "c": c}
        out[question.format(**words)] = f"{term.format(**words)} = {value(a, b, c)}. The answer is {value(a, b, c)}."
    return list(out.items())


def write_set(model: Model, folder: Path, documents: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
    """A data set of prompts and answers."""
    manifest = DatasetManifest.of(model, "prompts")
    with DatasetWriter(folder, manifest) as writer:
        for i, (prompt, answer) in enumerate(documents):
            writer.add(DocumentRecord(number=i, tokens=[*prompt, *answer], start=len(prompt)))
        writer.seal()


def train(model: Model, data: Path, out: Path, options: dict[str, str], args: argparse.Namespace) -> None:
    """Train the installed draft model further."""
    network = model.speculator("draft_model")
    assert isinstance(network, DraftNetwork)
    settings = TrainingSettings(
        recipe="draft_model", model=model.name, data=(DatasetWeight(folder=str(data)),), out=str(out),
        steps=args.steps, batch_tokens=args.batch_tokens, sequence=256, lr=args.lr, warmup=4, seed=args.seed,
        measure_every=0, measure_prompts=2, measure_tokens=8, init_from="draft_model", precision=args.precision,
        options={"blocks": ",".join(map(str, network.config.blocks)), **options},
    )  # fmt: skip
    job = prepare(settings, model, find_recipe(settings))
    Trainer(job, create_accelerator(), feature_source(job), TrainingCallback()).run(lambda: False)


@dataclass(frozen=True)
class Context:
    """A question with the target's answer. `p`: its probabilities of the tokens that are drafted, at every token of the
    answer.
    """

    token: Int[torch.Tensor, "1 s"]
    start: int
    p: Float[torch.Tensor, "a w"]


@torch.inference_mode()
def contexts(
    model: Model, drafted: Int[torch.Tensor, " w"], asked: Sequence[tuple[list[int], list[int]]]
) -> list[Context]:
    """Of prompts with answers."""
    decoder, out = model.checkpoint.decoder(torch.float32), list[Context]()
    for prompt, answer in asked:
        token = torch.tensor([[*prompt, *answer]])
        (states,) = compute_hidden_states(decoder, token, (model.config.layers + 1,))
        p = torch.softmax(decoder.head(states[0, len(prompt) - 1 : -1]).float(), -1)
        out.append(Context(token, len(prompt), p[:, drafted]))
    return out


@torch.inference_mode()
def acceptance(network: DraftNetwork, tested: Sequence[Context]) -> Float[np.ndarray, " n"]:
    """Mean probability that a draft is accepted after the tokens of each answer: one minus the total variation."""
    out = list[float]()
    for context in tested:
        states = network.hidden_states(context.token)[0, context.start - 1 : -1]
        q = torch.softmax(network.compute_logits(states), -1)
        out.append(float(torch.minimum(context.p, q).sum(-1).mean()))
    return np.array(out)


def cell(after: Float[np.ndarray, " n"], before: Float[np.ndarray, " n"], seed: int) -> str:
    """Mean acceptance, and what it has over `before`."""
    gain = after - before
    low, high = np.quantile(np.random.default_rng(seed).choice(gain, (4000, len(gain))).mean(1), (0.025, 0.975))
    return f"{after.mean():.3f} ({gain.mean():+.3f} [{low:+.3f}, {high:+.3f}])"


def answers_of(model: Model, questions: Sequence[str]) -> list[tuple[list[int], list[int]]]:
    """Prompts with the target's answers at temperature 1."""
    requests = [
        model.request(q, SamplingParams(temperature=1.0, seed=i), max_new_tokens=_TOKENS)
        for i, q in enumerate(questions)
    ]
    return [
        (list(r.prompt), list(c.tokens))
        for r, c in zip(requests, model.engine(rows=_ROWS).complete(requests), strict=True)
    ]


def distill(model: Model, args: argparse.Namespace, folder: Path) -> None:
    """The table by divergence and source."""
    questions = sums(_TRAINING + _TESTED, random.Random(args.seed))
    answered = answers_of(model, [q for q, _ in questions])
    end = model.codec.encode("<|im_end|>")
    truth = [[*model.codec.encode(text, add_special_tokens=False), *end] for _, text in questions[:_TRAINING]]
    pairs = zip(answered[:_TRAINING], truth, strict=True)
    write_set(model, folder / "truth", [(prompt, right) for (prompt, _), right in pairs])
    write_set(model, folder / "target", answered[:_TRAINING])
    installed = model.speculator("draft_model")
    assert isinstance(installed, DraftNetwork) and installed.token_of is not None
    tested = contexts(model, installed.token_of, answered[_TRAINING:])
    before = acceptance(installed, tested)
    print(f"before: {before.mean():.3f}\n", flush=True)
    print(f"| divergence | {' | '.join(args.sources)} |\n|---|{'---|' * len(args.sources)}", flush=True)
    for loss in args.losses:
        cells = list[str]()
        for source in args.sources:
            out = folder / f"{loss}-{source}"
            written = {"writer": "draft", "share": "1", "written": str(_TOKENS)} if source == "draft" else {}
            train(model, folder / ("truth" if source == "truth" else "target"), out, {"loss": loss, **written}, args)
            trained = model.speculator(out)
            assert isinstance(trained, DraftNetwork)
            cells.append(cell(acceptance(trained, tested), before, args.seed))
            print(f"{loss}, {source}: {cells[-1]}", file=sys.stderr, flush=True)
        print(f"| `{loss}` | {' | '.join(cells)} |", flush=True)


def serve(model: Model, args: argparse.Namespace, draft_model: Path) -> None:
    """Acceptance while requests of one topic, then of another, then of the first again are served."""
    rng = random.Random(args.seed)
    stories = [q for q, _ in sums(2 * args.served, rng)]
    stream = stories[: args.served] + rng.sample(_TOPIC_CODE, args.served) + stories[args.served :]
    options = {"online_update_interval": 2, "online_learning_rate": args.online_lr}
    drafts = [draft_model]
    methods = {
        "as it is": model.method("online", options | {"online_update_interval": 0}, drafts=drafts),
        "learns": model.method("online", options, drafts=drafts),
    }
    shares = list[list[float]]()
    for method in methods.values():
        engine, row = model.engine(method, rows=2), list[float]()
        for i in range(0, len(stream), _WINDOW):
            requests = [model.request(q, max_new_tokens=_TOKENS) for q in stream[i : i + _WINDOW]]
            counts = Counts.of(engine.complete(requests))
            row.append(counts.accepted[0] / counts.drafting)
        shares.append(row)
    print(f"\n| requests, topic | {' | '.join(methods)} | gain |\n|---|---|---|---|")
    for i, (fixed, learns) in enumerate(zip(*shares, strict=True)):
        topic = ("sums", "code", "sums")[i * _WINDOW // args.served]
        window = f"{i * _WINDOW + 1} to {(i + 1) * _WINDOW}, {topic}"
        print(f"| {window} | {fixed:.3f} | {learns:.3f} | {learns - fixed:+.3f} |")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--losses", nargs="*", default=["forward_kl", "reverse_kl", "jsd", "tvd"])
    parser.add_argument("--sources", nargs="*", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-tokens", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--precision", default="bf16", help="bf16, or no: float32, faster without bfloat16 units")
    parser.add_argument("--online-lr", type=float, default=3e-4)
    parser.add_argument("--served", type=int, default=30, help="requests of a topic that are served before the next")
    parser.add_argument("--draft-model", type=Path, help="one that learns while it serves")
    parser.add_argument("--only", choices=("distill", "serve"), help="one half alone")
    parser.add_argument("--out", type=Path, help="folder to keep the sets and the draft models in")
    args = parser.parse_args()
    model = load(args.model)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.out or Path(temporary)
        if args.only != "serve":
            distill(model, args, folder)
        if args.only != "distill":
            serve(model, args, folder / f"{args.losses[0]}-truth" if args.draft_model is None else args.draft_model)


if __name__ == "__main__":
    main()
