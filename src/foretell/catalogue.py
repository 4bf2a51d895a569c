"""The field's taxonomy as a table: every method by name, what it drafts with, how it arranges and accepts, and where it comes from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

from foretell.accept import Acceptor, Block, Lenient, Match, Near, Rejection, Rollback, Topmost, Transport, Typical
from foretell.config import SpeculativeConfig
from foretell.datastore import Datastore, open_datastore
from foretell.draft import (
    Cascade,
    DraftModel,
    Hybrid,
    Jacobi,
    Lookahead,
    Lookup,
    Mix,
    Nothing,
    PhraseRetrieval,
    Predictor,
    Recycling,
    Rest,
    Suffix,
    Together,
    Translated,
)
from foretell.draft.phrases import encode
from foretell.method import AnyMethod, Method
from foretell.model.compress import Change, quantized, sparse, unchanged
from foretell.model.decoder import Decoder
from foretell.model.influence import influence
from foretell.model.runner import DecoderRunner, Network, Runner
from foretell.model.skip import default_skip, read_skip
from foretell.names import unknown
from foretell.shape import (
    Adaptive,
    Beam,
    Branch,
    Chain,
    Fallback,
    Fixed,
    Frugal,
    Paced,
    PassCost,
    Root,
    Schedule,
    Shape,
    Threshold,
    Trie,
    optimal,
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
    copy: Callable[[Change, str | None], Network] | None = None
    """Reads the target again: its weights after a change, in a dtype (None: its own). Not needed where `network` is a plain decoder."""


@dataclass(frozen=True)
class Entry:
    """A line of the taxonomy. `build` raises ValueError where a part it needs is not there."""

    name: str
    draft: str
    tree: str
    accept: str
    lossless: bool
    training: str
    paper: str
    build: Callable[[Parts, SpeculativeConfig], AnyMethod]
    needs: str = ""
    """What the user has to bring: a draft model, references."""
    same_seed: bool = True
    """Equal seeds give the text of plain decoding, with and without speculation."""
    aliases: tuple[str, ...] = ()


def _autoregressive(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    return Method(Nothing(), Root(), Match())


def _drafter(parts: Parts) -> Predictor:
    models = [DraftModel(r) for r in _small_models(parts)]
    return models[0] if len(models) == 1 else Mix(models)


def _small_models(parts: Parts) -> tuple[Runner, ...]:
    if not parts.drafts:
        raise ValueError(
            "this method needs a draft model: name one with --draft-model, or use layer_skip, which needs none"
        )
    for runner in parts.drafts:
        if runner.vocab != parts.vocab:
            raise ValueError(
                f"the draft model's vocabulary has {runner.vocab} tokens, the target's {parts.vocab}; use a draft model with the target's tokenizer"
            )
    return parts.drafts


def _early_exit(parts: Parts, config: SpeculativeConfig) -> DraftModel:
    if parts.network is None:
        raise ValueError(
            "this method cuts the target after some layers, which works with models of the own decoder only; use another method"
        )
    layers = config.exit_layer or max(1, parts.network.config.layers // 3)
    return DraftModel(DecoderRunner(parts.network.cut(layers)))


def _chain(config: SpeculativeConfig, length: int, confidence: float = 0.0) -> Shape[Predictor]:
    chain = Chain(
        length if config.num_speculative_tokens is None else config.num_speculative_tokens,
        draw=config.draft_sample_method != "greedy",
        confidence=confidence if config.confidence_threshold is None else config.confidence_threshold,
    )
    schedule = config.num_assistant_tokens_schedule
    return chain if schedule == "constant" else Adaptive(chain, Schedule() if schedule == "heuristic" else Threshold())


def _test(config: SpeculativeConfig) -> Acceptor:
    return Block() if config.rejection_sample_method == "block" else Rejection()


def _draft_model(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    return Method(_drafter(parts), _chain(config, 5), _test(config))


def _block(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    return Method(_drafter(parts), _chain(config, 5), Block())


def _layer_skip(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    return Method(_early_exit(parts, config), _chain(config, 4, confidence=0.4), _test(config))


def _specinfer(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    return Method(_drafter(parts), Branch((2, 2, 1)), Rejection())


def _sequoia(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    draw = config.draft_sample_method == "probabilistic"
    if config.speculative_tree is not None:
        shape = Fixed(tuple(sorted((tuple(p) for p in config.speculative_tree), key=lambda p: (len(p), p))), draw)
    else:
        rates = config.acceptance or (0.6, 0.15, 0.07, 0.04, 0.025, 0.02, 0.015, 0.01)
        shape = optimal(config.num_speculative_tokens or 16, rates, depth=config.num_steps or 6, draw=draw)
    return Method(_drafter(parts), shape, Rejection() if draw else Match())


def _cascade(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    *larger_first, last = _small_models(parts)
    drafter = Cascade(last, Method(Lookup(references=parts.references), Trie(8), Match()))
    for runner in reversed(larger_first):
        drafter = Cascade(runner, Method(drafter, Chain(5, draw=False), Match()))
    return Method(drafter, _chain(config, 5), _test(config))


def _copies(parts: Parts) -> Together:
    """The retrievers that need nothing but the text."""
    return Together([Suffix(parts.references), Recycling(parts.vocab)])


def _frugal(config: SpeculativeConfig) -> Frugal:
    return Frugal(24 if config.num_draft_tokens is None else config.num_draft_tokens, PassCost(config.pass_cost))


def _hybrid(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    return Method(_copies(parts), _frugal(config), Match())


def _hybrid_model(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    model = _drafter(parts) if parts.drafts else _early_exit(parts, config)
    confidence = 0.4 if config.confidence_threshold is None else config.confidence_threshold
    chain = Chain(config.num_speculative_tokens or 5, draw=False, confidence=confidence)
    return Method(Hybrid(_copies(parts), model), Fallback(_frugal(config), chain), Match())


def _dynamic_tree(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    budget = config.num_draft_tokens or config.num_speculative_tokens or 16
    return Method(
        _drafter(parts),
        Beam(config.num_steps or 5, config.eagle_topk or 4, budget, config.confidence_threshold or 0.0),
        Match(),
    )


def _spectr(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    chains = Branch((config.eagle_topk or 4, *[1] * ((config.num_steps or 4) - 1)), distinct=False)
    return Method(_drafter(parts), chains, Transport())


def _lenience(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    return Method(_drafter(parts), _chain(config, 5), Lenient(config.lenience))


def _blockwise(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    chain = Chain(config.num_speculative_tokens or 5, draw=False)
    if config.accept_distance is not None:
        return Method(_drafter(parts), chain, Near(config.accept_distance, minimum=config.minimum_block))
    return Method(_drafter(parts), chain, Topmost(config.accept_top_k, minimum=config.minimum_block))


def _bild(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    chain = Chain(config.num_speculative_tokens or 10, draw=False, fallback=config.fallback_threshold)
    return Method(_drafter(parts), chain, Rollback(config.rollback_threshold))


def _typical(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    return Method(_drafter(parts), _chain(config, 5), Typical(config.posterior_threshold, config.posterior_alpha))


def _trie(config: SpeculativeConfig, budget: int, least: float) -> Trie:
    return Trie(
        budget if config.num_speculative_tokens is None else config.num_speculative_tokens,
        least if config.confidence_threshold is None else config.confidence_threshold,
    )


def _ngram(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    tree = _trie(config, 10, 0.1)
    lookup = Lookup(config.prompt_lookup_max or 3, config.prompt_lookup_min or 1, max(tree.budget, 1), parts.references)
    return Method(lookup, tree, Match())


def _llma(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    if not parts.references:
        raise ValueError("llma copies from reference documents: name at least one with --reference FILE")
    tree = _trie(config, 15, 0.0)
    lookup = Lookup(
        config.prompt_lookup_max or 5,
        config.prompt_lookup_min or 1,
        max(tree.budget, 1),
        parts.references,
        scope="references",
        choice="first",
    )
    return Method(lookup, tree, Match())


def _suffix(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    return Method(Suffix(parts.references, config.prompt_lookup_min or 1), _trie(config, 8, 0.1), Match())


def _recycling(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    return Method(Recycling(parts.vocab), _trie(config, 8, 0.06), Match())


def _sam_recycling(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    return Method(Together([Suffix(parts.references), Recycling(parts.vocab)]), _trie(config, 7, 0.1), Match())


def _lookahead(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    width, ngram = config.max_window_size or 7, config.max_ngram_size or 5
    candidates = width if config.max_verification_set_size is None else config.max_verification_set_size
    return Method(
        Lookahead(width, ngram, candidates, eos=parts.eos), _trie(config, candidates * (ngram - 1), 0.0), Match()
    )


def _jacobi(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    width = config.max_window_size or config.num_speculative_tokens or 8
    return Method(Jacobi(width), _trie(config, width, 0.0), Match())


def _gauss_seidel_jacobi(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    width = config.max_window_size or config.num_speculative_tokens or 3
    return Method(Jacobi(width, slide=False), _trie(config, width, 0.0), Match())


def _own(parts: Parts) -> Network:
    if parts.network is None:
        raise ValueError(
            "this method drafts with parts of the target, which works with models of the own decoder only; use another method"
        )
    return parts.network


def _self_speculative(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    network = _own(parts)
    skip = read_skip(Path(config.skip_set), network) if config.skip_set else default_skip(network.config.layers)
    chain = Chain(
        8 if config.num_speculative_tokens is None else config.num_speculative_tokens,
        draw=config.draft_sample_method != "greedy",
        confidence=0.8 if config.confidence_threshold is None else config.confidence_threshold,
    )
    return Method(DraftModel(DecoderRunner(network.skipping(skip))), Adaptive(chain, Threshold()), _test(config))


def _copy(parts: Parts, change: Change, dtype: str | None = None) -> Network:
    if parts.copy is not None:
        return parts.copy(change, dtype)
    network = _own(parts)
    if not isinstance(network, Decoder):
        raise ValueError(
            "this method drafts with a changed copy of the target's weights, which cannot be read again here"
        )
    return change(network)


def _quantised_draft(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    bits = config.quantization_bits
    if bits == 8 and parts.copy is not None:
        network = _copy(parts, unchanged, "int8")
    else:
        network = _copy(parts, partial(quantized, bits=bits, group=config.quantization_group))
    return Method(DraftModel(DecoderRunner(network)), _chain(config, 4, confidence=0.4), _test(config))


def _pruned_draft(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    network = _own(parts)
    layers = network.config.layers
    dropped = layers // 4 if config.pruned_layers is None else config.pruned_layers
    if dropped > layers:
        raise ValueError(f"a pruned draft cannot lack {dropped} blocks: the model has {layers}")
    skip = influence(network, _sample_text(parts)).drop(dropped)
    whole = _copy(parts, partial(sparse, share=config.sparsity)) if config.sparsity else network
    return Method(DraftModel(DecoderRunner(whole.skipping(skip))), _chain(config, 4, confidence=0.4), _test(config))


_SAMPLE = """The old harbour was quiet in the early morning. A few boats had come in with fish, and the market would open at seven.
def mean(values): return sum(values) / len(values)
Question: how many legs do three spiders have? Answer: 3 x 8 = 24."""


def _sample_text(parts: Parts) -> list[int]:
    """Tokens that the influence of layers is measured on."""
    if parts.references and len(parts.references[0]) > 1:
        return list(parts.references[0][:512])
    if parts.codec is not None:
        return parts.codec.encode(_SAMPLE)
    return list(range(min(parts.vocab, 64)))


def _universal_draft(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    if len(parts.drafts) != 1 or len(parts.draft_codecs) != 1 or parts.codec is None:
        raise ValueError("this method needs one draft model with its tokenizer: name it with --draft-model")
    length = config.num_speculative_tokens or 6
    confidence = 0.3 if config.confidence_threshold is None else config.confidence_threshold
    draft = Translated(DraftModel(parts.drafts[0]), parts.codec, parts.draft_codecs[0], length, confidence)
    return Method(draft, Trie(2 * length), Match())


def _llmcad(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    budget = config.num_draft_tokens or config.num_speculative_tokens or 16
    return Method(_drafter(parts), Paced(budget, threshold=config.confidence_threshold or 0.01), Match())


def _rest(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    if config.datastore is not None:
        store = open_datastore(Path(config.datastore), parts.codec)
    elif parts.references:
        store = Datastore.of(parts.references)
    else:
        raise ValueError(
            "rest drafts from a datastore: build one with `foretell datastore build` and name it under the key datastore of the speculative config, "
            "or give documents with --reference FILE"
        )
    return Method(
        Rest(store, config.prompt_lookup_max or store.depth, config.prompt_lookup_min or 2),
        _trie(config, 16, 0.04),
        Match(),
    )


def _phrases(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    if parts.network is None:
        raise ValueError(
            "this method reads hidden states of the target, which works with models of the own decoder only; use another method"
        )
    tap = parts.network.config.layers + 1
    documents = encode(DecoderRunner(parts.network), parts.references, tap) if parts.references else None
    return Method(PhraseRetrieval(tap, documents), _trie(config, 16, 0.04), Match())


_CHAIN, _NONE = "arXiv 2211.17192, 2302.01318", "none"

BUILT_IN: tuple[Entry, ...] = (
    Entry("autoregressive", "nothing", "root", "match", True, _NONE, "-", _autoregressive, aliases=("none", "plain")),
    Entry("ngram", "n-gram copy from text and references", "chain", "match", True, _NONE, "Saxena 2023 (prompt lookup)", _ngram,
          aliases=("prompt_lookup", "pld")),
    Entry("llma", "n-gram copy from references", "chain", "match", True, _NONE, "arXiv 2304.04487", _llma, "references"),
    Entry("suffix", "longest suffix match (automaton)", "trie", "match", True, _NONE, "arXiv 2411.10666, 2411.04975", _suffix, aliases=("sam",)),
    Entry("recycling", "successors from earlier passes", "trie", "match", True, _NONE, "arXiv 2408.08696", _recycling, aliases=("token_recycling",)),
    Entry("sam_recycling", "suffix match and recycled successors", "trie", "match", True, _NONE, "arXiv 2411.10666, 2408.08696", _sam_recycling),
    Entry("hybrid", "suffix match and recycled successors", "trie as large as pays, or none", "match", True, _NONE,
          "arXiv 2411.10666, 2408.08696", _hybrid),
    Entry("hybrid_model", "copies first, then a small model or the target's first layers", "trie, chain or none by what pays", "match", True, _NONE,
          "arXiv 2411.10666, 2404.16710", _hybrid_model, "draft model (optional)"),
    Entry("lookahead", "n-grams of its own Jacobi trajectories", "trie beside the window", "match", True, _NONE, "arXiv 2402.02057", _lookahead),
    Entry("jacobi", "its own previous iterate", "chain", "match", True, _NONE, "arXiv 2002.03629", _jacobi),
    Entry("gauss_seidel_jacobi", "its own previous iterate, block by block", "chain", "match", True, _NONE, "arXiv 2305.10427",
          _gauss_seidel_jacobi, aliases=("gs_jacobi",)),
    Entry("rest", "frequent continuations in a datastore", "trie", "match", True, _NONE, "arXiv 2311.08252", _rest, "datastore or references"),
    Entry("phrases", "phrases by hidden state, from text and references", "trie", "match", True, _NONE, "arXiv 2307.06962", _phrases,
          aliases=("copy_is_all_you_need",)),
    Entry("draft_model", "small model", "chain", "rejection", True, _NONE, _CHAIN, _draft_model, "draft model", False, ("speculative_sampling",)),
    Entry("block_verification", "small model", "chain", "block", True, _NONE, "arXiv 2403.10444", _block, "draft model", False),
    Entry("layer_skip", "first layers of the target", "chain, stops when unsure", "rejection", True, "optional", "arXiv 2404.16710", _layer_skip,
          same_seed=False, aliases=("early_exit",)),
    Entry("self_speculative", "target without some sub-layers", "chain, stops when unsure, adapts", "rejection", True, _NONE, "arXiv 2309.08168",
          _self_speculative, same_seed=False, aliases=("draft_and_verify",)),
    Entry("quantised_draft", "target in fewer bits", "chain, stops when unsure", "rejection", True, _NONE, "arXiv 2410.11305", _quantised_draft,
          same_seed=False, aliases=("quantized_draft",)),
    Entry("pruned_draft", "target without its least influential blocks", "chain, stops when unsure", "rejection", True, _NONE, "arXiv 2403.03853",
          _pruned_draft, same_seed=False),
    Entry("universal_draft", "small model with another tokenizer", "chain, stops when unsure", "match", True, _NONE, "arXiv 2502.05202",
          _universal_draft, "draft model", aliases=("universal_assisted_generation", "uag")),
    Entry("llmcad", "small model", "tree paced by confidence", "match", True, _NONE, "arXiv 2309.04255", _llmcad, "draft model",
          aliases=("edgellm",)),
    Entry("specinfer", "one or several small models, mixed", "branching tree", "rejection", True, "optional", "arXiv 2305.09781", _specinfer,
          "draft model", False),
    Entry("spectr", "small model", "independent chains", "optimal transport (K-SEQ)", True, _NONE, "arXiv 2310.15141", _spectr, "draft model", False),
    Entry("sequoia", "small model", "optimal tree for a node budget", "match", True, _NONE, "arXiv 2402.12374", _sequoia, "draft model"),
    Entry("dynamic_tree", "small model", "tree by confidence", "match", True, _NONE, "arXiv 2406.16858", _dynamic_tree, "draft model"),
    Entry("cascade", "small model, itself drafted for by n-gram copies or smaller models", "chain", "rejection", True, _NONE,
          "arXiv 2312.11462, 2308.04623", _cascade, "draft model", False, ("hierarchical",)),
    Entry("lenience_lossy", "small model", "chain", "lenient rejection", False, _NONE, "arXiv 2211.17192", _lenience, "draft model", False),
    Entry("blockwise_lossy", "small model", "chain", "among the target's best, or near it", False, _NONE, "arXiv 1811.03115", _blockwise,
          "draft model", False),
    Entry("bild_lossy", "small model", "chain, stops before it is unsure", "rollback by distance", False, _NONE, "arXiv 2302.07863", _bild,
          "draft model", False),
    Entry("typical_lossy", "small model", "chain", "typical threshold", False, _NONE, "arXiv 2401.10774", _typical, "draft model", False),
)  # fmt: skip
"""Every built-in method, in the order in which a newcomer should read them."""


def catalogue() -> Mapping[str, Entry]:
    """All methods by name: the built-in ones, then those that other packages register under the entry point group `foretell.methods`."""
    entries = {e.name: e for e in BUILT_IN}
    for point in entry_points(group="foretell.methods"):
        entry = point.load()
        entries.setdefault(entry.name, entry)
    return entries


def find(name: str) -> Entry:
    """The entry of this name or alias.

    Raises:
        ValueError: there is none; the nearest name is suggested.
    """
    entries = catalogue()
    by_alias = {a: e for e in entries.values() for a in e.aliases}
    found = entries.get(name) or by_alias.get(name)
    if found is None:
        raise unknown("method", name, entries)
    return found


def build(name: str, parts: Parts, config: SpeculativeConfig | None = None) -> AnyMethod:
    """The method of this name, made from `parts`."""
    entry = find(name)
    method = entry.build(parts, config or SpeculativeConfig())
    return replace(method, name=entry.name)
