"""`foretell phrases`: text that is copied phrase by phrase from an index."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from foretell.cli import options
from foretell.cli.setup import load_model
from foretell.cli.training import interruptible
from foretell.lab.phrases.encoders import PhraseEncoders, Phrases, generate, train
from foretell.lab.phrases.index import Related, States, encode, read_pieces
from foretell.speculator.checkpoint import write_weights
from foretell.train.exits.checkpoints import digest
from foretell.train.loop.checkpoint import FOLDER
from foretell.train.loop.model_card import CARD
from foretell.utils.paths import require_empty
from foretell.utils.unfinished import whole

app = options.group("Write text by copying phrases from an index (Copy is All You Need). LOSSY.")

Text = Annotated[list[Path], typer.Option(metavar="PATH", help="Texts to learn or to copy from; repeatable.")]
Tokens = Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of --text that are read, of every text as many.")]


@app.command("train")
def train_command(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the encoders; training resumes in it.")],
    text: Text,
    model: options.Model = options.DEFAULT_MODEL,
    tokens: Tokens = 64_000,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Gradient steps.")] = 400,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of weights and batches.")] = 0,
    save_minutes: options.SaveMinutes = 10.0,
) -> None:
    """Train the prefix and the phrase encoder on states of a frozen model; every tenth piece of the texts is held out.
    The same command resumes an interrupted training.

    foretell phrases train --text articles --out phrases
    """
    require_empty(out, FOLDER)
    target, losses = load_model(model), list[float]()
    pieces, _ = read_pieces(text, target, tokens)
    read = {
        "the text": digest(torch.tensor([token for piece in pieces for token in piece])),
        "the model": target.checkpoint.fingerprint(),
    }
    with Console(file=sys.stderr).status("reading the texts") as status, whole(out) as part:

        def report(step: int, loss: float) -> None:
            losses.append(loss)
            status.update(f"step {step} of {steps}, loss {loss:.3f}")

        related = Related(pieces, target.config.vocab)
        corpus = encode(pieces, States(target))
        with interruptible(ctx, out, save_minutes, read) as checkpoints:
            encoders = train(corpus, pieces, related, steps, seed, report, checkpoints)
        part.mkdir()
        write_weights(part, {name: t.detach().clone() for name, t in encoders.state_dict().items()})
        last = sum(losses[-20:]) / len(losses[-20:])
        done = f"{len(pieces)} pieces, {steps} steps, loss {losses[0]:.3f} at first, {last:.3f} in the last 20"
        command = shlex.join(["foretell", *sys.argv[1:]])
        (part / CARD).write_text(f"# Phrase encoders for {model}\n\n{done}\n\n```\n{command}\n```\n", "utf-8")
    typer.echo(f"{out}: {done}", err=True)


@app.command("generate")
def generate_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of `foretell phrases train`.")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Beginning of the text.")],
    text: Text,
    model: options.Model = options.DEFAULT_MODEL,
    tokens: Tokens = 64_000,
    documents: Annotated[int, typer.Option(metavar="N", min=1, help="Pieces to copy from, the most like PROMPT.")] = 30,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens to write.")] = 96,
    top_p: Annotated[float, typer.Option(metavar="P", min=0, max=1, help="Nucleus; 0: the likeliest.")] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of sampling.")] = 0,
) -> None:
    """Go on with a text. LOSSY: phrases are copied from --text, whatever the model itself would write.

    foretell phrases generate phrases "The war began when" --text articles
    """
    target = load_model(model)
    states, encoders = States(target), PhraseEncoders.open(folder, target.config.hidden)
    (pieces, _), begin = read_pieces(text, target, tokens), target.codec.encode(prompt)
    if not begin:
        raise ValueError("PROMPT is empty; give the beginning of a text")
    near = [pieces[i] for i in Related(pieces, target.config.vocab).nearest(begin, documents)]
    phrases = Phrases(encoders, encoders.encode_phrases(encode(near, states)))
    written = generate(begin, states, phrases, max_new_tokens, top_p, seed)
    typer.echo(prompt + target.codec.decode([t for choice in written for t in choice]))
