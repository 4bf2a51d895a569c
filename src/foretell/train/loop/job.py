"""Preparation of a training: data checked against the target, the recipe, its initial weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int

from foretell.api import Model
from foretell.model.kernels.instruction_sets import has_bfloat16_units
from foretell.model.load.checkpoint import embedding_and_head_of
from foretell.retrieval.datastore import tokenizer_fingerprint as tokenizer_of
from foretell.speculator.checkpoint import load_own
from foretell.speculator.installed import find_installed
from foretell.speculator.network import NETWORKS
from foretell.speculator.network.base import TargetInfo
from foretell.tokenizer.codec import TextCodec
from foretell.train.data.batch_schedule import BatchingConfig, BatchSchedule, ChunkTable, split_documents
from foretell.train.data.dataset import Dataset
from foretell.train.data.features import CachedFeatures, FeatureSource, StreamedFeatures
from foretell.train.data.hidden_state_cache import HiddenStateCache
from foretell.train.loop.measure import held_out_prompts
from foretell.train.loop.settings import DRAFT_VOCAB, TrainingSettings
from foretell.train.recipe import RECIPES
from foretell.train.recipe.base import Recipe, RecipeSetup, plain_decoder
from foretell.utils.names import unknown

PRECISIONS = ("auto", "bf16", "no")
SCHEDULES = ("cosine", "constant")
FEATURE_MODES = ("auto", "cache", "stream")


@dataclass(frozen=True)
class TrainingJob:
    """Everything that a training needs, loaded and checked."""

    settings: TrainingSettings
    model: Model
    data: tuple[Dataset, ...]
    setup: RecipeSetup
    recipe: Recipe
    measured_recipe: Recipe
    """A second instance of `recipe`, not wrapped for distributed training; its weights are measured and saved."""
    schedule: BatchSchedule
    num_steps: int
    prompts: Sequence[Sequence[int]]
    """Held-out prompts to measure on."""
    init_folder: Path | None
    """Folder of the speculator whose weights training starts from."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the target."""
        return self.setup.card.fingerprint

    @property
    def num_documents(self) -> int:
        """Documents that are trained on."""
        chunks = self.schedule.chunks
        return len(np.unique(np.stack([chunks.dataset, chunks.document]), axis=1).T)


def find_recipe(settings: TrainingSettings) -> type[Recipe]:
    """The recipe of the settings, after a check of all their names.

    Raises:
        ValueError: an unknown name.
    """
    for what, name, known in (
        ("precision", settings.precision, PRECISIONS),
        ("schedule", settings.schedule, SCHEDULES),
        ("value of --features", settings.features, FEATURE_MODES),
    ):
        if name not in known:
            raise unknown(what, name, known)
    if settings.recipe not in RECIPES:
        raise unknown("recipe", settings.recipe, RECIPES)
    return RECIPES[settings.recipe]


def prepare(settings: TrainingSettings, model: Model, recipe: type[Recipe]) -> TrainingJob:
    """Load the data and build the recipe.

    Raises:
        ValueError: data of another tokenizer, too little data, unknown options of the recipe, or initial weights that
            do not fit.
    """
    if settings.sequence > model.config.context:
        raise ValueError(f"--sequence {settings.sequence}: {model.name} reads at most {model.config.context} tokens")
    data = tuple(Dataset.open(Path(d.folder)) for d in settings.data)
    for dataset in data:
        check_data(dataset, model)
    fingerprint = model.checkpoint.fingerprint()
    held_out = _held_out(data, settings.measure_prompts)
    splits = [dataset.split(count) for dataset, count in zip(data, held_out, strict=True)]
    chunks = split_documents(data, [train for train, _ in splits], settings.sequence)
    num_tokens = int(chunks.length.sum())
    if num_tokens < settings.batch_tokens:
        raise ValueError(
            f"too little data: {len(chunks)} chunks with {num_tokens} tokens beside the documents held out for "
            f"measuring, and a batch takes {settings.batch_tokens}; make more with foretell data generate, or lower "
            f"--batch-tokens"
        )
    weights = tuple(d.weight for d in settings.data)
    schedule = BatchSchedule(chunks, BatchingConfig(settings.seed, settings.batch_tokens, settings.accumulate, weights))
    documents = [dataset[i] for dataset, (_, held) in zip(data, splits, strict=True) for i in held]
    init_folder = _init_folder(settings, fingerprint)
    setup = _setup(settings, model, fingerprint, data, chunks, init_folder)
    built = _build_recipe(recipe, setup, init_folder)
    longest = int(chunks.length.max())
    if built.draft_length >= longest:
        raise ValueError(
            f"{recipe.name} learns drafts of {built.draft_length} tokens, and the longest text has {longest}, so its "
            "last places would never be learned; raise --sequence, or make the drafts shorter with --set"
        )
    return TrainingJob(
        settings=settings,
        model=model,
        data=data,
        setup=setup,
        recipe=built,
        measured_recipe=_build_recipe(recipe, setup, init_folder),
        schedule=schedule,
        num_steps=settings.steps or schedule.num_steps(settings.epochs),
        prompts=held_out_prompts(documents, settings.measure_prompts),
        init_folder=init_folder,
    )


def _init_folder(settings: TrainingSettings, fingerprint: str) -> Path | None:
    """The folder given by `--from`, or that of the installed speculator of the given kind for this target."""
    name = settings.init_from
    if not name:
        return None
    if Path(name).is_dir():
        return Path(name)
    if name not in NETWORKS:
        raise ValueError(
            f"--from {name}: no such folder, and no kind of speculator; the kinds are {', '.join(NETWORKS)}"
        )
    installed = find_installed(name, fingerprint)
    if installed is None:
        raise ValueError(f"--from {name}: no {name} speculator is installed for this target; name the folder of one")
    return installed


def _build_recipe(recipe: type[Recipe], setup: RecipeSetup, init_folder: Path | None) -> Recipe:
    try:
        built = recipe.build(setup)
    except RuntimeError as error:
        if "allocate" not in str(error) and "out of memory" not in str(error):
            raise
        sizes = " ".join(f"--set {key}={value}" for key, value in setup.options.items())
        raise ValueError(f"{recipe.name} {sizes}: not enough memory for its weights; ask for smaller sizes") from error
    if init_folder is not None:
        load_initial_weights(built, init_folder, setup)
    return built


def _held_out(data: Sequence[Dataset], prompts: int) -> list[int]:
    """Documents that each data set holds out: all from the first set with answers, or from the first one."""
    with_answers = [d.manifest.kind != "text" for d in data]
    first = with_answers.index(True) if any(with_answers) else 0
    return [prompts if i == first else 0 for i in range(len(data))]


def check_data(data: Dataset, model: Model) -> None:
    """Check that a data set fits the target.

    Raises:
        ValueError: its tokens are of another tokenizer, or another model wrote its answers.
    """
    check_tokenizer(data, model.codec, model.config.vocab, model.name)
    manifest = data.manifest
    fingerprint = model.checkpoint.fingerprint()
    if manifest.fingerprint and manifest.fingerprint != fingerprint:
        raise ValueError(
            f"{data.folder}: {manifest.model} (fingerprint {manifest.fingerprint}) wrote these answers, and the target "
            f"is {model.name} (fingerprint {fingerprint}); {_remedy(model.name)}"
        )


def check_tokenizer(data: Dataset, codec: TextCodec, vocab: int, name: str) -> None:
    """Check that a data set has the tokens of a model.

    Raises:
        ValueError: they are of another tokenizer.
    """
    manifest = data.manifest
    if manifest.tokenizer != tokenizer_of(codec) or manifest.vocab != vocab:
        raise ValueError(
            f"{data.folder}: its tokens are of another tokenizer ({manifest.model}, {manifest.vocab} tokens) than that "
            f"of {name} ({vocab} tokens); {_remedy(name)}"
        )


def _remedy(name: str) -> str:
    return f"make a set with foretell data generate --model {name}"


def _setup(
    settings: TrainingSettings,
    model: Model,
    fingerprint: str,
    data: Sequence[Dataset],
    chunks: ChunkTable,
    init_folder: Path | None,
) -> RecipeSetup:
    c, dtype = model.config, dtype_of(settings)
    decoder = plain_decoder(model.network, dtype)
    embedding_and_head = (
        model.checkpoint.embedding_and_head(dtype) if decoder is None else embedding_and_head_of(decoder)
    )
    card = TargetInfo(name=model.name, fingerprint=fingerprint, hidden=c.hidden, vocab=c.vocab, layers=c.layers)
    if init_folder is not None and settings.draft_vocab is None:
        draft_tokens = load_own(init_folder, embedding_and_head).token_of
    else:
        count = DRAFT_VOCAB if settings.draft_vocab is None else settings.draft_vocab
        draft_tokens = most_frequent_tokens(data, chunks, c.vocab, count)
    return RecipeSetup(
        card, c, embedding_and_head, model.checkpoint, draft_tokens, settings.seed, settings.options, model.codec,
        model.network,
    )  # fmt: skip


def dtype_of(settings: TrainingSettings) -> torch.dtype:
    """Dtype of the target's weights and hidden states, and of the products of autocast."""
    precision = settings.precision
    if precision == "auto":
        precision = "bf16" if has_bfloat16_units("cuda" if torch.cuda.is_available() else "cpu") else "no"
    return torch.bfloat16 if precision == "bf16" else torch.float32


def most_frequent_tokens(
    data: Sequence[Dataset], chunks: ChunkTable, vocab: int, count: int
) -> Int[torch.Tensor, " n"] | None:
    """The `count` most frequent tokens of the answers to train on, ascending; None: all tokens."""
    if not 0 < count < vocab:
        return None
    chosen = {(int(d), int(i)) for d, i in zip(chunks.dataset, chunks.document, strict=True)}
    answers = [data[d][i].tokens[data[d][i].start :] for d, i in chosen]
    occurrences = np.bincount(np.concatenate(answers), minlength=vocab)
    return torch.from_numpy(np.sort(np.argsort(-occurrences, kind="stable")[:count]))


def load_initial_weights(recipe: Recipe, folder: Path, setup: RecipeSetup) -> None:
    """Load the weights of a trained speculator into a recipe; the tokens it drafts stay those of the recipe.

    Raises:
        ValueError: the speculator has another kind, target or size, or an output matrix for other tokens.
    """
    initial = load_own(folder, setup.embedding_and_head)
    if initial.kind not in (recipe.network.kind, *recipe.network.starts_from):
        raise ValueError(
            f"--from {folder}: a speculator of kind {initial.kind!r}, and {recipe.name} trains {recipe.network.kind!r}"
        )
    theirs, ours = initial.target_info.fingerprint, setup.card.fingerprint
    if theirs and theirs != ours:
        raise ValueError(
            f"--from {folder}: trained for {initial.target_info.name} (fingerprint {theirs}), and the target is "
            f"{setup.card.name} (fingerprint {ours})"
        )
    before, now = initial.hidden_layers, recipe.network.hidden_layers
    if now[: len(before)] != before:
        raise ValueError(
            f"--from {folder}: it reads layers {list(before)} of the target, and {list(now)} with these settings; "
            "give the --set it was trained with"
        )
    own, given = recipe.network.state_dict(), recipe.network.adapt_state_dict(initial)
    if initial.head is None:
        # Its output matrix is rows of the target's, whichever tokens it drafts.
        given = {n: t for n, t in given.items() if n != "token_of"} | {n: t for n, t in own.items() if n == "token_of"}
    elif not _equal(initial.token_of, recipe.network.token_of):
        raise ValueError(
            f"--from {folder}: it has an output matrix of its own, for {len(initial.head):,} tokens; leave "
            f"--draft-vocab away to keep these"
        )
    for name in sorted(set(own) | set(given)):
        shapes = [list(s[name].shape) if name in s else "missing" for s in (given, own)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"--from {folder}: its {name} is {shapes[0]}, and {shapes[1]} with these settings; give the --set it "
                f"was trained with"
            )
    recipe.network.load_state_dict(given)


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def feature_source(job: TrainingJob) -> FeatureSource:
    """The source of the target's hidden states: cached beside the data as far as `--features` and `--cache-gib` allow.

    Raises:
        ValueError: `--features cache` was given, and the states do not fit into `--cache-gib`.
    """
    settings, hidden_layers = job.settings, tuple(job.recipe.hidden_layers)
    streamed = StreamedFeatures(lambda: job.setup.decoder, hidden_layers)
    if settings.features == "stream" or not hidden_layers:
        return streamed
    hidden, num_tokens = job.model.config.hidden, sum(d.num_tokens for d in job.data)
    # Two bytes per bfloat16 number.
    size, max_size = num_tokens * hidden * 2 * len(hidden_layers), int(settings.cache_gib * 2**30)
    if settings.features == "cache" and size > max_size:
        raise ValueError(
            f"--features cache: the states of this data take {size / 2**30:.1f} GiB, more than --cache-gib "
            f"{settings.cache_gib:g}; raise it, or leave --features away and what fits is kept"
        )
    caches = []
    for dataset in job.data:
        lengths = [len(document.tokens) for document in dataset]
        share = int(max_size * dataset.num_tokens / num_tokens)
        folder = dataset.folder / "features"
        caches.append(HiddenStateCache(folder, job.fingerprint, hidden_layers, lengths, hidden, share))
    return CachedFeatures(streamed, caches, job.model.config, job.setup.embedding_and_head.embedding.dtype)
