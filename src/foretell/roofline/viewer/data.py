"""Everything the page needs, as JSON: price lists, hardware, formats, methods.

The page evaluates; what things cost is decided here.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from foretell.roofline.analysis import Model
from foretell.roofline.drafter_cost import make
from foretell.roofline.formats import LADDER, multiplied_as, parse
from foretell.roofline.hardware import Hardware
from foretell.roofline.linear_cost import Amount
from foretell.roofline.method_profiles import Method, catalogue
from foretell.roofline.model_configs import built_in, find
from foretell.roofline.op_graph import Block, Network, Op
from foretell.roofline.speculation import DEEPEST, MOST_NODES
from foretell.roofline.workload import FUSIONS, LIMITS, STAGES

FORMATS = ("16", "fp8", "8", "6", "4", "4g128", "fp4", "3", "2", "2g32z", "1")


def number(value: float) -> float | int:
    """The number without a fraction that is none."""
    return int(value) if value == int(value) else value


def form(amount: Amount) -> list[float | int]:
    """Coefficients of an amount, zeros at the end left out."""
    values = [number(v) for v in amount.values]
    while values and not values[-1]:
        values.pop()
    return values


def op_data(op: Op) -> list[Any]:
    """An operation as a row: name, kind, shape, inputs, split, work, weights, read, write, kv read, kv written,
    stored.
    """
    amounts = [form(a) for a in (op.work, op.weights, op.read, op.write, op.kv_read, op.kv_write)]
    return [op.name, op.kind, op.shape, list(op.inputs), op.split, *amounts, number(op.stored)]


class Blocks:
    """Blocks numbered by content, so that networks that share layers share their data."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def place(self, block: Block) -> int:
        """The block's number."""
        live = [[form(whole), form(cut)] for whole, cut in block.live]
        data = {
            "name": block.name, "window": block.window, "kv": number(block.kv), "kvHeads": block.kv_heads, "live": live,
            "ops": [op_data(op) for op in block.ops],
        }  # fmt: skip
        return self.found.setdefault(json.dumps(data, separators=(",", ":")), len(self.found))

    def network(self, network: Network) -> dict[str, Any]:
        """A network in terms of numbered blocks."""
        return {
            "experts": number(network.experts),
            "active": number(network.active),
            "blocks": [[self.place(b), number(b.count)] for b in network.blocks],
        }


def model_data(model: Model, source: str, blocks: Blocks) -> dict[str, Any]:
    """A model: its networks by fusion (for prompts apart where they differ) and its drafts by method."""
    nets: dict[str, Any] = {}
    for fusion in FUSIONS:
        both = [blocks.network(model.network(fusion, prompt)) for prompt in (False, True)]
        nets[fusion] = both if both[0] != both[1] else both[:1]
    c = model.config
    return {
        "source": source, "heads": c.heads, "context": c.context, "parameters": model.network("flash",
        False).parameters,
        "net": nets, "drafts": {name: draft_data(method, model, blocks) for name, method in catalogue().items()},
    }  # fmt: skip


def draft_data(method: Method, model: Model, blocks: Blocks) -> dict[str, Any] | None:
    """The drafter of a method for a model; None where guessing is free; a reason where there is none."""
    try:
        draft = make(method.draft, model, None, method.share, method.heads)
    except ValueError as error:
        return {"refused": str(error)}
    if draft is None:
        return None
    return {
        "net": blocks.network(draft.network),
        "per": draft.per,
        "weights": draft.weights.name if draft.weights else None,
        "kv": draft.kv.name if draft.kv else None,
    }


def hardware_data(h: Hardware) -> dict[str, Any]:
    """A device."""
    return {
        "title": h.title, "bandwidth": h.bandwidth, "peaks": dict(h.peaks), "capacity": h.capacity, "vector": h.vector,
        "link": h.link, "overhead": h.overhead, "rates": {k: list(v) for k, v in h.rates.items()},
        "attend": list(h.attend), "start": h.start,
        "source": h.source,
    }  # fmt: skip


def method_data(method: Method) -> dict[str, Any]:
    """A method with its acceptance."""
    return {
        "title": method.title, "shape": method.shape, "ranks": list(method.acceptance.ranks),
        "decay": method.acceptance.decay,
        "nodes": method.nodes, "tokens": method.tokens, "basis": method.basis, "source": method.acceptance.source,
    }  # fmt: skip


def payload(devices: Mapping[str, Hardware], extra: Sequence[Model] = ()) -> dict[str, Any]:
    """The page's data, with models of the user's own beside the built-in ones."""
    blocks = Blocks()
    models = {m.name: model_data(m, "yours", blocks) for m in extra}
    for name, raw in built_in().items():
        models.setdefault(name, model_data(Model(*find(name)), str(raw["source"]), blocks))
    formats = {name: parse(name) for name in FORMATS}
    return {
        "models": models,
        "hardware": {name: hardware_data(h) for name, h in devices.items()},
        "formats": {name: f.bytes for name, f in formats.items()},
        "classes": {f"{a}|{b}": multiplied_as(x, y) for a, x in formats.items() for b, y in formats.items()},
        "ladder": {name: list(steps) for name, steps in LADDER.items()},
        "methods": {name: method_data(m) for name, m in catalogue().items()},
        "stages": list(STAGES), "fusions": list(FUSIONS), "limits": LIMITS, "mostNodes": MOST_NODES, "deepest": DEEPEST,
        "first": extra[0].name if extra else "llama-3-8b",
        "blocks": [json.loads(text) for text in blocks.found],
    }  # fmt: skip
