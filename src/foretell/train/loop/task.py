"""From settings to everything a training needs: data checked against the target, the recipe, its beginning."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int

from foretell.api import Model
from foretell.model.load.checkpoint import ends_of
from foretell.retrieval.datastore import tokenizer_fingerprint as tokenizer_of
from foretell.speculator.checkpoint import load_own
from foretell.speculator.installed import find_installed
from foretell.speculator.network import NETWORKS
from foretell.speculator.network.base import TargetCard
from foretell.train.data.dataset import Dataset
from foretell.train.data.features import Cached, Features, Shelf, Streamed
from foretell.train.data.schedule import Order, Pieces, Schedule, pieces
from foretell.train.loop.measure import prompts_of
from foretell.train.loop.settings import DRAFT_VOCAB, Settings
from foretell.train.recipe import RECIPES
from foretell.train.recipe.base import Recipe, Setup, plain_decoder
from foretell.utils.names import unknown

PRECISIONS = ("bf16", "no")
SCHEDULES = ("cosine", "constant")
FEATURES = ("auto", "cache", "stream")


@dataclass(frozen=True)
class Task:
    """A training about to begin."""

    settings: Settings
    model: Model
    data: tuple[Dataset, ...]
    setup: Setup
    recipe: Recipe
    shadow: Recipe
    """The same again, plain: what is measured and saved, however the first one is wrapped."""
    schedule: Schedule
    steps: int
    prompts: Sequence[Sequence[int]]
    origin: Path | None
    """Where the speculator lies that it begins from."""

    @property
    def fingerprint(self) -> str:
        """The target's."""
        return self.setup.card.fingerprint

    @property
    def documents(self) -> int:
        """Texts that are trained on."""
        p = self.schedule.pieces
        return len(np.unique(np.stack([p.source, p.document]), axis=1).T)


def understood(settings: Settings) -> type[Recipe]:
    """What can be refused before anything is read; the recipe.

    Raises:
        ValueError: a name that is not known.
    """
    for what, name, known in (
        ("precision", settings.precision, PRECISIONS),
        ("schedule", settings.schedule, SCHEDULES),
        ("value of --features", settings.features, FEATURES),
    ):
        if name not in known:
            raise unknown(what, name, known)
    if settings.recipe not in RECIPES:
        raise unknown("recipe", settings.recipe, RECIPES)
    return RECIPES[settings.recipe]


def prepare(settings: Settings, model: Model, recipe: type[Recipe]) -> Task:
    """Read the data and build the recipe.

    Raises:
        ValueError: data of another tokenizer or too little of it, options that the recipe does not have, a beginning
            that does not fit.
    """
    if settings.sequence > model.config.context:
        raise ValueError(f"--sequence {settings.sequence}: {model.name} reads at most {model.config.context} tokens")
    data = tuple(Dataset.open(Path(p.folder)) for p in settings.data)
    for one in data:
        check_data(one, model)
    fingerprint = model.checkpoint.fingerprint()
    splits = [one.split(held) for one, held in zip(data, _held_out(data, settings.measure_prompts), strict=True)]
    rows = pieces(data, [train for train, _ in splits], settings.sequence)
    order = Order(settings.seed, settings.batch_tokens, settings.accumulate, tuple(p.weight for p in settings.data))
    if int(rows.length.sum()) < settings.batch_tokens:
        raise ValueError(
            f"too little data: {len(rows)} texts with {int(rows.length.sum())} tokens beside those held back for "
            f"measuring, "
            f"and a batch takes {settings.batch_tokens}; make more with foretell data generate, or lower --batch-tokens"
        )
    schedule = Schedule(rows, order)
    held = [one[i] for one, (_, out) in zip(data, splits, strict=True) for i in out]
    origin = _origin(settings, fingerprint)
    setup = _setup(settings, model, fingerprint, data, rows, origin)
    ours, shadow = _begun(recipe, setup, origin), _begun(recipe, setup, origin)
    steps = settings.steps or schedule.steps(settings.epochs)
    prompts = prompts_of(held, settings.measure_prompts)
    return Task(settings, model, data, setup, ours, shadow, schedule, steps, prompts, origin)


def _origin(settings: Settings, fingerprint: str) -> Path | None:
    """The folder that was named, or that of the installed speculator of a kind for this target."""
    name = settings.begin
    if not name:
        return None
    if Path(name).is_dir():
        return Path(name)
    if name not in NETWORKS:
        raise ValueError(
            f"--from {name}: no such folder, and no kind of speculator; the kinds are {', '.join(NETWORKS)}"
        )
    found = find_installed(name, fingerprint)
    if found is None:
        raise ValueError(f"--from {name}: no {name} speculator is installed for this target; name the folder of one")
    return found


def _begun(recipe: type[Recipe], setup: Setup, origin: Path | None) -> Recipe:
    try:
        built = recipe.of(setup)
    except RuntimeError as error:
        if "allocate" not in str(error) and "out of memory" not in str(error):
            raise
        sizes = " ".join(f"--set {key}={value}" for key, value in setup.options.items())
        raise ValueError(f"{recipe.name} {sizes}: not enough memory for its weights; ask for smaller sizes") from error
    if origin is not None:
        begin(built, origin, setup)
    return built


def _held_out(data: Sequence[Dataset], prompts: int) -> list[int]:
    """Texts that each set holds back: all prompts come from answers where there are any."""
    asked = [d.manifest.kind != "text" for d in data]
    first = asked.index(True) if any(asked) else 0
    return [prompts if i == first else 0 for i in range(len(data))]


def check_data(data: Dataset, model: Model) -> None:
    """Check that a data set is of the model's tokens and words.

    Raises:
        ValueError: it is not.
    """
    known = data.manifest
    if known.tokenizer != tokenizer_of(model.codec) or known.vocab != model.config.vocab:
        raise ValueError(
            f"{data.folder}: its tokens are of another tokenizer ({known.model}, {known.vocab} tokens) than that of "
            f"{model.name} ({model.config.vocab} tokens); make a set with foretell data generate --model {model.name}"
        )
    if known.fingerprint and known.fingerprint != model.checkpoint.fingerprint():
        raise ValueError(
            f"{data.folder}: {known.model} (fingerprint {known.fingerprint}) wrote these answers, and the target is "
            f"{model.name} (fingerprint {model.checkpoint.fingerprint()}); make a set with foretell data generate "
            f"--model {model.name}"
        )


def _setup(
    settings: Settings, model: Model, fingerprint: str, data: Sequence[Dataset], rows: Pieces, origin: Path | None
) -> Setup:
    c, dtype = model.config, dtype_of(settings)
    decoder = plain_decoder(model.network, dtype)
    ends = model.checkpoint.embedding_and_head(dtype) if decoder is None else ends_of(decoder)
    card = TargetCard(name=model.name, fingerprint=fingerprint, hidden=c.hidden, vocab=c.vocab, layers=c.layers)
    if origin is not None and settings.draft_vocab is None:
        kept = load_own(origin, ends).token_of
    else:
        kept = frequent(data, rows, c.vocab, DRAFT_VOCAB if settings.draft_vocab is None else settings.draft_vocab)
    return Setup(card, c, ends, model.checkpoint, kept, settings.seed, settings.options, model.codec, model.network)


def dtype_of(settings: Settings) -> torch.dtype:
    """What the target is read in."""
    return torch.bfloat16 if settings.precision == "bf16" else torch.float32


def frequent(data: Sequence[Dataset], rows: Pieces, vocab: int, count: int) -> Int[torch.Tensor, " n"] | None:
    """The tokens that the answers to train on hold most often, ascending; None for all of them."""
    if not 0 < count < vocab:
        return None
    seen = np.zeros(vocab, np.int64)
    for s, d in {(int(s), int(d)) for s, d in zip(rows.source, rows.document, strict=True)}:
        text = data[s][d]
        seen += np.bincount(text.tokens[text.start :], minlength=vocab)
    return torch.from_numpy(np.sort(np.argsort(-seen, kind="stable")[:count]))


def begin(recipe: Recipe, folder: Path, setup: Setup) -> None:
    """Take the weights of a trained speculator; its tokens are those of the recipe then.

    Raises:
        ValueError: it is of another kind, for another target, has other sizes, or an output matrix for other tokens.
    """
    found = load_own(folder, setup.ends)
    if found.kind != recipe.network.kind:
        raise ValueError(
            f"--from {folder}: a speculator of kind {found.kind!r}, and {recipe.name} trains {recipe.network.kind!r}"
        )
    theirs, ours = found.card.fingerprint, setup.card.fingerprint
    if theirs and theirs != ours:
        raise ValueError(
            f"--from {folder}: trained for {found.card.name} (fingerprint {theirs}), and the target is "
            f"{setup.card.name} (fingerprint {ours})"
        )
    before, now = found.hidden_layers, recipe.network.hidden_layers
    if now[: len(before)] != before:
        raise ValueError(
            f"--from {folder}: it reads layers {list(before)} of the target, and {list(now)} with these settings; "
            "give the --set it was trained with"
        )
    mine, given = recipe.network.state_dict(), recipe.network.widened(found)
    if found.head is None:
        # Whatever tokens it drafts, their rows are the target's.
        given = {n: t for n, t in given.items() if n != "token_of"} | {n: t for n, t in mine.items() if n == "token_of"}
    elif not _equal(found.token_of, recipe.network.token_of):
        raise ValueError(
            f"--from {folder}: it has an output matrix of its own, for {len(found.head):,} tokens; leave --draft-vocab "
            f"away to go on with these"
        )
    for name in sorted(set(mine) | set(given)):
        shapes = [list(s[name].shape) if name in s else "missing" for s in (given, mine)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"--from {folder}: its {name} is {shapes[0]}, and {shapes[1]} with these settings; give the --set it "
                f"was trained with"
            )
    recipe.network.load_state_dict(given)


def _equal(some: torch.Tensor | None, others: torch.Tensor | None) -> bool:
    return some is others if some is None or others is None else torch.equal(some, others)


def features(task: Task) -> Features:
    """Where the target's states come from: files beside the data where `--features` and `--cache-gib` have room.

    Raises:
        ValueError: `--features cache` was asked for, and they do not fit.
    """
    settings, hidden_layers = task.settings, tuple(task.recipe.hidden_layers)
    streamed = Streamed(lambda: task.setup.decoder, hidden_layers)
    if settings.features == "stream" or not hidden_layers:
        return streamed
    hidden = task.model.config.hidden
    need = sum(d.tokens for d in task.data) * hidden * 2 * len(hidden_layers)
    room = int(settings.cache_gib * 2**30)
    if settings.features == "cache" and need > room:
        raise ValueError(
            f"--features cache: the states of this data take {need / 2**30:.1f} GiB, more than --cache-gib "
            f"{settings.cache_gib:g}; "
            "raise it, or leave --features away and what fits is kept"
        )
    shelves = []
    for one in task.data:
        lengths = [len(document.tokens) for document in one]
        share = int(room * one.tokens / sum(d.tokens for d in task.data))
        shelves.append(Shelf(one.folder / "features", task.fingerprint, hidden_layers, lengths, hidden, share))
    return Cached(streamed, shelves, task.model.config, task.setup.ends.embedding.dtype)
