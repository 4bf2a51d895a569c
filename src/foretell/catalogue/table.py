"""The field's taxonomy as a table: every method by name, what it drafts with, how it arranges and accepts, and where it comes from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import entry_points

from foretell.accept import Match
from foretell.catalogue.copying import hybrid, llma, ngram, phrases, recycling, rest, sam_recycling, suffix
from foretell.catalogue.eagle import eagle, eagle2, eagle3
from foretell.catalogue.heads import blockwise, medusa, medusa_typical
from foretell.catalogue.hybrids import hybrid_model
from foretell.catalogue.iterating import gauss_seidel_jacobi, jacobi, lookahead
from foretell.catalogue.itself import layer_skip, pruned_draft, quantised_draft, self_speculative
from foretell.catalogue.lossy import bild, blockwise_tolerant, lenience, typical
from foretell.catalogue.parallel import look_ahead_embeddings
from foretell.catalogue.parts import Parts
from foretell.catalogue.small import (
    block_verification,
    cascade,
    draft_model,
    dynamic_tree,
    llmcad,
    online,
    sequoia,
    specinfer,
    spectr,
    universal_draft,
)
from foretell.catalogue.stages import mlp_speculator
from foretell.config import SpeculativeConfig
from foretell.draft import (
    Nothing,
)
from foretell.method import AnyMethod, Method
from foretell.names import unknown
from foretell.shape import (
    Root,
)


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
    speculator: str = ""
    """Kind of the trained speculator that it drafts with."""
    same_seed: bool = True
    """Equal seeds give the text of plain decoding, with and without speculation."""
    aliases: tuple[str, ...] = ()


def _autoregressive(parts: Parts, config: SpeculativeConfig) -> AnyMethod:
    return Method(Nothing(), Root(), Match())


_CHAIN, _NONE = "arXiv 2211.17192, 2302.01318", "none"

BUILT_IN: tuple[Entry, ...] = (
    Entry("autoregressive", "nothing", "root", "match", True, _NONE, "-", _autoregressive, aliases=("none", "plain")),
    Entry("ngram", "n-gram copy from text and references", "chain", "match", True, _NONE, "Saxena 2023 (prompt lookup)", ngram,
          aliases=("prompt_lookup", "pld")),
    Entry("llma", "n-gram copy from references", "chain", "match", True, _NONE, "arXiv 2304.04487", llma, "references"),
    Entry("suffix", "longest suffix match (automaton)", "trie", "match", True, _NONE, "arXiv 2411.10666, 2411.04975", suffix, aliases=("sam",)),
    Entry("recycling", "successors from earlier passes", "trie", "match", True, _NONE, "arXiv 2408.08696", recycling, aliases=("token_recycling",)),
    Entry("sam_recycling", "suffix match and recycled successors", "trie", "match", True, _NONE, "arXiv 2411.10666, 2408.08696", sam_recycling),
    Entry("hybrid", "suffix match and recycled successors", "trie as large as pays, or none", "match", True, _NONE,
          "arXiv 2411.10666, 2408.08696", hybrid),
    Entry("hybrid_model", "copies first, then a trained speculator, a small model or the target's first layers", "trie, tree or none by what pays",
          "match", True, "optional", "arXiv 2411.10666, 2404.16710", hybrid_model, "speculator or draft model (optional)"),
    Entry("lookahead", "n-grams of its own Jacobi trajectories", "trie beside the window", "match", True, _NONE, "arXiv 2402.02057", lookahead),
    Entry("jacobi", "its own previous iterate", "chain", "match", True, _NONE, "arXiv 2002.03629", jacobi),
    Entry("gauss_seidel_jacobi", "its own previous iterate, block by block", "chain", "match", True, _NONE, "arXiv 2305.10427",
          gauss_seidel_jacobi, aliases=("gs_jacobi",)),
    Entry("rest", "frequent continuations in a datastore", "trie", "match", True, _NONE, "arXiv 2311.08252", rest, "datastore or references"),
    Entry("phrases", "phrases by hidden state, from text and references", "trie", "match", True, _NONE, "arXiv 2307.06962", phrases,
          aliases=("copy_is_all_you_need",)),
    Entry("draft_model", "small model", "chain", "rejection", True, _NONE, _CHAIN, draft_model, "draft model", same_seed=False,
          aliases=("speculative_sampling",)),
    Entry("block_verification", "small model", "chain", "block", True, _NONE, "arXiv 2403.10444", block_verification, "draft model", same_seed=False),
    Entry("layer_skip", "first layers of the target", "chain, stops when unsure", "rejection", True, "optional", "arXiv 2404.16710", layer_skip,
          same_seed=False, aliases=("early_exit",)),
    Entry("self_speculative", "target without some sub-layers", "chain, stops when unsure, adapts", "rejection", True, _NONE, "arXiv 2309.08168",
          self_speculative, same_seed=False, aliases=("draft_and_verify",)),
    Entry("quantised_draft", "target in fewer bits", "chain, stops when unsure", "rejection", True, _NONE, "arXiv 2410.11305", quantised_draft,
          same_seed=False, aliases=("quantized_draft",)),
    Entry("pruned_draft", "target without its least influential blocks", "chain, stops when unsure", "rejection", True, _NONE, "arXiv 2403.03853",
          pruned_draft, same_seed=False),
    Entry("universal_draft", "small model with another tokenizer", "chain, stops when unsure", "match", True, _NONE, "arXiv 2502.05202",
          universal_draft, "draft model", aliases=("universal_assisted_generation", "uag")),
    Entry("llmcad", "small model", "tree paced by confidence", "match", True, _NONE, "arXiv 2309.04255", llmcad, "draft model",
          aliases=("edgellm",)),
    Entry("specinfer", "one or several small models, mixed", "branching tree", "rejection", True, "optional", "arXiv 2305.09781", specinfer,
          "draft model", same_seed=False),
    Entry("spectr", "small model", "independent chains", "optimal transport (K-SEQ)", True, _NONE, "arXiv 2310.15141", spectr, "draft model",
          same_seed=False),
    Entry("sequoia", "small model", "optimal tree for a node budget", "match", True, _NONE, "arXiv 2402.12374", sequoia, "draft model"),
    Entry("dynamic_tree", "small model", "tree by confidence", "match", True, _NONE, "arXiv 2406.16858", dynamic_tree, "draft model"),
    Entry("cascade", "small model, itself drafted for by n-gram copies or smaller models", "chain", "rejection", True, _NONE,
          "arXiv 2312.11462, 2308.04623", cascade, "draft model", same_seed=False, aliases=("hierarchical",)),
    Entry("online", "small model that learns from every correction", "chain", "match", True, "while serving", "arXiv 2310.07177", online,
          speculator="draft_model", aliases=("online_speculative_decoding", "osd")),
    Entry("medusa", "heads on the target's last state", "fixed tree, best for their accuracy", "match", True, "heads", "arXiv 2401.10774", medusa,
          speculator="medusa"),
    Entry("blockwise", "heads on the target's last state, in one layer", "chain", "match", True, "heads", "arXiv 1811.03115", blockwise,
          speculator="blockwise", aliases=("blockwise_parallel_decoding",)),
    Entry("pass", "itself, at learned vectors in the places to come", "chain", "rejection", True, "embeddings", "arXiv 2311.13581",
          look_ahead_embeddings, speculator="pass", same_seed=False, aliases=("look_ahead_embeddings",)),
    Entry("mlp_speculator", "small recurrence on the target's last state", "tree by confidence", "match", True, "stages", "arXiv 2404.19124",
          mlp_speculator, speculator="mlp_speculator", aliases=("multi_stage_mlp",)),
    Entry("eagle", "one layer in the target's feature space", "fixed tree", "match", True, "layer", "arXiv 2401.15077", eagle, speculator="eagle",
          aliases=("eagle1",)),
    Entry("eagle2", "one layer in the target's feature space", "tree by confidence", "match", True, "layer", "arXiv 2406.16858", eagle2,
          speculator="eagle"),
    Entry("eagle3", "one layer on fused states of several of the target's", "tree by confidence", "match", True, "layer", "arXiv 2503.01840",
          eagle3, speculator="eagle3"),
    Entry("lenience_lossy", "small model", "chain", "lenient rejection", False, _NONE, "arXiv 2211.17192", lenience, "draft model", same_seed=False),
    Entry("blockwise_lossy", "small model, or trained heads", "chain", "among the target's best, or near it", False, _NONE, "arXiv 1811.03115",
          blockwise_tolerant, "draft model", same_seed=False),
    Entry("bild_lossy", "small model", "chain, stops before it is unsure", "rollback by distance", False, _NONE, "arXiv 2302.07863", bild,
          "draft model", same_seed=False),
    Entry("medusa_lossy", "heads on the target's last state", "fixed tree, best for their accuracy", "typical threshold", False, "heads",
          "arXiv 2401.10774", medusa_typical, speculator="medusa", same_seed=False),
    Entry("typical_lossy", "small model", "chain", "typical threshold", False, _NONE, "arXiv 2401.10774", typical, "draft model", same_seed=False),
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
