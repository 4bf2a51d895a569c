"""The data of the page as JSON: operation graphs, hardware, number formats, methods.

The page only evaluates the linear costs; their coefficients come from here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from foretell.roofline.acceptance import MAX_RANKS, RANK_DECAY, REMAINDER_COVERED
from foretell.roofline.analysis import AnalyzedModel
from foretell.roofline.arrivals import CONTEXT_STEP
from foretell.roofline.drafter_cost import MAX_PADDING, default_draft_model, nested_feed_forward
from foretell.roofline.family_acceptance import profile_for_target
from foretell.roofline.formats import WIDER_CLASSES, compute_class, is_converted, parse_format
from foretell.roofline.hardware import Hardware, memory_tier
from foretell.roofline.linear_cost import SHARED_ROUTING, LinearCost
from foretell.roofline.method_profiles import MethodProfile, method_profiles, profile_for_draft
from foretell.roofline.model_configs import builtin_models, find_model, read_config
from foretell.roofline.model_variants import SPARSE_OPS, sparsity_predictor
from foretell.roofline.op_graph import LayerGroup, Op, OpGraph
from foretell.roofline.plan import cost_of_profile
from foretell.roofline.runtime import DEFAULT_RUNTIME, Runtime, known_runtimes
from foretell.roofline.speculation import MAX_DEPTH, MAX_NODES
from foretell.roofline.workload import FUSIONS, LIMITS, STAGES

TIERS = ("ddr", "ddr-server", "nvme")
HALF = 0.5
"""Part of the feed-forward in the nested variant."""
FORMATS = ("16", "fp8", "8", "6", "4", "4g128", "fp4", "3", "2", "2g32z", "1")


def without_fraction(value: float) -> float | int:
    """Whole numbers as integers, which are shorter in JSON."""
    return int(value) if value == int(value) else value


def coefficients(amount: LinearCost) -> list[float | int]:
    """Coefficients of a cost without trailing zeros."""
    values = [without_fraction(v) for v in amount.coefficients]
    while values and not values[-1]:
        values.pop()
    return values


def op_data(op: Op) -> list[Any]:
    """An operation as the list that engine.js indexes."""
    costs = [coefficients(a) for a in (op.work, op.weights, op.read, op.write, op.kv_read, op.kv_write)]
    return [op.name, op.kind, op.shape, list(op.inputs), op.split, *costs, without_fraction(op.stored)]


class GroupTable:
    """Layer groups numbered by content, so that graphs with equal layers share their data."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def number_of(self, group: LayerGroup) -> int:
        """The number of a group; equal groups have one number."""
        live = [[coefficients(size) for size in sizes] for sizes in group.live_activations]
        data = {
            "name": group.name, "window": group.window, "kvElements": without_fraction(group.kv_elements),
            "kvHeads": group.kv_heads, "stateElements": without_fraction(group.state_elements),
            "liveActivations": live, "ops": [op_data(op) for op in group.ops],
        }  # fmt: skip
        return self.found.setdefault(json.dumps(data, separators=(",", ":")), len(self.found))

    def graph_data(self, graph: OpGraph) -> dict[str, Any]:
        """A graph as numbered groups."""
        return {
            "expertCount": without_fraction(graph.expert_count),
            "expertsPerToken": without_fraction(graph.experts_per_token),
            "groups": [[self.number_of(group), without_fraction(group.count)] for group in graph.groups],
        }


def model_data(model: AnalyzedModel, source: str, groups: GroupTable) -> dict[str, Any]:
    """A model: its graphs by fusion (a second one for prefill where it differs) and its drafters by method."""
    graphs: dict[str, Any] = {}
    for fusion in FUSIONS:
        both = [groups.graph_data(model.graph(fusion, is_prefill)) for is_prefill in (False, True)]
        graphs[fusion] = both if both[0] != both[1] else both[:1]
    own = {name: profile_for_target(profile, model.name, "") for name, profile in method_profiles().items()}
    c, halved = model.config, nested_feed_forward(model, HALF)
    predictor = None if c.experts else [op_data(op) for op in sparsity_predictor(c.hidden, c.ffn)]
    return {
        "source": source, "heads": c.heads, "vocab": c.vocab, "draft": default_draft_model(model.name),
        "graphs": graphs, "predictor": predictor,
        "nested": {fusion: groups.graph_data(halved.graph(fusion, False)) for fusion in FUSIONS},
        "drafts": {name: draft_data(profile, model, groups) for name, profile in method_profiles().items()},
        "acceptance": {
            name: acceptance_data(profile) for name, profile in own.items() if profile is not method_profiles()[name]
        },
    }  # fmt: skip


def draft_data(profile: MethodProfile, model: AnalyzedModel, groups: GroupTable) -> dict[str, Any] | None:
    """The drafter of a method for a model; None: drafting is free, or by a draft model, whose graph is its own."""
    if profile.draft == "model":
        return None
    try:
        draft = cost_of_profile(profile, model)
    except ValueError as error:
        return {"unavailable": str(error)}
    if draft is None:
        return None
    return {
        "graph": groups.graph_data(draft.graph),
        "per": draft.per,
        "weights": draft.weights.name if draft.weights else None,
        "kv": draft.kv.name if draft.kv else None,
    }


def pasted_model(text: str) -> dict[str, Any]:
    """The model that a config.json describes, with its layer groups numbered from 0.

    Raises:
        ValueError: not JSON, or no configuration that can be analysed.
    """
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the configuration is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError("a config.json holds one object")
    groups = GroupTable()
    model = model_data(AnalyzedModel("pasted", read_config(raw, "the configuration")), "yours", groups)
    return {"model": model, "groups": [json.loads(text) for text in groups.found]}


def hardware_data(h: Hardware) -> dict[str, Any]:
    """A device."""
    return {
        "title": h.title, "source": h.source, "bandwidth": h.bandwidth, "capacity": h.capacity, "peaks": dict(h.peaks),
        "vectorRate": h.vector_rate, "linkBandwidth": h.link_bandwidth, "hostBandwidth": h.host_bandwidth,
        "runtime": runtime_data(h.runtime),
        "usesRuntimes": h.takes_runtimes, "matmulRates": {k: list(v) for k, v in h.matmul_rates.items()},
        "attentionRates": list(h.attention_rates),
    }  # fmt: skip


def runtime_data(runtime: Runtime) -> dict[str, Any]:
    """A runtime."""
    return {f.name: getattr(runtime, f.name) for f in fields(runtime) if f.name not in ("name", "source")}


def tier_data(name: str) -> dict[str, Any]:
    """A memory tier of offloading."""
    tier = memory_tier(name)
    return {"title": tier.title, "source": tier.source, "bandwidth": tier.bandwidth, "compute": tier.compute}


def acceptance_data(method: MethodProfile) -> dict[str, Any]:
    """The acceptance of a method and what it rests on."""
    return {
        "ranks": list(method.acceptance.ranks), "decay": method.acceptance.decay, "tokens": method.tokens,
        "basis": method.basis, "source": method.acceptance.source, "largest": method.largest, "spread": method.spread,
    }  # fmt: skip


def method_data(method: MethodProfile) -> dict[str, Any]:
    """A method with its acceptance, and the acceptance published for particular draft models."""
    own = {name: profile_for_draft(method, name) for name in builtin_models()}
    return acceptance_data(method) | {
        "title": method.title, "shape": method.shape, "draft": method.draft, "nodes": method.nodes,
        "maxDepth": method.max_depth,
        "byDraft": {name: acceptance_data(profile) for name, profile in own.items() if profile is not method},
    }  # fmt: skip


def payload(devices: Mapping[str, Hardware], extra: Sequence[AnalyzedModel] = ()) -> dict[str, Any]:
    """The data of the page; `extra`: models in addition to the built-in ones."""
    groups = GroupTable()
    models = {m.name: model_data(m, "yours", groups) for m in extra}
    for name, raw in builtin_models().items():
        models.setdefault(name, model_data(AnalyzedModel(*find_model(name)), str(raw["source"]), groups))
    formats = {name: parse_format(name) for name in FORMATS}
    return {
        "models": models,
        "hardware": {name: hardware_data(h) for name, h in devices.items()},
        "formats": {name: f.bytes for name, f in formats.items()},
        "computeClasses": {f"{a}|{b}": compute_class(x, y) for a, x in formats.items() for b, y in formats.items()},
        "converted": {
            f"{a}|{b}": is_converted(x, y) for a, x in formats.items() for b, y in formats.items()
        },
        "widerClasses": {name: list(classes) for name, classes in WIDER_CLASSES.items()},
        "methods": {name: method_data(m) for name, m in method_profiles().items()},
        "runtimes": {name: runtime_data(r) for name, r in known_runtimes().items() if not r.expansion},
        "firstRuntime": DEFAULT_RUNTIME,
        "sharedRouting": SHARED_ROUTING, "sparseOps": list(SPARSE_OPS), "maxPadding": MAX_PADDING,
        "geometric": [REMAINDER_COVERED, RANK_DECAY, MAX_RANKS], "contextStep": CONTEXT_STEP,
        "tiers": {name: tier_data(name) for name in TIERS},
        "stages": list(STAGES), "fusions": list(FUSIONS), "limits": LIMITS,
        "maxNodes": MAX_NODES, "maxDepth": MAX_DEPTH,
        "first": extra[0].name if extra else "llama-3-8b",
        "groups": [json.loads(text) for text in groups.found],
    }  # fmt: skip
