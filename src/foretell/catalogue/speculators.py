"""Finds the speculator or the draft models of a method: those that the user named, else the installed ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from foretell.catalogue.build_context import BuildContext, require_network
from foretell.draft import DraftModel
from foretell.model.block.decoder import Decoder
from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.run.runner import Runner
from foretell.speculator.config_file import read_config
from foretell.speculator.installed import find_installed, install_hint
from foretell.speculator.load import load_speculator
from foretell.speculator.network.base import Speculator, TargetInfo
from foretell.speculator.network.draft_model import DraftNetwork
from foretell.speculator.network.pack import pack_network

S = TypeVar("S", bound=Speculator)
DRAFT_MODEL = DraftNetwork.kind


def trained_speculator(context: BuildContext, kind: str) -> Speculator:
    """The speculator of this kind that the user named, else the one installed for the target, in the target's dtype.

    Raises:
        ValueError: there is none, it is of another kind or for another target, or transformers runs the target.
    """
    card = target_card(context)
    folder = context.speculator or find_installed(kind, card.fingerprint)
    if folder is None:
        if context.drafts:
            raise ValueError(
                f"this method drafts with a speculator of kind {kind}, and a language model was named with "
                f"--draft-model; {install_hint(kind, card.fingerprint)}"
            )
        raise ValueError(f"no {kind} speculator is installed for this target; {install_hint(kind, card.fingerprint)}")
    speculator = read_speculator(context, folder)
    if speculator.kind != kind:
        raise ValueError(
            f"{folder}: a speculator of kind {speculator.kind}, and this method drafts with one of kind {kind}"
        )
    return speculator


def packed_speculator(context: BuildContext, network: type[S], kind: str = "") -> S:
    """`trained_speculator` of a class of networks, packed for the kernels; `kind`: one of several of the class.

    Raises:
        ValueError: see `trained_speculator`.
    """
    trained = trained_speculator(context, kind or network.kind)
    assert isinstance(trained, network)
    return pack_network(trained)


def read_speculator(context: BuildContext, folder: Path) -> Speculator:
    """The speculator in a directory, of any kind, in the target's dtype.

    Raises:
        ValueError: it is damaged or for another target, or transformers runs the target.
    """
    key = speculator_key(folder)
    if key not in context.known_speculators:
        speculator = load_speculator(folder, target_card(context), embedding_and_head(context))
        context.known_speculators[key] = speculator.eval().requires_grad_(False)
    return context.known_speculators[key]


def speculator_key(folder: Path) -> tuple[Path, tuple[int, ...]]:
    """Identifies what a directory or file of a speculator holds: where it is, and when its files were written."""
    files = [folder] if folder.is_file() else folder.iterdir()
    return folder.resolve(), tuple(sorted(path.stat().st_mtime_ns for path in files))


def target_card(context: BuildContext) -> TargetInfo:
    """The target that speculators must have been trained for; its fingerprint is empty without a checkpoint.

    Raises:
        ValueError: transformers runs the target.
    """
    c = require_network(context).config
    fingerprint = context.checkpoint.base_fingerprint if context.checkpoint else ""
    return TargetInfo(name=c.architecture, fingerprint=fingerprint, hidden=c.hidden, vocab=c.vocab, layers=c.layers)


def embedding_and_head(context: BuildContext) -> EmbeddingAndHead:
    """The target's embedding and head, in its dtype.

    Raises:
        ValueError: transformers runs the target, or its weights cannot be read again.
    """
    if context.checkpoint is not None:
        return context.checkpoint.embedding_and_head(context.checkpoint.dtype)
    network = require_network(context)
    if not isinstance(network, Decoder):
        raise ValueError("this method uses the target's embedding and head, which cannot be read again here")
    c = network.config
    return EmbeddingAndHead(
        network.embedding.detach(), network.head.weight.detach(), c.embedding_scale, c.logit_softcap
    )


def require_draft_model(context: BuildContext) -> DraftModel:
    """The draft model.

    Raises:
        ValueError: there is none, there are several, or one does not fit.
    """
    return one_draft_model(require_draft_models(context))


def one_draft_model(runners: Sequence[Runner]) -> DraftModel:
    """The only one of these draft models.

    Raises:
        ValueError: there are several.
    """
    if len(runners) > 1:
        raise ValueError(
            f"this method drafts with one draft model, and {len(runners)} were named: name one, or use specinfer, "
            "which merges the trees of several"
        )
    return DraftModel(runners[0])


def require_draft_models(context: BuildContext) -> tuple[Runner, ...]:
    """The draft models; see `find_draft_models`.

    Raises:
        ValueError: there is none, or one does not fit.
    """
    models = find_draft_models(context)
    if not models:
        fingerprint = context.checkpoint.base_fingerprint if context.checkpoint else ""
        raise ValueError(
            f"this method needs a draft model: {install_hint(DRAFT_MODEL, fingerprint)}; layer_skip needs none"
        )
    return models


def find_draft_models(context: BuildContext) -> tuple[Runner, ...]:
    """The draft models that were named, else the one installed for the target; empty where there is none.

    Raises:
        ValueError: one has another vocabulary than the target, or a speculator of another kind was named.
    """
    drafts = check_draft_vocabs(context)
    if drafts or context.speculators:
        trained = (_draft_network(context, read_speculator(context, folder)) for folder in context.speculators)
        return (*drafts, *(network.to_runner() for network in trained))
    if context.checkpoint is None:
        return ()
    installed = find_installed(DRAFT_MODEL, target_card(context).fingerprint)
    return () if installed is None else (_draft_network(context, read_speculator(context, installed)).to_runner(),)


def check_draft_vocabs(context: BuildContext) -> tuple[Runner, ...]:
    """The draft models that were named.

    Raises:
        ValueError: one has another vocabulary than the target.
    """
    for runner in context.drafts:
        if runner.vocab != context.vocab:
            raise ValueError(
                f"the draft model's vocabulary has {runner.vocab} tokens, the target's {context.vocab}; "
                "use a draft model with the target's tokenizer, or --method universal_draft, which takes any"
            )
    return context.drafts


def names_only_draft_models(context: BuildContext) -> bool:
    """Whether all speculators that were named are trained draft models."""
    return all(path.is_dir() and read_config(path).get("kind") == DRAFT_MODEL for path in context.speculators)


def _draft_network(context: BuildContext, speculator: Speculator) -> DraftNetwork:
    if not isinstance(speculator, DraftNetwork):
        named = ", ".join(map(str, context.speculators))
        raise ValueError(f"{named}: this method drafts with draft models, and a speculator of another kind was named")
    return speculator
