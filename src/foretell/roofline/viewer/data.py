"""What the form of the page offers: models, devices, runtimes, formats, methods, and the settings it begins with."""

from collections.abc import Mapping
from typing import Any

from foretell.roofline.hardware import Hardware, memory_tier
from foretell.roofline.method_profiles import method_profiles
from foretell.roofline.model_configs import builtin_models
from foretell.roofline.viewer.settings import Known, page_runtimes
from foretell.roofline.workload import STAGES

TIERS = ("ddr", "ddr-server", "nvme")
FORMATS = ("16", "fp8", "8", "6", "4", "4g128", "fp4", "3", "2", "2g32z", "1")


def hardware_data(h: Hardware) -> dict[str, Any]:
    """A device; `figures`: what its fields hold unless they are changed, in GB/s, 1e12 OPs/s and GB."""
    peak = h.peaks.get("fp16") or max(h.peaks.values())
    return {
        "title": h.title,
        "source": h.source,
        "usesRuntimes": h.takes_runtimes,
        "figures": {
            "bandwidth": f"{h.bandwidth / 1e9:g}",
            "peak": f"{peak / 1e12:g}",
            "capacity": "not stated" if h.capacity is None else f"{h.capacity / 1e9:g}",
        },
    }


def families(known: Known) -> Mapping[str, list[str]]:
    """The models by family."""
    groups: dict[str, list[str]] = {"yours": list(known.extra)} if known.extra else {}
    for name, raw in builtin_models().items():
        if name not in known.extra:
            groups.setdefault(str(raw["source"]).split("/")[0], []).append(name)
    return groups


def form_data(known: Known) -> dict[str, Any]:
    """The choices of the form."""
    return {
        "defaults": known.defaults(),
        "models": families(known),
        "hardware": {name: hardware_data(h) for name, h in known.devices.items()},
        "runtimes": {name: runtime.title for name, runtime in page_runtimes().items()},
        "tiers": {name: memory_tier(name).title for name in TIERS},
        "formats": {name: name.upper() if name.startswith("fp") else name.replace("g", " / ") for name in FORMATS},
        "methods": list(method_profiles()),
        "stages": list(STAGES),
    }
