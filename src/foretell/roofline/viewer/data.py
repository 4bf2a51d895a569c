"""The data of the page as JSON: operation graphs, hardware, number formats, methods.

The page only evaluates the linear costs; their coefficients come from here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from foretell.roofline.analysis import AnalyzedModel
from foretell.roofline.formats import WIDER_CLASSES, compute_class, is_converted, parse_format
from foretell.roofline.hardware import Hardware
from foretell.roofline.linear_cost import SHARED_ROUTING, LinearCost
from foretell.roofline.method_profiles import MethodProfile, method_profiles
from foretell.roofline.model_configs import builtin_models, find_model
from foretell.roofline.op_graph import LayerGroup, Op, OpGraph
from foretell.roofline.plan import cost_of_profile, profiles_for
from foretell.roofline.runtime import DEFAULT_RUNTIME, Runtime, known_runtimes
from foretell.roofline.speculation import MAX_DEPTH, MAX_NODES
from foretell.roofline.workload import FUSIONS, LIMITS, STAGES

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
            "kvHeads": group.kv_heads, "liveActivations": live, "ops": [op_data(op) for op in group.ops],
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
    c = model.config
    return {
        "source": source, "heads": c.heads, "graphs": graphs,
        "drafts": {name: draft_data(profile, model, groups) for name, profile in method_profiles().items()},
        "acceptance": {
            name: method_data(own)
            for name, own in profiles_for(model, method_profiles(), None).items()
            if own is not method_profiles()[name]
        },
    }  # fmt: skip


def draft_data(profile: MethodProfile, model: AnalyzedModel, groups: GroupTable) -> dict[str, Any] | None:
    """The drafter of a method for a model; None: drafting is free; with key `unavailable`: the reason why not."""
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
        "cached": draft.cached,
    }


def hardware_data(h: Hardware) -> dict[str, Any]:
    """A device."""
    return {
        "title": h.title, "source": h.source, "bandwidth": h.bandwidth, "capacity": h.capacity, "peaks": dict(h.peaks),
        "vectorRate": h.vector_rate, "linkBandwidth": h.link_bandwidth, "runtime": runtime_data(h.runtime),
        "usesRuntimes": h.takes_runtimes, "matmulRates": {k: list(v) for k, v in h.matmul_rates.items()},
        "attentionRates": list(h.attention_rates),
    }  # fmt: skip


def runtime_data(runtime: Runtime) -> dict[str, Any]:
    """A runtime."""
    return {f.name: getattr(runtime, f.name) for f in fields(runtime) if f.name not in ("name", "source")}


def method_data(method: MethodProfile) -> dict[str, Any]:
    """A method with its acceptance."""
    return {
        "title": method.title, "shape": method.shape, "ranks": list(method.acceptance.ranks),
        "decay": method.acceptance.decay,
        "nodes": method.nodes, "tokens": method.tokens, "basis": method.basis, "source": method.acceptance.source,
        "maxDepth": method.max_depth, "largest": method.largest,
        "spread": method.spread,
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
        "runtimes": {name: runtime_data(r) for name, r in known_runtimes().items()},
        "firstRuntime": DEFAULT_RUNTIME,
        "sharedRouting": SHARED_ROUTING,
        "stages": list(STAGES), "fusions": list(FUSIONS), "limits": LIMITS,
        "maxNodes": MAX_NODES, "maxDepth": MAX_DEPTH,
        "first": extra[0].name if extra else "llama-3-8b",
        "groups": [json.loads(text) for text in groups.found],
    }  # fmt: skip
