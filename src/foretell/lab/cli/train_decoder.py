"""`foretell train decoder`: a small model from random numbers, trained to leave early or to be nested."""

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from jaxtyping import Int
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from foretell.cli import options
from foretell.cli.given import refuse_unused
from foretell.cli.training import interruptible
from foretell.lab.cli.quantize import Force, check_output
from foretell.lab.reproduce.lab import library_sources
from foretell.load import load, open_checkpoint
from foretell.model.block.decoder import Decoder
from foretell.model.block.sparsity import FirstNeurons, sparse_decoder
from foretell.model.config.model import Activation, ModelConfig
from foretell.model.kernels.structures import prefix_size
from foretell.model.load.build import build_decoder
from foretell.model.load.reference import resolve_reference
from foretell.retrieval.corpus import find_files, read_documents, tokenize_documents
from foretell.speculator.hf_writer import write_hf
from foretell.speculator.network.exits import Exits
from foretell.tokenizer.codec import TextCodec
from foretell.train.exits.checkpoints import digest
from foretell.train.exits.depth_quality import DepthQuality, depth_quality
from foretell.train.exits.from_start import (
    FromStartSettings,
    Leave,
    depth_loss,
    exit_weights,
    random_decoder,
    schedule,
    train_from_start,
)
from foretell.train.loop.checkpoint import FOLDER
from foretell.train.loop.model_card import CARD
from foretell.utils.unfinished import whole

_HEAD, _CONTEXT, _END = 32, 1024, "<|endoftext|>"
_OPTIONS = (
    "steps", "rate", "batch", "sequence", "exit_loss", "rotate", "layer_dropout", "depth", "seed",
)  # fmt: skip
_HELD_PIECES = 64
"""Pieces of text held out that the model is measured on."""


@options.with_settings(FromStartSettings(), only=_OPTIONS)
def decoder(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(metavar="DIR", help="A directory in safetensors; training resumes in it.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="Text to learn, a tenth held out; repeatable. Default: Python's library."),
    ] = None,
    start: Annotated[
        str, typer.Option("--from", metavar="REF", help="Train this model further instead of random numbers.")
    ] = "",
    choose: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --from: exits of that model, whose policy chooses each token's layer."),
    ] = None,
    layers: Annotated[int, typer.Option(metavar="N", min=1, help="Layers.")] = 12,
    hidden: Annotated[int, typer.Option(metavar="N", min=64, help="Width, a multiple of 64.")] = 192,
    ffn: Annotated[int, typer.Option(metavar="N", min=64, help="Neurons per layer, a multiple of 64.")] = 512,
    vocab: Annotated[int, typer.Option(metavar="N", min=257, help="Tokens of the byte-level BPE.")] = 1024,
    activation: Annotated[
        Literal["silu", "relu"], typer.Option(help="Of the gates; those of relu are zero for most tokens.")
    ] = "silu",
    widths: Annotated[
        str, typer.Option(metavar="LIST", help="Shares of the neurons, of which a step draws one: 0.125,0.25,0.5,1.")
    ] = "1",
    settings: options.Settings = options.NO_SETTINGS,
    save_minutes: options.SaveMinutes = 10.0,
    force: Force = False,
) -> None:
    """Train a small model from random numbers with exits, layer dropout or nested widths, and measure it by depth; the
    same command resumes an interrupted training.

    foretell train decoder --exit-loss layerskip --rotate 4 --layer-dropout 0.1 --out small

    foretell generate "import os" --raw --model small --method layer_skip
    """
    refuse_unused(
        ctx, ("layers", "hidden", "ffn", "vocab", "activation"), "--from names a model of its own", bool(start)
    )
    if choose is not None and (not start or settings["depth"] != "all" or settings["exit_loss"] != "none"):
        raise ValueError("--choose: the exits choose the layers of a trained model; give --from alone with it")
    console = Console(file=sys.stderr)
    check_output(out, force, besides=FOLDER)
    asked = FromStartSettings(**settings, widths=_parse_widths(widths))
    learned, held = _texts(text)
    model, codec = _open(start) if start else _create(learned, layers, hidden, ffn, vocab, activation, asked.seed)
    leave = None if choose is None else _policy(start, choose)
    with console.status("reading the text") as status:
        stream, other = _tokens(learned, codec), _tokens(held, codec)
        pieces = other[: len(other) // asked.sequence * asked.sequence].view(-1, asked.sequence)
        pieces = pieces[:: max(1, len(pieces) // _HELD_PIECES)][:_HELD_PIECES]
        before = _chosen_depth(model, pieces, asked, leave)
        with interruptible(ctx, out, save_minutes, {"the text": digest(stream)}) as checkpoints:
            train_from_start(
                model, stream, asked, leave,
                lambda n, loss: status.update(f"step {n} of {asked.steps}, loss {loss:.3f}"),
                checkpoints=checkpoints,
            )  # fmt: skip
        status.update("measuring")
        parts = [FirstNeurons(prefix_size(width, model.config.ffn)) for width in sorted(asked.widths)]
        sizes = [(p.size, depth_quality(sparse_decoder(model, [p] * model.config.layers), pieces)) for p in parts]
        report = _report(model, sizes, pieces.numel(), len(stream), asked)
        if before is not None:
            after = _chosen_depth(model, pieces, asked, leave)
            report += ["", f"with the layers that tokens run by themselves: {after}, before the training {before}"]
        with whole(out) as part:
            write_hf(part, model, codec, torch.float32)
            command = shlex.join(["foretell", *sys.argv[1:]])
            (part / CARD).write_text("\n".join([f"# {out.name}", "", *report, "", "```", command, "```", ""]), "utf-8")
    typer.echo("\n".join(report))


def _policy(model: str, folder: Path) -> Leave:
    """Tokens leave where the classifier of an exit says so.

    Raises:
        ValueError: these are no exits that choose one by one.
    """
    exits = load(model, "float32").speculator(folder)
    if not isinstance(exits, Exits) or exits.config.halting in ("token", "sequence"):
        raise ValueError(f"{folder}: no exits that choose layer by layer; make them with train exits --halting policy")
    known = exits.config.layers
    return lambda i, x: exits.exit_score(known.index(i), x) > 0 if i in known else torch.zeros(x.shape[:2]).bool()


@torch.no_grad()
def _chosen_depth(
    model: Decoder, pieces: Int[torch.Tensor, "n t"], asked: FromStartSettings, leave: Leave | None
) -> str | None:
    """The perplexity with the layers that tokens run by a schedule or a policy; None: they run all."""
    if leave is None and asked.depth != "schedule":
        return None
    layers, length = model.config.layers, pieces.shape[1] - 1
    runs = None if leave else schedule(layers, length, torch.zeros(len(pieces), 1, dtype=torch.int64))
    done = depth_loss(model, pieces, exit_weights("none", layers), runs, leave)
    return f"perplexity {float(done.loss.exp()):.2f} with {done.layers:.2f} layers"


def _parse_widths(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--widths: numbers with commas between were expected, found {text!r}") from None


def _texts(paths: list[Path] | None) -> tuple[list[str], list[str]]:
    """Texts to learn, and those held out."""
    if not paths:
        held, learned = library_sources()
        return learned, list(held.values())
    texts = [text for file in find_files(paths) for text in read_documents(file)]
    if len(texts) == 1:
        texts = [text for text in texts[0].split("\n\n") if text.strip()]
    if len(texts) < 2:
        raise ValueError("--text: one paragraph alone leaves nothing to hold out; give more text")
    return [t for i, t in enumerate(texts) if i % 10 != 9 % len(texts)], texts[9 % len(texts) :: 10]


def _create(
    texts: list[str], layers: int, hidden: int, ffn: int, vocab: int, activation: Activation, seed: int
) -> tuple[Decoder, TextCodec]:
    """A random decoder with a byte-level BPE of the texts."""
    if hidden % (2 * _HEAD) or ffn % 64:
        raise ValueError(f"--hidden {hidden} --ffn {ffn}: multiples of 64 were expected")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[_END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    end = tokenizer.token_to_id(_END)
    assert end is not None
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{_END} $A", special_tokens=[(_END, end)])
    heads = hidden // _HEAD
    config = ModelConfig(
        architecture="llama", vocab=tokenizer.get_vocab_size(), hidden=hidden, layers=layers, heads=heads,
        kv_heads=heads // 2, head_dim=_HEAD, ffn=ffn, context=_CONTEXT, tied=True, bos=end, eos=(end,),
        activation=activation,
    )  # fmt: skip
    return random_decoder(config, seed), TextCodec(tokenizer, bos=_END, eos=_END)


def _open(model: str) -> tuple[Decoder, TextCodec]:
    """A model to train further.

    Raises:
        ValueError: its embedding and head are two matrices.
    """
    config, weights, read_codec, _ = open_checkpoint(resolve_reference(model))
    if not config.tied:
        raise ValueError(f"--from {model}: a model with a head of its own; models with a tied embedding are trained")
    return build_decoder(config, weights, torch.float32, torch.device("cpu")), read_codec()


def _tokens(texts: Iterable[str], codec: TextCodec) -> Int[torch.Tensor, " n"]:
    """All texts one after the other, each with the tokens that begin a prompt."""
    first = codec.encode("")
    return torch.cat([torch.tensor([*first, *d.tolist()]) for d in tokenize_documents(texts, codec)])


def _report(
    model: Decoder, sizes: list[tuple[int, DepthQuality]], measured: int, text: int, asked: FromStartSettings
) -> list[str]:
    numbers = sum(p.numel() for p in model.parameters()) - model.embedding.numel()
    trained = asked.steps * max(1, asked.batch // asked.sequence) * asked.sequence
    lines = [
        f"{numbers:,} numbers, trained on {trained:,} tokens of a text of {text:,}; on {measured:,} tokens held out:",
        "", "| neurons | layers | perplexity | token of all layers |", "|---:|---:|---:|---:|",
    ]  # fmt: skip
    for neurons, quality in sizes:
        rows = list(zip(quality.perplexity, quality.agreement, strict=True))
        lines += [f"| {neurons} | {i} | {p:.2f} | {a:.1%} |" for i, (p, a) in enumerate(rows, 1)]
    _, widest = sizes[-1]
    lines.append(
        f"\nwith exits by threshold {widest.equal_depth:.1%} of the layers run at equal perplexity (1.01), and "
        f"{widest.agreeing_depth:.1%} where 95 % of the tokens are those of all layers"
    )
    return lines
