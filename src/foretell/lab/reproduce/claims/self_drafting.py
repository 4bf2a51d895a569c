"""Claims about the target as its own draft."""

from foretell.lab.reproduce.claim import Claim, Finding, Series, percent, rises
from foretell.lab.reproduce.lab import Lab

_CHAIN = {"confidence_threshold": 0.0, "num_speculative_tokens": 3}
"""Chains of exactly three drafts."""


def _deeper_exits(lab: Lab) -> Finding:
    layers = lab.model.network.config.layers
    exits = [round(layers * share) for share in (0.5, 0.7, 0.9)]
    points = [(e, lab.run("layer_skip", {"exit_layer": e, "confidence_threshold": 0.0}).acceptance) for e in exits]
    values = [y for _, y in points]
    return Finding(
        rises(values, 0.0) and values[-1] > values[0],
        f"first drafts are accepted in {percent(values[0])} of the passes after {exits[0]} of {layers} layers, in "
        f"{percent(values[-1])} after {exits[-1]}; the model was not trained for exits",
        (Series.of("layer_skip", points),),
        "layers of the draft",
        "share of accepted first drafts",
    )


def _skipped_layers(lab: Lab) -> Finding:
    run = lab.run("self_speculative", _CHAIN)
    halves = lab.run("layer_skip", {**_CHAIN, "exit_layer": lab.model.network.config.layers // 2})
    return Finding(
        run.acceptance > halves.acceptance,
        f"a draft that skips sub-layers all over the model is accepted in {percent(run.acceptance)} of the passes, "
        f"one that skips the last ones in {percent(halves.acceptance)}",
        (Series.of("share of accepted first drafts", [(0, halves.acceptance), (1, run.acceptance)]),),
        "0: last layers skipped, 1: chosen sub-layers skipped",
        "share of accepted first drafts",
        "The default set of skipped sub-layers is large; `foretell tune skip` searches for a better one.",
    )


def _quantised(lab: Lab) -> Finding:
    bits = (4, 8)
    points = [(b, lab.run("quantised_draft", {**_CHAIN, "quantization_bits": b}).acceptance) for b in bits]
    return Finding(
        points[-1][1] >= 0.9 and points[0][1] >= 0.6,
        f"drafts in 8 bits are accepted in {percent(points[1][1])} of the passes, in 4 bits in {percent(points[0][1])}",
        (Series.of("quantised_draft", points),),
        "bits per weight of the draft",
        "share of accepted first drafts",
        "Rounding to four bits without calibration costs a small model more than a large one.",
    )


def _pruned(lab: Lab) -> Finding:
    counts = (2, 5, 9)
    points = [(n, lab.run("pruned_draft", {**_CHAIN, "pruned_layers": n}).acceptance) for n in counts]
    values = [y for _, y in points]
    return Finding(
        values[0] >= 0.6 and rises(values[::-1], 0.0),
        f"with {counts[0]} of the least influential blocks left out {percent(values[0])} of the first drafts are "
        f"accepted, with {counts[-1]} {percent(values[-1])}",
        (Series.of("pruned_draft", points),),
        "blocks left out",
        "share of accepted first drafts",
        "Every block of a small model matters.",
    )


def _part_of_the_cache(lab: Lab) -> Finding:
    budgets = (64, 256, 1024)
    runs = [lab.run("sparse_kv_draft", {**_CHAIN, "cache_budget": b}, prompts=lab.long) for b in budgets]
    values = [run.tokens_per_drafting_pass for run in runs]
    most, last = _CHAIN["num_speculative_tokens"] + 1, runs[-1]
    return Finding(
        values[-1] >= 0.85 * most and rises(values, 0.05),
        f"{values[0]:.2f} of at most {most:.0f} tokens per pass that drafts with {budgets[0]} cached keys, "
        f"{values[-1]:.2f} with {budgets[-1]}, over {last.drafting_passes} such passes of {last.answers} answers",
        (Series.of("sparse_kv_draft", list(zip(budgets, values, strict=True))),),
        "cached keys that the draft reads",
        "tokens per pass that drafts",
        reason="The attention of a small model is spread over more of the text than these keys.",
    )


def _hierarchy(lab: Lab) -> Finding:
    options = {"confidence_threshold": 0.0, "num_speculative_tokens": 4, "cache_budget": 512}
    both, alone = (lab.run(m, options, prompts=lab.long).tokens_per_pass for m in ("triforce", "sparse_kv_draft"))
    return Finding(
        both >= 0.75 * alone,
        f"{both:.2f} tokens per pass; the same drafts without the small model in front {alone:.2f}",
        (Series.of("tokens per pass", [(0, alone), (1, both)]),),
        "0: target over a part of its cache, 1: a small model in front of it",
        reason="The small model ends drafts early.",
    )


def _some_neurons(lab: Lab) -> Finding:
    run = lab.run("sparse_mlp_draft", _CHAIN)
    return Finding(
        run.acceptance >= 0.7,
        f"first drafts are accepted in {percent(run.acceptance)} of the passes, {run.tokens_per_pass:.2f} tokens per "
        "pass",
        (Series.of("sparse_mlp_draft", [(d, run.conditional_acceptance(d)) for d in (1, 2, 3)]),),
        "depth of the draft",
        "share accepted of those reached",
        "Neurons of a small model are seldom idle.",
    )


def _first_neurons(lab: Lab) -> Finding:
    points = [(s, lab.run("matformer_draft", {**_CHAIN, "neuron_share": s}).acceptance) for s in (0.5, 0.75, 0.9)]
    values = [y for _, y in points]
    return Finding(
        rises(values, 0.0) and values[-1] > values[0],
        f"first drafts of half of the neurons are accepted in {percent(values[0])} of the passes, of 90 % of them in "
        f"{percent(values[-1])}",
        (Series.of("matformer_draft", points),),
        "share of the neurons",
        "share of accepted first drafts",
        "A model that was not trained as nested parts needs all of its neurons.",
    )


CLAIMS = (
    Claim(
        "layer_skip",
        "The more layers a draft runs, the more of its tokens are accepted.",
        "the share of accepted first drafts never falls from half to nine tenths of the layers",
        _deeper_exits,
    ),
    Claim(
        "self_speculative",
        "Skipping chosen sub-layers keeps more of the model's predictions than cutting its last layers.",
        "more accepted first drafts than those of the first half of the model",
        _skipped_layers,
    ),
    Claim(
        "quantised_draft",
        "The target in fewer bits predicts its tokens nearly always.",
        "first drafts accepted in 90 % of the passes with 8 bits, in 60 % with 4",
        _quantised,
    ),
    Claim(
        "pruned_draft",
        "Blocks of little influence can be left out, and the price grows with their number.",
        "60 % of first drafts accepted with two blocks left out; never rising with 5 and 9",
        _pruned,
    ),
    Claim(
        "sparse_kv_draft",
        "A small part of the cache suffices for drafts, and a larger part drafts better.",
        "85 % of the possible tokens per pass that drafts with 1024 keys; no fall by more than 5 % as the part grows",
        _part_of_the_cache,
    ),
    Claim(
        "triforce",
        "A small model in front of a sparse-cache draft keeps most of its acceptance.",
        "three quarters of the tokens per pass",
        _hierarchy,
    ),
    Claim(
        "sparse_mlp_draft",
        "The neurons that a token chooses suffice for drafts.",
        "first drafts accepted in 70 % of the passes",
        _some_neurons,
    ),
    Claim(
        "matformer_draft",
        "The larger the nested part of the feed-forward networks, the more of its drafts are accepted.",
        "the share of accepted first drafts never falls over 0.5, 0.75 and 0.9 of the neurons",
        _first_neurons,
    ),
)
