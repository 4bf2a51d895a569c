"""Fitting the exits of a model from a data set of its own answers to a speculator on disk."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Int

from foretell.api import Model
from foretell.model.run.network import Network
from foretell.model.run.partial_pass import check_spans
from foretell.speculator.checkpoint import save
from foretell.speculator.network.base import TargetInfo
from foretell.speculator.network.draft_model import DraftNetwork
from foretell.speculator.network.exits import Exits, ExitsConfig, block_config
from foretell.train.data.dataset import Dataset, Document
from foretell.train.exits.blocks import block_outputs, train_blocks
from foretell.train.exits.checkpoints import Checkpoints
from foretell.train.exits.classifiers import HaltingSettings, fit_classifiers
from foretell.train.exits.fit import (
    ExitKind,
    ExitQuality,
    evaluate,
    fit_linear,
    refine,
    set_shared,
    target_tokens,
)
from foretell.train.exits.joint import JointSettings, train_jointly
from foretell.train.exits.states import LayerStates, collect_sequences, collect_states
from foretell.utils.options import Option

_HELD_OUT = 0.1
"""Share of the documents that exits are measured on."""
_MIN_TOKENS = 500
"""Fewest tokens that exits are fitted on."""
_SOME_TOKENS = 20_000
"""Tokens that the map and the classifier of an exit with decoder blocks are fitted on."""


@dataclass(frozen=True)
class ExitSettings:
    """What is fitted. `layers`: empty, every tenth of the model; `inner`: with `joint`, the width of a network for all
    exits, which are then trained together; `draft_model`: as whose last blocks those of the exit begin.
    """

    layers: tuple[int, ...] = ()
    kind: Annotated[
        ExitKind, Option("linear: a least-squares shortcut per exit; shared: the model's own norm and head.")
    ] = "linear"
    steps: Annotated[int, Option("Gradient steps per exit after the closed form; 0: none.", least=0)] = 0
    rate: Annotated[float, Option("Learning rate of these steps.", name="--lr", least=0)] = 1e-3
    inner: Annotated[
        int, Option("Width of a feed-forward network per exit, which the steps train; 0: none.", least=0)
    ] = 0
    blocks: Annotated[
        int,
        Option(
            "Decoder blocks between the only exit and its head, begun as the model's next, trained by steps.", least=0
        ),
    ] = 0
    tokens: Annotated[int, Option("Most tokens to fit on.", least=1)] = 60_000
    draft_vocab: Annotated[int, Option("Exits give the most frequent tokens only, so many; 0: all.", least=0)] = 8192
    seed: Annotated[int, Option("Seed of data, batches and networks.")] = 0
    joint: JointSettings | None = None
    draft_model: DraftNetwork | None = None
    halting: HaltingSettings = field(default_factory=HaltingSettings)


@dataclass(frozen=True)
class FittedExits:
    """Exits with their quality on held-out documents; `tokens`, `held_out`: tokens that they were fitted and measured
    on.
    """

    exits: Exits
    quality: Sequence[ExitQuality]
    tokens: int
    held_out: int


def default_layers(layers: int) -> tuple[int, ...]:
    """Exits after every tenth of the layers."""
    return tuple(sorted({max(1, round(layers * i / 10)) for i in range(1, 10)} - {layers}))


def fit_exits(
    model: Model,
    data: Dataset,
    settings: ExitSettings,
    on_progress: Callable[[str], None] = lambda _: None,
    checkpoints: Checkpoints | None = None,
) -> FittedExits:
    """Fit exits on a data set of the model's answers. `on_progress` gets what is being done. With `checkpoints` the
    gradient steps go on after the latest one; what needs no steps is done again.

    Raises:
        ValueError: the model's layers keep more than keys and values, an exit does not exist, or the data are too few;
            or see `Descent.run`.
    """
    network, config = model.network, model.config
    check_spans(config)
    layers = settings.layers or default_layers(config.layers)
    if not layers or not all(1 <= layer < config.layers for layer in layers):
        raise ValueError(
            f"exits after layers {list(layers)} were asked for, and {model.name} has {config.layers} layers: an exit "
            f"is after layer 1 to {config.layers - 1}"
        )
    train, held = (
        [data[i] for i in part] for part in data.split(max(1, min(len(data) // 2, round(_HELD_OUT * len(data)))))
    )
    exits = build_exits(model, settings, layers, train)
    on_progress(f"reading the states of {len(layers)} layers")
    if settings.blocks:
        states = _train_with_blocks(exits, network, train, settings, on_progress, data, checkpoints)
    else:
        states = _checked(collect_states(network, train, layers, settings.tokens), data)
        if settings.kind == "linear":
            fit_linear(exits, states)
        else:
            set_shared(exits, final_norm_weight(network))
        if settings.steps:
            _train_by_gradient(exits, states, settings, on_progress, checkpoints)
    head = model.checkpoint.embedding_and_head(torch.float32).head
    on_progress("fitting the classifiers")
    fit_classifiers(exits, states, target_tokens(head, states), settings.halting, settings.seed)
    on_progress("measuring")
    through = exits.run_blocks if settings.blocks else None
    others = collect_states(network, held, layers, max(_MIN_TOKENS, settings.tokens // 10), blocks=through)
    quality = evaluate(exits, others, target_tokens(head, others))
    return FittedExits(exits, quality, len(states), len(others))


def _checked(states: LayerStates, data: Dataset) -> LayerStates:
    """The states, if they are enough."""
    if len(states) < _MIN_TOKENS:
        raise ValueError(
            f"{data.folder}: {len(states)} tokens to learn are too few to fit exits on; {_MIN_TOKENS} at least are "
            "needed, and some tens of thousands make good exits: enlarge it with foretell data generate"
        )
    return states


def _train_with_blocks(
    exits: Exits,
    network: Network,
    documents: Sequence[Document],
    settings: ExitSettings,
    on_progress: Callable[[str], None],
    data: Dataset,
    checkpoints: Checkpoints | None,
) -> LayerStates:
    """Train the decoder blocks of the only exit with its norm and map; their outputs, for the classifier."""
    layer = exits.config.layers[0]
    sequences = collect_sequences(network, documents, layer, settings.tokens)
    if settings.draft_model is None:
        fit_linear(exits, _checked(block_outputs(exits, sequences, _SOME_TOKENS), data))
    train_blocks(
        exits, sequences, settings.steps, settings.rate, settings.seed,
        lambda step, loss: on_progress(f"exit after {layer} layers: step {step}, loss {loss:.3f}"), checkpoints,
    )  # fmt: skip
    return _checked(block_outputs(exits, sequences, _SOME_TOKENS), data)


def _train_by_gradient(
    exits: Exits,
    states: LayerStates,
    settings: ExitSettings,
    on_progress: Callable[[str], None],
    checkpoints: Checkpoints | None,
) -> None:
    """Each exit by itself, or all together."""
    training = exits, states, settings.steps, settings.rate, settings.seed
    if settings.joint is not None:
        train_jointly(
            *training,
            settings.joint,
            lambda step, loss: on_progress(f"all exits: step {step}, loss {loss:.3f}"),
            checkpoints,
        )
    else:
        refine(
            *training,
            lambda layer, step, loss: on_progress(f"exit after {layer} layers: step {step}, loss {loss:.3f}"),
            checkpoints,
        )


def build_exits(model: Model, settings: ExitSettings, layers: tuple[int, ...], documents: Sequence[Document]) -> Exits:
    """Unfitted exits over the most frequent tokens of some documents."""
    c = model.config
    card = TargetInfo(
        name=model.name, fingerprint=model.checkpoint.fingerprint(), hidden=c.hidden, vocab=c.vocab, layers=c.layers
    )
    tokens = _frequent_tokens(documents, c.vocab, settings.draft_vocab)
    config = ExitsConfig(
        target=card,
        draft_vocab=None if tokens is None else len(tokens),
        layers=layers,
        maps=settings.kind == "linear",
        inner=settings.inner,
        shared_inner=settings.joint is not None,
        blocks=block_config(c, layers[0], settings.blocks) if settings.blocks else None,
        halting=settings.halting.halting,
        norm_eps=c.norm_eps,
    )
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        exits = Exits(config, model.checkpoint.embedding_and_head(torch.float32))
    if settings.draft_model is not None:
        exits.init_from_draft_model(settings.draft_model)
    elif settings.blocks:
        exits.init_from_target(model.checkpoint.decoder(torch.float32, range(layers[0], layers[0] + settings.blocks)))
    if tokens is not None:
        exits.set_draft_vocab(tokens)
    return exits.requires_grad_(False)


def final_norm_weight(network: Network) -> torch.Tensor:
    """The weight of the final norm: its output where all inputs are one."""
    width, eps = network.config.hidden, network.config.norm_eps
    ones = torch.ones(1, width, dtype=network.embed(torch.zeros(1, dtype=torch.int64)).dtype, device=network.device)
    with torch.inference_mode():
        normed: torch.Tensor = network.final_norm(ones)[0].float().cpu()
    return normed * math.sqrt(1 + eps)


def _frequent_tokens(documents: Sequence[Document], vocab: int, count: int) -> Int[torch.Tensor, " n"] | None:
    """The most frequent tokens of the answers, ascending; None: all of the vocabulary."""
    if not 0 < count < vocab:
        return None
    counts = np.zeros(vocab, np.int64)
    for document in documents:
        counts += np.bincount(document.tokens[document.start :], minlength=vocab)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count]))


def save_exits(folder: Path, fitted: FittedExits, command: str) -> None:
    """Write the exits and their card."""
    save(folder, fitted.exits, fitted.exits.config)
    lines = [
        f"# Exits of {fitted.exits.target_info.name}", "",
        f"Fitted on {fitted.tokens:,} tokens of the model's own answers, measured on {fitted.held_out:,} others.", "",
        *quality_table(fitted.quality), "",
        "```", command, "```", "",
    ]  # fmt: skip
    (folder / "README.md").write_text("\n".join(lines), "utf-8")


def quality_table(quality: Sequence[ExitQuality]) -> list[str]:
    """The quality of exits as lines of Markdown."""
    lines = [
        "| layers | same token | among best 2 | among best 4 | squared error | may leave at 5 % | drafts | right |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for q in quality:
        ranks = [q.agreement[min(k, len(q.agreement)) - 1] for k in (1, 2, 4)]
        shares = " | ".join(f"{share:.1%}" for share in ranks)
        drafts = f"{q.drafting.drafts:.1%} | {q.drafting.right:.1%}"
        lines.append(f"| {q.layer} | {shares} | {q.residual:.2f} | {q.confident:.1%} | {drafts} |")
    return lines
