"""Methods that draft with the target, of whose neurons a part is read; all of them verify."""

from functools import partial
from pathlib import Path

from foretell.accept import Rejection
from foretell.catalogue.build_context import BuildContext, chain, rejection, require_network, sparse_network
from foretell.catalogue.entry import Entry, Paper
from foretell.catalogue.options.self_drafting import MatFormerDraftOptions, SparseMlpDraftOptions
from foretell.draft import SparseTargetDrafter
from foretell.engine.method import AnyMethod, Method
from foretell.model.block.sparsity import FirstNeurons
from foretell.model.kernels.structures import prefix_size
from foretell.model.offload.sparsity_file import read_sparsity
from foretell.shape import Chain


def sparse_mlp_draft(context: BuildContext, options: SparseMlpDraftOptions) -> AnyMethod:
    """The target with the neurons that thresholds, predictors or sizes choose drafts a chain.

    Raises:
        ValueError: nothing says which neurons, or it is for another model.
    """
    network = require_network(context, "drafts with a part of the target's neurons")
    if not options.sparsity:
        raise ValueError(
            "this method needs to know which neurons to read; make a directory with `foretell calibrate sparsity` or "
            "`foretell train sparsity`, and name it as the option sparsity"
        )
    model = context.checkpoint.base_fingerprint if context.checkpoint else ""
    sparsity = read_sparsity(Path(options.sparsity), model, network.config)
    draft = SparseTargetDrafter(sparse_network(context, sparsity.rules))
    label = f"target with a part of its neurons ({sparsity.file.method} {sparsity.file.sparsity:g})"
    accept = rejection(options, options.draft_sample_method)
    return Method(draft, chain(options), accept, drafter_label=label)


def matformer_draft(context: BuildContext, options: MatFormerDraftOptions) -> AnyMethod:
    """The target with the first neurons of every layer drafts a chain."""
    config = require_network(context, "drafts with a part of the target's neurons").config
    sizes, share = [config.ffn_of(i) for i in range(config.layers)], options.neuron_share
    rules = [FirstNeurons(prefix_size(share, n)) for n in sizes]
    return Method(
        SparseTargetDrafter(sparse_network(context, rules)),
        chain(options),
        rejection(options, options.draft_sample_method),
        drafter_label=f"target with {options.neuron_share:.0%} of its neurons",
    )


_entry = partial(Entry, family="self-drafting", drafter=SparseTargetDrafter, shape=Chain, acceptor=Rejection)
"""With what most methods of this file share."""

ENTRIES = (
    _entry(
        name="sparse_mlp_draft",
        description=(
            "The target drafts for itself, reading a part of the neurons of its feed-forward networks, which each "
            "token chooses."
        ),
        when_to_use=(
            "with large models in bfloat16 or float32, whose passes read mostly feed-forward weights; with quantised "
            "weights the rows of neurons, which are bfloat16, take more bytes than they save."
        ),
        papers=(
            Paper("CATS: Contextually-Aware Thresholding for Sparsity in Large Language Models", "2404.08763"),
            Paper("Training-Free Activation Sparsity in Large Language Models", "2408.14690"),
            Paper("Deja Vu: Contextual Sparsity for Efficient LLMs at Inference Time", "2310.17157"),
        ),
        builder=sparse_mlp_draft,
        options=SparseMlpDraftOptions,
        needs="directory of `foretell calibrate sparsity` or `foretell train sparsity`",
    ),
    _entry(
        name="matformer_draft",
        description="The target drafts for itself with the first neurons of its feed-forward networks (MatFormer).",
        when_to_use=(
            "with models whose neurons were trained to be nested, or ordered by `foretell train matformer`; the draft "
            "takes no memory of its own."
        ),
        papers=(Paper("MatFormer: Nested Transformer for Elastic Inference", "2310.07707"),),
        builder=matformer_draft,
        options=MatFormerDraftOptions,
        drafts_with="target with its first neurons",
    ),
)
