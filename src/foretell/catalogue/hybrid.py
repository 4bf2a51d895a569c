"""Methods that retrieve drafts and use a draft model or speculator where retrieval finds too little."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from foretell.accept import Match
from foretell.catalogue.build_context import BuildContext, early_exit_draft, elastic_trie, text_retrievers
from foretell.catalogue.entry import Entry, Paper
from foretell.catalogue.exits import draft_heads
from foretell.catalogue.feature_level import eagle_method, mlp_speculator_method
from foretell.catalogue.heads import heads_method
from foretell.catalogue.options.base import MethodOptions
from foretell.catalogue.options.feature_level import EagleTreeOptions, MLPSpeculatorOptions
from foretell.catalogue.options.fields import ChainConfidence, ChainLength, ExitLayer
from foretell.catalogue.options.heads import MedusaOptions
from foretell.catalogue.options.hybrid import HybridModelOptions
from foretell.catalogue.options.shared import HybridOptions
from foretell.catalogue.retrieval import RETRIEVAL_LABEL, hybrid
from foretell.catalogue.speculators import (
    DRAFT_MODEL,
    find_draft_models,
    names_only_draft_models,
    one_draft_model,
    read_speculator,
    target_card,
)
from foretell.draft import EarlyExitDrafter, HybridDrafter, Predictor, Retriever, SuffixRetriever
from foretell.engine.method import AnyMethod, Method
from foretell.shape import Chain, HybridTree, Shape
from foretell.speculator.installed import find_installed
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.exits import Exits
from foretell.speculator.network.pack import describe_packed, pack_network

_SPECULATORS: Mapping[str, tuple[Callable[[Any, Any], AnyMethod], type[MethodOptions]]] = {
    "eagle3": (eagle_method, EagleTreeOptions),
    "mlp_speculator": (mlp_speculator_method, MLPSpeculatorOptions),
    "eagle": (eagle_method, EagleTreeOptions),
    "medusa": (heads_method, MedusaOptions),
    "blockwise": (heads_method, MedusaOptions),
}
"""Builder and options for every kind of speculator; of the installed ones the first in this order is used."""


class _ChainOptions(MethodOptions):
    """The options of a draft model beside a retriever."""

    num_speculative_tokens: ChainLength = 5
    confidence_threshold: ChainConfidence = 0.4


class _EarlyExitOptions(_ChainOptions):
    """The options of the target's first blocks beside a retriever."""

    exit_layer: ExitLayer = None


def hybrid_model(context: BuildContext, options: HybridModelOptions) -> AnyMethod:
    """Retrieved continuations, and beside them a trained speculator, a draft model, or the target's first blocks.

    Raises:
        ValueError: an option that the drafter does not read.
    """
    method = _with_trained_model(context, options)
    if method is not None:
        return method
    label = "the target's first blocks"
    chain = _EarlyExitOptions.from_values(f"hybrid_model, which drafts with {label} here,", _named(options))
    draft = early_exit_draft(context, chain.exit_layer)
    return _retrieval_or_model(text_retrievers(context), draft, _chain(chain), options, label)


def auto(context: BuildContext, options: HybridOptions) -> AnyMethod:
    """`hybrid_model` where a trained speculator or a draft model was named or is installed, and else `hybrid`."""
    named = HybridModelOptions.from_values("auto", options.model_dump(include=options.model_fields_set))
    method = _with_trained_model(context, named)
    return replace(hybrid(context, options), drafter_label=RETRIEVAL_LABEL) if method is None else method


def _with_trained_model(context: BuildContext, options: HybridModelOptions) -> AnyMethod | None:
    """Retrieval, and beside it a trained speculator or a draft model; None: there is neither."""
    named = _named(options)
    speculator = _find_speculator(context)
    if isinstance(speculator, Exits):
        label = "exits of the target"
        exits = _EarlyExitOptions.from_values(f"hybrid_model, which drafts with {label} here,", named)
        heads, least = draft_heads(context, exits.exit_layer, several=False)
        draft, tree = EarlyExitDrafter(heads), replace(_chain(exits), fallback=least)
        return _retrieval_or_model(text_retrievers(context), draft, tree, options, label)
    if speculator is not None:
        make, reads = _SPECULATORS[speculator.kind]
        packed = pack_network(speculator)
        method = make(
            packed,
            reads.from_values(f"hybrid_model, which drafts with {speculator.kind} here,", named),
        )
        # The speculator predicts successors of single tokens better than token recycling does.
        suffix = SuffixRetriever(context.references)
        label = describe_packed(f"a trained speculator ({speculator.kind})", packed)
        return _retrieval_or_model(suffix, method.draft, method.tree, options, label)
    models = find_draft_models(context)
    if not models:
        return None
    label = "a draft model"
    chain = _ChainOptions.from_values(f"hybrid_model, which has {label} here,", named)
    return _retrieval_or_model(text_retrievers(context), one_draft_model(models), _chain(chain), options, label)


def _named(options: HybridModelOptions) -> dict[str, Any]:
    """The options of the drafter beside the retriever."""
    return options.model_dump(include=options.model_fields_set - set(HybridOptions.model_fields), exclude_none=True)


def _chain(options: _ChainOptions) -> Chain:
    return Chain(options.num_speculative_tokens, draw=False, confidence=options.confidence_threshold)


def _retrieval_or_model(
    retriever: Retriever, draft: Predictor, tree: Shape[Predictor], options: HybridModelOptions, label: str
) -> AnyMethod:
    return Method(
        HybridDrafter(retriever, draft),
        HybridTree(elastic_trie(options), tree),
        Match(),
        drafter_label=f"retrieval, and beside it {label}",
    )


def _find_speculator(context: BuildContext) -> Speculator | None:
    """The trained speculator that was named or is installed; None where there is none or it is a draft model."""
    if context.drafts or (context.speculators and names_only_draft_models(context)):
        return None
    if context.speculator is not None:
        speculator = read_speculator(context, context.speculator)
        if speculator.kind not in (*_SPECULATORS, Exits.kind):
            known = ", ".join([*_SPECULATORS, Exits.kind, DRAFT_MODEL])
            raise ValueError(f"{context.speculator}: a hybrid drafts with one of {known}, not with {speculator.kind}")
        return speculator
    if context.checkpoint is None:
        return None
    fingerprint = target_card(context).fingerprint
    folder = next((f for kind in _SPECULATORS if (f := find_installed(kind, fingerprint))), None)
    return None if folder is None else read_speculator(context, folder)


_entry = partial(
    Entry,
    family="hybrid",
    drafter=HybridDrafter,
    shape=HybridTree,
    acceptor=Match,
    reads=("drafts", "speculators", "references"),
    needs="speculator or draft model (optional)",
)
"""With what most methods of this file share."""

ENTRIES = (
    _entry(
        name="hybrid_model",
        description=(
            "As `hybrid`, but where a model is expected to give more tokens per second than retrieval, the model "
            "drafts: a trained speculator, a draft model, or the target's first blocks."
        ),
        when_to_use=(
            "with a good drafter, on text that is partly copied and partly new; with the installed speculators it is "
            "the fastest method here."
        ),
        papers=(
            Paper("SAM Decoding: Speculative Decoding via Suffix Automaton", "2411.10666"),
            Paper("LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding", "2404.16710"),
        ),
        builder=hybrid_model,
        options=HybridModelOptions,
    ),
    _entry(
        name="auto",
        description=(
            "The default of the command line and the server: `hybrid_model` where a trained speculator or a draft "
            "model was named or is installed for the target, and else `hybrid`. Predicted outputs and tokens that a "
            "grammar forces are drafted beside any method."
        ),
        when_to_use="when you do not want to choose.",
        papers=(Paper("SAM Decoding: Speculative Decoding via Suffix Automaton", "2411.10666"),),
        builder=auto,
        options=HybridOptions,
        drafts_with="retrieval, and beside it a speculator or a draft model if there is one",
    ),
)
