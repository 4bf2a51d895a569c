"""`foretell data`: training sets for speculators, from the model itself."""

import sys
import time
from collections.abc import Iterator, Sequence
from hashlib import file_digest
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from foretell.api import Model
from foretell.cli.options import Device, Dtype
from foretell.cli.options import Model as ModelReference
from foretell.cli.prompts import LineError, PromptDefaults, PromptSpec, read_prompts
from foretell.cli.show import PROGRESS_INTERVAL
from foretell.core.sampling import SamplingParams
from foretell.load import DEFAULT_MODEL, load
from foretell.retrieval.corpus import find_files, read_documents
from foretell.retrieval.datastore import tokenizer_fingerprint
from foretell.train.data.dataset import Collection, Dataset, Manifest
from foretell.train.data.features import Shelf, hidden_layers_of
from foretell.train.data.generate import Prompts, answers, pieces

app = typer.Typer(
    no_args_is_help=True,
    help="Make training sets for speculators, from the model itself.",
    pretty_exceptions_enable=False,
)


@app.callback()
def main() -> None:
    """Make training sets for speculators, from the model itself."""


@app.command()
def generate(
    out: Annotated[Path, typer.Option(help="Folder to fill; one that was interrupted goes on where it was.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to be learned that the set shall have in the end.")],
    model: ModelReference = DEFAULT_MODEL,
    own: Annotated[bool, typer.Option("--self", help="The model writes its own prompts, then answers them.")] = False,
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts to answer: JSON lines with `prompt`, `messages` or `turns`.")
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="Plain text to learn as it is: files or directories; repeatable.")
    ] = None,
    dtype: Dtype = "bfloat16",
    device: Device = "cpu",
    rows: Annotated[int, typer.Option(min=1, help="Texts written together.")] = 32,
    greedy_share: Annotated[
        float, typer.Option(min=0, max=1, help="Answers that are greedy; the others are sampled.")
    ] = 0.8,
    temperature: Annotated[float, typer.Option(min=0, help="Of sampled answers.")] = 0.8,
    max_question: Annotated[int, typer.Option(min=8, help="Longest prompt of its own, in tokens.")] = 320,
    max_answer: Annotated[int, typer.Option(min=1, help="Longest answer, or piece of plain text, in tokens.")] = 384,
    seed: Annotated[int, typer.Option(min=0, help="Text n depends on the seed and n alone.")] = 0,
    states: Annotated[
        str,
        typer.Option(
            help="Layers whose states are kept beside the answers, as 2,15,27,31: trainings then need not read them."
        ),
    ] = "",
) -> None:
    """Write a training set: prompts answered by the model that is to be drafted for, or plain text.

    Shards of safetensors and a journal: whatever is finished survives a kill. Repeat the command to go on, with more
    --tokens to enlarge a set.
    """
    if [own, prompts is not None, bool(text)].count(True) != 1:
        raise ValueError("say where the texts come from: one of --self, --prompts FILE and --text FILE")
    if states and text:
        raise ValueError(
            "--states: plain text is not read by the model; the states of --self and --prompts can be kept"
        )
    console = Console(file=sys.stderr)
    target = load(model, dtype, device)
    hidden_layers = hidden_layers_of(states, target.config.layers + 1, "--states")
    sources = [prompts] if prompts else find_files(text or ())
    manifest = Manifest(
        model=target.name,
        fingerprint="" if text else target.checkpoint.fingerprint(),
        tokenizer=tokenizer_fingerprint(target.codec),
        vocab=target.config.vocab,
        kind="self" if own else "prompts" if prompts else "text",
        seed=seed,
        precision=dtype,
        greedy_share=greedy_share,
        temperature=temperature,
        max_question=max_question if own else 0,
        max_answer=max_answer,
        sources=tuple(f"{p.name} {_digest(p)}" for p in sources),
    )
    with Collection(out, manifest) as collection:
        if text:
            work = pieces(target, (t for f in sources for t in read_documents(f)), collection, max_answer, tokens)
        else:
            given = None if prompts is None else [target.tokens(t.prompt, t.raw) for t in tasks_of(prompts)]
            asked = Prompts(target, manifest, given)
            if given is None and collection.numbers:
                asked.recall(d.tokens[: d.start].tolist() for d in Dataset.open(out))
            shelf = _shelf(out, collection, target, hidden_layers) if hidden_layers else None
            work = answers(target, asked, manifest, collection, rows, tokens, shelf)
        _watch(work, collection, tokens, console)
        collection.seal()
    made = Dataset.open(out)
    (out / "README.md").write_text(_card(made, sys.argv[1:]))
    typer.echo(_sentence(made))


@app.command()
def show(path: Annotated[Path, typer.Argument(help="Folder of the set.")]) -> None:
    """Say what a training set holds."""
    typer.echo(_sentence(Dataset.open(path)))


def _shelf(out: Path, collection: Collection, target: Model, hidden_layers: Sequence[int]) -> Shelf:
    """Room for the states of texts to come, behind that for those which are there."""
    lengths = [len(d.tokens) for d in Dataset.open(out)] if collection.learnable else []
    return Shelf(out / "features", target.checkpoint.fingerprint(), hidden_layers, lengths, target.config.hidden, None)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()[:12]


def tasks_of(path: Path) -> list[PromptSpec]:
    """The prompts of a file of JSON lines; of a conversation, its first turn.

    Raises:
        ValueError: a line that is no prompt, or no prompts at all.
    """
    out = list[PromptSpec]()
    for number, task in read_prompts(path, PromptDefaults(SamplingParams(), 1, (), False, None)):
        if isinstance(task, LineError):
            raise ValueError(f"{path}, line {number}: {task.reason}")
        out.append(task)
    if not out:
        raise ValueError(f"{path}: no prompts here; write one JSON object with 'prompt' per line")
    return out


def _watch(work: Iterator[int], collection: Collection, wanted: int, console: Console) -> None:
    """Run to the end, showing tokens and speed: on a bar, or for logs in a line now and then."""
    columns = TextColumn("{task.completed:,} of {task.total:,} tokens"), BarColumn(), TextColumn("{task.fields[speed]}")
    watched, new = console.is_terminal, 0
    started = told = time.perf_counter()
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not watched) as progress:
        task = progress.add_task("", total=wanted, completed=min(collection.learnable, wanted), speed="")
        for decoded in work:
            new, now = new + decoded, time.perf_counter()
            done, speed = min(collection.learnable, wanted), f"{new / (now - started):,.0f} tokens/s"
            progress.update(task, completed=done, speed=speed)
            if not watched and now - told >= PROGRESS_INTERVAL:
                told = now
                console.print(f"{done:,} of {wanted:,} tokens  {speed}", highlight=False, soft_wrap=True)


def _sentence(data: Dataset) -> str:
    m, greedy = data.manifest, sum(d.greedy for d in data) / len(data)
    what = "pieces of plain text" if m.kind == "text" else f"answers of {m.model} ({greedy:.0%} greedy)"
    return f"{data.folder}: {len(data):,} {what}, {data.tokens:,} tokens, {data.learnable:,} of them to be learned"


def _card(data: Dataset, arguments: Sequence[str]) -> str:
    """The set's README."""
    m = data.manifest
    origin = {
        "self": f"Prompts sampled from the model's own chat template (temperature 1), up to {m.max_question} tokens; "
        f"junk and duplicates left out.",
        "prompts": f"Prompts from {', '.join(m.sources)}.",
        "text": f"Plain text from {len(m.sources)} files.",
    }[m.kind]
    lines = [
        f"# Training set from {m.model}",
        "",
        _sentence(data).split(": ", 1)[1] + ".",
        "",
        origin,
        "",
        "| | |",
        "|---|---|",
        f"| model | {m.model} ({m.precision}) |",
        f"| fingerprint | {m.fingerprint or '-'} |",
        f"| tokenizer | {m.tokenizer[:16]} |",
        f"| seed | {m.seed} |",
        f"| greedy answers | {m.greedy_share:.0%}, the others at temperature {m.temperature:g} |",
        f"| longest answer | {m.max_answer} tokens |",
        "",
        "```",
        f"foretell {' '.join(arguments)}",
        "```",
        "",
    ]
    return "\n".join(lines)
