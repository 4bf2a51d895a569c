"""Drafting cost: the operation graph that each kind of drafter runs, and how often."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from foretell.roofline.analysis import AnalyzedModel, builtin_model
from foretell.roofline.attention import Fusion
from foretell.roofline.feedforward import ACTIVATION_OPS
from foretell.roofline.formats import NumberFormat, parse_format
from foretell.roofline.graph_builder import build_graph
from foretell.roofline.op_graph import LayerGroup, Op, OpGraph, elementwise, linear

DraftKind = Literal["none", "model", "block", "layers", "nested", "quantised", "sparse", "heads", "layer"]

DRAFT_MODELS: Mapping[str, tuple[str, ...]] = {
    "llama-68m": ("llama-2-", "vicuna-"),
    "llama-3.2-1b": ("llama-3-", "llama-3.1-", "llama-3.3-", "llama-3.2-3b"),
    "qwen2.5-0.5b": ("qwen2.5-",),
    "qwen3-0.6b": ("qwen3-",),
    "gemma-2-2b": ("gemma-2-",),
    "gemma-3-1b": ("gemma-3-",),
    "opt-125m": ("opt-",),
    "smollm2-135m": ("smollm2-",),
    "mistral-7b": ("mixtral-",),
}
"""Small built-in models, and the prefixes of the families whose vocabulary each shares."""

MAX_PADDING = 512
"""Vocabularies of one tokenizer differ by at most so many unused rows (Qwen2.5: 151936 and 152064)."""


@dataclass(frozen=True)
class DrafterCost:
    """What a drafter runs.

    per: it runs once per `level` of the tree, over the nodes expanded there, or once per `step`, over the last token of
    each sequence. added_parameters: weights in addition to the target's. weights, kv: number formats where they differ
    from the target's.
    """

    graph: OpGraph
    per: Literal["level", "step"]
    added_parameters: float
    weights: NumberFormat | None = None
    kv: NumberFormat | None = None


def default_draft_model(name: str) -> str | None:
    """The name of a smaller built-in model with the same vocabulary, if any."""
    for small, families in DRAFT_MODELS.items():
        if name != small and name.startswith(families):
            return small
    return None


def first_layers(model: AnalyzedModel, share: float) -> AnalyzedModel:
    """The first `share` of the layers, with embedding and head (LayerSkip, arXiv 2404.16710)."""
    c = model.config
    return AnalyzedModel(f"{model.name}, {share:g} of its layers", c.of_layers(range(max(1, round(c.layers * share)))))


def nested_feed_forward(model: AnalyzedModel, share: float) -> AnalyzedModel:
    """The model with the first `share` of every feed-forward (MatFormer, arXiv 2310.07707)."""
    c = model.config
    experts = replace(c.experts, ffn=max(1, round(c.experts.ffn * share))) if c.experts else None
    width = max(1, round(c.ffn * share))
    return AnalyzedModel(f"{model.name}, {share:g} of its feed-forward", replace(c, ffn=width, experts=experts))


def over_fewer_keys(model: AnalyzedModel, keys: int) -> AnalyzedModel:
    """The model attending to so many cached keys, or as many as its windows hold (MagicDec, arXiv 2408.11049)."""
    c = model.config
    window = min(c.window, keys) if c.window else keys
    every = tuple(range(c.layers))
    return AnalyzedModel(f"{model.name}, over {keys} keys", replace(c, window=window, window_layers=every))


@lru_cache(maxsize=256)
def drafter_cost(
    kind: DraftKind,
    target: AnalyzedModel,
    draft_model: AnalyzedModel | None = None,
    share: float = 0.25,
    heads: int = 5,
    vocab: int = 0,
    keys: int = 0,
) -> DrafterCost | None:
    """The cost of a kind of drafter for a target; None: drafting costs no forward pass.

    vocab: of a `layer` drafter that scores only the most frequent tokens of the target (EAGLE-3); 0: all. keys: that a
    `sparse` drafter attends to.

    Raises:
        ValueError: a draft model is needed and none is given or known, or its vocabulary differs.
    """
    fusion: Fusion = "flash"
    if kind == "none":
        return None
    if kind in ("model", "block"):
        small = draft_model or _find_draft_model(target)
        if abs(small.config.vocab - target.config.vocab) > MAX_PADDING:
            raise ValueError(
                f"{small.name} has {small.config.vocab} tokens and {target.name} {target.config.vocab}: a draft model "
                f"must share the vocabulary"
            )
        graph = small.graph(fusion, False)
        return DrafterCost(graph, "level" if kind == "model" else "step", graph.parameters)
    if kind == "layers":
        return DrafterCost(first_layers(target, share).graph(fusion, False), "level", 0.0)
    if kind == "nested":
        return DrafterCost(nested_feed_forward(target, share).graph(fusion, False), "level", 0.0)
    if kind == "sparse":
        return DrafterCost(over_fewer_keys(target, keys).graph(fusion, False), "level", 0.0)
    if kind == "quantised":
        graph = target.graph(fusion, False)
        return DrafterCost(graph, "level", graph.parameters, parse_format("4g128"), parse_format("4g128"))
    return _medusa_heads(target, heads) if kind == "heads" else _eagle_layer(target, vocab)


def _find_draft_model(target: AnalyzedModel) -> AnalyzedModel:
    name = default_draft_model(target.name)
    if name is None:
        raise ValueError(
            f"no smaller built-in model shares the vocabulary of {target.name}; choose a draft model (--draft)"
        )
    return builtin_model(name)


def _medusa_heads(target: AnalyzedModel, heads: int) -> DrafterCost:
    """Medusa: each head is a residual block and an LM head on the last hidden state (arXiv 2401.10774)."""
    h, v = target.config.hidden, target.config.vocab
    ops: list[Op] = []
    for i in range(heads):
        block = linear(f"head{i}_block", h, h, "x", "replicated", bias=True)
        act = elementwise(f"head{i}_act", h, (block.name, "x"), ACTIVATION_OPS["silu"] + 1, 2.0)
        ops.extend((block, act, linear(f"head{i}_out", h, v, act.name, "column")))
    graph = OpGraph(
        f"{heads} Medusa heads", (LayerGroup("heads", 1, tuple(ops)),), target.config.heads, target.config.context
    )
    return DrafterCost(graph, "step", graph.parameters)


def _eagle_layer(target: AnalyzedModel, vocab: int) -> DrafterCost:
    """EAGLE: a projection of embedding and hidden state, one decoder layer, the target's LM head (arXiv 2401.15077).

    With fewer tokens than the target's the head is its own (arXiv 2503.01840).
    """
    c = target.config
    own_head = 0 < vocab < c.vocab
    # For a mixture of experts: a dense layer as wide as the experts of one token.
    width = c.experts.ffn * c.experts.active + c.experts.shared_ffn if c.experts else c.ffn
    scored = replace(c, vocab=vocab) if own_head else c
    layer = replace(
        scored, layers=1, experts=None, ffn=width, window=0, window_layers=(), state=None, attention_gate=False
    )
    one = build_graph(layer, "EAGLE layer", "flash")
    projection = LayerGroup("fuse", 1, (linear("fuse", 2 * c.hidden, c.hidden, "x", "replicated", bias=True),))
    graph = replace(one, groups=(one.groups[0], projection, *one.groups[1:]))
    added = projection.ops[0].stored + sum(op.stored for op in one.groups[1].ops)
    return DrafterCost(graph, "level", added + (vocab * c.hidden if own_head else 0))
