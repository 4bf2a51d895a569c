"""What methods are built from, and the helpers that builders share."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foretell.accept import Acceptor, Block, Rejection
from foretell.config import SpeculativeConfig
from foretell.draft import (
    DraftModel,
    Predictor,
    Recycling,
    Suffix,
    Together,
)
from foretell.model.compress import Change
from foretell.model.decoder import Decoder
from foretell.model.runner import DecoderRunner, Network, Runner
from foretell.model.source import Source
from foretell.shape import (
    Adaptive,
    Beam,
    Chain,
    Frugal,
    PassCost,
    Schedule,
    Shape,
    Threshold,
    Trie,
)
from foretell.text import TextCodec


@dataclass(frozen=True)
class Parts:
    """What a method may be built from: the target, other models, reference documents as tokens."""

    vocab: int
    network: Network | None
    """The target's weights, where the own decoder runs it (a method that cuts the target needs them)."""
    drafts: tuple[Runner, ...] = ()
    references: tuple[tuple[int, ...], ...] = ()
    eos: tuple[int, ...] = ()
    """Tokens that end an answer of the target."""
    codec: TextCodec | None = None
    """The target's tokenizer."""
    draft_codecs: tuple[TextCodec, ...] = ()
    """The tokenizers of `drafts`."""
    source: Source | None = None
    """The target's checkpoint. Not needed for changed copies where `network` is a plain decoder."""
    speculators: tuple[Path, ...] = ()
    """Directories of trained speculators; none: what ships for this target."""

    @property
    def speculator(self) -> Path | None:
        """The trained speculator that was named; None: none was.

        Raises:
            ValueError: several were.
        """
        if len(self.speculators) > 1:
            names = ", ".join(map(str, self.speculators))
            raise ValueError(
                f"several trained speculators were named ({names}), and this method drafts with one; name one"
            )
        return self.speculators[0] if self.speculators else None


def early_exit(parts: Parts, config: SpeculativeConfig) -> DraftModel:
    """The target's first blocks as a draft model (LayerSkip, arXiv 2404.16710).

    The draft shares the target's weights and not its cache: the drafter reads and keeps rows by its own schedule, and the target's pass starts from
    embeddings. So accepted tokens go through the shared blocks twice, which the paper's self-verification saves.
    """
    network = own(parts, "cuts the target after some layers")
    return DraftModel(DecoderRunner(network.cut(config.exit_layer or max(1, network.config.layers // 3))))


def own(parts: Parts, does: str = "drafts with parts of the target") -> Network:
    """The target on the own decoder, for a method that `does` something with it.

    Raises:
        ValueError: something else runs it.
    """
    if parts.network is None:
        raise ValueError(f"this method {does}, which works with models of the own decoder only; use another method")
    return parts.network


def copy_of(parts: Parts, change: Change, dtype: str | None = None) -> Network:
    """The target read again, changed."""
    if parts.source is not None:
        return parts.source.copy(change, dtype)
    network = own(parts)
    if not isinstance(network, Decoder):
        raise ValueError(
            "this method drafts with a changed copy of the target's weights, which cannot be read again here"
        )
    return change(network)


def chain_of(config: SpeculativeConfig, length: int, confidence: float = 0.0) -> Shape[Predictor]:
    """A chain of the length, confidence and schedule that were asked for."""
    chain = Chain(
        length if config.num_speculative_tokens is None else config.num_speculative_tokens,
        draw=config.draft_sample_method != "greedy",
        confidence=confidence if config.confidence_threshold is None else config.confidence_threshold,
    )
    schedule = config.num_assistant_tokens_schedule
    return chain if schedule == "constant" else Adaptive(chain, Schedule() if schedule == "heuristic" else Threshold())


def test_of(config: SpeculativeConfig) -> Acceptor:
    """Rejection token by token, or in blocks."""
    return Block() if config.rejection_sample_method == "block" else Rejection()


LEAST = 0.07
"""Chance below which a node of a tree by confidence is not worth what reading it costs, where a pass pays for every node as it does on CPUs."""


_NODES_PER_CHILD = 6
"""Nodes of a tree for each that is gone on from per level: EAGLE-2's 60 and 10."""


def nodes_of(config: SpeculativeConfig) -> int | None:
    """The nodes that a tree was asked to have; None: unsaid."""
    return config.num_draft_tokens or config.num_speculative_tokens


def paths_of(tree: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Rank paths as fixed trees take them: shorter ones first."""
    return tuple(sorted((tuple(p) for p in tree), key=lambda p: (len(p), p)))


def grown(config: SpeculativeConfig, depth: int, width: int, nodes: int, worth: float = LEAST) -> Beam:
    """A tree by confidence: the sizes that were named, whole; else up to `nodes` that are `worth` it. Large trees are as much wider."""
    named = nodes_of(config)
    least = config.confidence_threshold
    if least is None:
        least = 0.0 if named else worth
    return Beam(depth, config.eagle_topk or max(width, (named or 0) // _NODES_PER_CHILD), named or nodes, least)


def trie_of(config: SpeculativeConfig, budget: int, least: float) -> Trie:
    """A trie of so many nodes, each at least so likely."""
    return Trie(
        budget if config.num_speculative_tokens is None else config.num_speculative_tokens,
        least if config.confidence_threshold is None else config.confidence_threshold,
    )


def copies(parts: Parts) -> Together:
    """The retrievers that need nothing but the text."""
    return Together([Suffix(parts.references), Recycling(parts.vocab)])


def frugal_of(config: SpeculativeConfig) -> Frugal:
    """Trees as large as a pass is worth."""
    return Frugal(24 if config.num_draft_tokens is None else config.num_draft_tokens, PassCost(config.pass_cost))
