"""The data behind the survey's figures 5-9, 11, 16 and 18-20 (arXiv 2402.16363), in our accounting."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foretell.roofline.analysis import analyse, builtin_model
from foretell.roofline.attention import Fusion
from foretell.roofline.cost import device_rates, op_costs, scalar, total_cost
from foretell.roofline.formats import parse_format
from foretell.roofline.hardware import Hardware, hardware_from_table, known_hardware, memory_tier
from foretell.roofline.op_graph import OpGraph
from foretell.roofline.paper.accounting import paper_graph
from foretell.roofline.sweep import Axis, sweep
from foretell.roofline.workload import Stage, Workload, phases, workload_sizes

Records = list[dict[str, Any]]
DEVICE, SMALL, LARGE = "a6000", "llama-2-7b", "llama-2-13b"
WEIGHT_BITS = ("16", "8", "4", "2", "1")
UNFUSED: Fusion = "none"


@dataclass(frozen=True)
class Figure:
    """The data of a figure of the survey; `note`: its legend, and differences from the paper."""

    number: int
    title: str
    note: str
    records: Records


def survey_gpu() -> Hardware:
    """The survey's GPU."""
    return known_hardware()[DEVICE]


def _roofline(name: str, bandwidth: float, peak: float, max_intensity: float) -> Records:
    intensities = np.unique(np.append(np.linspace(0, max_intensity, 161), peak / bandwidth))
    return [{"line": name, "intensity": float(i), "performance": float(min(i * bandwidth, peak))} for i in intensities]


def figure5() -> Figure:
    """Roofline of the A6000 in 16 bits, with the operations of Table 1 on it."""
    gpu = survey_gpu()
    records = _roofline("16-bit", gpu.bandwidth, gpu.peaks["fp16"], 1400)
    stages: tuple[Stage, ...] = ("prefill", "decode")
    for stage in stages:
        analysis = analyse(builtin_model(SMALL), gpu, Workload(stage, context=2048, fusion=UNFUSED))
        records += [
            {"line": f"{stage} {line.op.name}", "intensity": line.intensity, "performance": line.attainable}
            for line in analysis.op_costs
            if line.group == "layer" and scalar(line.cost.ops)
        ]
    note = (
        "Dots: the operations of one Llama-2-7b layer at 2048 tokens, batch 1, as Foretell counts them (last columns "
        "of Table 1)."
    )
    return Figure(5, "Roofline of the RTX A6000, 16-bit", note, records)


def figure6() -> Figure:
    """Rooflines of the A6000 per format."""
    gpu = survey_gpu()
    names = {"fp16": "16-bit", "int8": "INT8", "int4": "INT4"}
    records = [r for key, name in names.items() for r in _roofline(name, gpu.bandwidth, gpu.peaks[key], 1000)]
    return Figure(
        6,
        "Roofline of the RTX A6000 by format",
        "INT4 added: this GPU multiplies it, the paper draws FP16 and INT8.",
        records,
    )


def figure7() -> Figure:
    """Memory relative to 16 bits under quantisation, for three settings and two stages."""
    settings = {"FP16": ("16", "16", "16"), "W4": ("4", "16", "16"), "W4KV4": ("4", "16", "4"), "W4A4": ("4", "4", "4")}
    stages: tuple[Stage, ...] = ("decode", "prefill")
    records: Records = []
    for stage in stages:
        for batch, length in ((1, 1024), (1, 4096), (16, 1024)):
            base = 0.0
            for name, (w, a, kv) in settings.items():
                workload = Workload(
                    stage,
                    batch,
                    length,
                    weights=parse_format(w),
                    activations=parse_format(a),
                    kv=parse_format(kv),
                    fusion=UNFUSED,
                )
                m = analyse(builtin_model(LARGE), survey_gpu(), workload).memory
                base = base or scalar(m.total)
                parts = {"weights": scalar(m.weights), "cache": scalar(m.kv), "activations": scalar(m.activations)}
                records.append(
                    {"stage": stage, "batch": batch, "length": length, "format": name}
                    | {k: v / base for k, v in parts.items()}
                )
    note = (
        "Activations are the peak of those alive at once, not the sum over a layer as in the paper's tool; "
        "their share is therefore smaller."
    )
    return Figure(7, "Relative memory of Llama-2-13b under quantisation", note, records)


def _sweep_weights(stage: Stage, axis: str, values: Axis, workload: Workload) -> Records:
    swept = sweep(
        builtin_model(LARGE),
        survey_gpu(),
        replace(workload, stage=stage, fusion=UNFUSED),
        {"weights": WEIGHT_BITS, axis: values},
    )
    return [
        {"weights": w, axis: int(float(v)), "seconds": float(s)}
        for (w, v), s in zip(swept.points(), swept.seconds, strict=True)
    ]


def figure8() -> Figure:
    """Decode time against batch for weights of 16 to 1 bits."""
    records = _sweep_weights("decode", "batch", tuple(float(b) for b in range(1, 64)), Workload(context=1024))
    note = "Fewer weight bits stop helping once the pass is bound by compute and by the cache."
    return Figure(8, "Llama-2-13b decode time, RTX A6000, 1024 tokens", note, records)


def figure9() -> Figure:
    """Prefill time against length for weights of 16 to 1 bits."""
    lengths = tuple(float(v) for v in np.unique(np.round(np.geomspace(16, 1024, 60))))
    records = _sweep_weights("prefill", "context", lengths, Workload())
    return Figure(
        9, "Llama-2-13b prefill time, RTX A6000, batch 1", "The lines merge where compute takes over.", records
    )


def figure11() -> Figure:
    """Decode memory against length under quantisation."""
    formats = {
        "FP16": ("16", "16"),
        "W8": ("8", "16"),
        "W4": ("4", "16"),
        "W4KV8": ("4", "8"),
        "W4KV4": ("4", "4"),
        "W4KV2": ("4", "2"),
    }
    lengths = tuple(float(v) for v in np.unique(np.round(np.geomspace(1000, 200_000, 40))))
    records: Records = []
    for name, (w, kv) in formats.items():
        swept = sweep(
            builtin_model(LARGE),
            survey_gpu(),
            Workload(weights=parse_format(w), kv=parse_format(kv), fusion=UNFUSED),
            {"context": lengths},
        )
        records += [
            {"format": name, "context": int(s), "memory": float(m)} for s, m in zip(lengths, swept.memory, strict=True)
        ]
    return Figure(
        11,
        "Llama-2-13b decode memory, batch 1",
        "Beyond about 32,000 tokens the 16-bit cache outweighs 16-bit weights.",
        records,
    )


def fusion_savings(plain: OpGraph, fused: OpGraph, workload: Workload, gpu: Hardware) -> tuple[float, float]:
    """Per cent of memory traffic and of time that fusion saves."""
    (phase,) = phases(workload.stage, workload_sizes(workload))
    r = device_rates(workload, gpu)
    before, after = (total_cost(op_costs(n, phase, r)) for n in (plain, fused))
    moved, seconds = (
        1 - scalar(y) / scalar(x) for x, y in ((before.bytes, after.bytes), (before.seconds, after.seconds))
    )
    return 100 * moved, 100 * seconds


def figure16() -> Figure:
    """Savings of FlashAttention: our count, and the paper's, which reads only one of keys and values."""
    m, gpu = builtin_model(LARGE), survey_gpu()
    stages: tuple[Stage, ...] = ("decode", "prefill")
    records: Records = []
    for stage in stages:
        for batch, length in ((1, 1000), (1, 10_000), (1, 100_000), (16, 1000), (64, 1000)):
            workload = Workload(stage, batch, length)
            ours = fusion_savings(m.graph("none", True), m.graph("flash", True), workload, gpu)
            prompt = length if stage == "prefill" else 1
            theirs = fusion_savings(
                paper_graph(m.config), paper_graph(m.config, flash=True, prompt=prompt), workload, gpu
            )
            records.append(
                {"stage": stage, "batch": batch, "length": length, "traffic": ours[0], "time": ours[1],
                 "paper_traffic": theirs[0], "paper_time": theirs[1]}
            )  # fmt: skip
    note = (
        "In decode the paper shows up to 38 %: its fused attention read only one of keys and values. With both, the "
        "scores are a few elements per 256 of cache, and fusion saves about 1 %. In prefill the paper kept the scores "
        "in memory; without them fusion saves more."
    )
    return Figure(16, "Savings of FlashAttention, Llama-2-13b, RTX A6000", note, records)


def figure18() -> Figure:
    """Rooflines with data in GPU memory, and in DDR computed on the GPU or on the CPU."""
    gpu, ddr = survey_gpu(), memory_tier("ddr")
    cpu = known_hardware()[ddr.compute or ""]
    most = 2 * gpu.peaks["fp16"] / ddr.bandwidth
    records = _roofline("GPU memory, GPU compute", gpu.bandwidth, gpu.peaks["fp16"], most)
    records += _roofline("DDR, GPU compute", ddr.bandwidth, gpu.peaks["fp16"], most)
    records += _roofline("DDR, CPU compute", ddr.bandwidth, max(cpu.peaks.values()), most)
    note = (
        "As in the paper, DDR is read at its own 89.6 GB/s; a PCIe 4.0 × 16 link would limit it to 32 GB/s "
        "(see --offload)."
    )
    return Figure(18, "Rooflines of offloading, RTX A6000 with DDR5 and a Core i9-13900K", note, records)


def figure19() -> Figure:
    """Throughput, latency and memory against batch in 8 bits."""
    eight = parse_format("8")
    lengths, batches = (256.0, 512.0, 1024.0, 2048.0), tuple(float(b) for b in range(1, 128))
    workload = Workload(weights=eight, activations=eight, kv=eight, fusion=UNFUSED)
    swept = sweep(builtin_model(LARGE), survey_gpu(), workload, {"context": lengths, "batch": batches})
    records = [
        {
            "context": int(float(s)),
            "batch": int(float(b)),
            "tokens_per_second": float(b) / float(t),
            "seconds": float(t),
            "memory": float(m),
        }
        for (s, b), t, m in zip(swept.points(), swept.seconds, swept.memory, strict=True)
    ]
    return Figure(19, "Serving Llama-2-13b (W8A8KV8) on an RTX A6000", "Dashed: the GPU's 48 GB.", records)


def figure20() -> Figure:
    """A higher bandwidth on the roofline, and decode time against it."""
    base = hardware_from_table("sketch", {"bandwidth": 1000, "any": 200}, "figure 20 of the survey: 200 TOP/s")
    bandwidths = tuple(float(v) for v in np.linspace(200, 4000, 20))
    swept = sweep(builtin_model(LARGE), base, Workload(context=1024, fusion=UNFUSED), {"bandwidth": bandwidths})
    records = _roofline("1 TB/s", 1e12, 200e12, 260) + _roofline("3 TB/s", 3e12, 200e12, 260)
    records += [
        {"line": "decode", "bandwidth": b * 1e9, "seconds": float(s)}
        for b, s in zip(bandwidths, swept.seconds, strict=True)
    ]
    keys = ("line", "intensity", "performance", "bandwidth", "seconds")
    records = [{k: r.get(k) for k in keys} for r in records]
    note = "Decode is bound by memory throughout, so its time falls as one over the bandwidth."
    return Figure(20, "Bandwidth: roofline and Llama-2-13b decode, batch 1, 1024 tokens", note, records)


FIGURES: Mapping[int, Callable[[], Figure]] = {
    5: figure5, 6: figure6, 7: figure7, 8: figure8, 9: figure9, 11: figure11, 16: figure16, 18: figure18, 19: figure19,
    20: figure20,
}  # fmt: skip


def figure(number: int) -> Figure:
    """A figure of the survey by its number.

    Raises:
        ValueError: a figure without data.
    """
    if number not in FIGURES:
        raise ValueError(f"figure {number} cannot be drawn; these have data: {', '.join(map(str, FIGURES))}")
    return FIGURES[number]()
