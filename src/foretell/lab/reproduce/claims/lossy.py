"""Claims about methods that change the output: what they give, and that their price is reported."""

from foretell.lab.reproduce.claim import Claim, Finding, Series, percent, rises
from foretell.lab.reproduce.lab import Lab


def _lenience(lab: Lab) -> Finding:
    points = [(v, lab.run("lenience_lossy", {"lenience": v}, temperature=1.0)) for v in (1.0, 0.5, 0.1)]
    yields, variations = [r.tokens_per_pass for _, r in points], [r.mean_variation for _, r in points]
    return Finding(
        rises(yields, 0.01) and rises(variations, 0.0) and variations[0] < 1e-6 < variations[-1],
        f"from {yields[0]:.2f} tokens per pass at no price to {yields[-1]:.2f} at a total variation of "
        f"{variations[-1]:.2f} per "
        "token",
        (Series.of("lenience_lossy", list(zip(variations, yields, strict=True))),),
        "price: total variation per token",
    )


def _top_k(lab: Lab) -> Finding:
    points = [(k, lab.run("blockwise_lossy", {"accept_top_k": k})) for k in (1, 2, 4)]
    yields, changed = [r.tokens_per_pass for _, r in points], [r.changed_share for _, r in points]
    return Finding(
        rises(yields, 0.0) and changed[0] == 0 < changed[-1],
        f"accepting the best token alone {yields[0]:.2f} tokens per pass, any of the best four {yields[-1]:.2f} with "
        f"{percent(changed[-1])} of the tokens changed",
        (Series.of("blockwise_lossy", [(k, r.tokens_per_pass) for k, r in points]),),
        "tokens that are accepted, best first",
    )


def _fallback(lab: Lab) -> Finding:
    points = [(f, lab.run("bild_lossy", {"fallback_threshold": f, "rollback_threshold": 5.0})) for f in (0.9, 0.6, 0.3)]
    yields = [r.tokens_per_pass for _, r in points]
    return Finding(
        rises(yields, 0.0) and yields[-1] > 1.2,
        f"from {yields[0]:.2f} tokens per pass where the small model must be sure of 90 % to {yields[-1]:.2f} at 30 %",
        (Series.of("bild_lossy", [(f, r.tokens_per_pass) for f, r in points]),),
        "confidence below which the large model is asked",
        reason="The small model is seldom sure.",
    )


def _typical(lab: Lab, method: str) -> Finding:
    greedy = lab.run(method)
    points = [(e, lab.run(method, {"posterior_threshold": e}, temperature=1.0)) for e in (0.3, 0.09, 0.01)]
    yields = [r.tokens_per_pass for _, r in points]
    return Finding(
        greedy.identical == greedy.answers and rises(yields, 0.0),
        f"at temperature 0 {greedy.identical} of {greedy.answers} answers are those of plain decoding; at "
        f"temperature 1 a "
        f"threshold of 0.01 gives {yields[-1]:.2f} tokens per pass, of 0.3 {yields[0]:.2f}",
        (Series.of(method, [(e, r.tokens_per_pass) for e, r in points]),),
        "threshold of a typical token",
    )


def _exits(lab: Lab) -> Finding:
    points = [(t, lab.run("early_exit_lossy", {"exit_threshold": t})) for t in (0.5, 0.9, 1.0)]
    changed = [r.changed_share for _, r in points]
    return Finding(
        rises(changed[::-1], 0.0) and changed[-1] == 0,
        f"{', '.join(percent(p) for p in changed)} of the tokens changed at thresholds of 0.5, 0.9 and 1",
        (Series.of("early_exit_lossy", [(t, r.changed_share) for t, r in points]),),
        "threshold",
        "share of changed tokens",
    )


def _later_tokens(lab: Lab) -> Finding:
    layers = lab.model.network.config.layers
    least = [round(layers * share) for share in (1.0, 0.9, 0.7)]
    points = [
        (n, lab.run("skip_decode_lossy", {"max_layers": layers, "min_layers": n, "horizon": 32}).mean_variation)
        for n in least
    ]
    variations = [y for _, y in points]
    return Finding(
        rises(variations, 0.0) and variations[-1] > variations[0],
        f"a total variation per token of {', '.join(f'{p:.2f}' for p in variations)} where the last tokens run "
        f"{', '.join(map(str, least))} of {layers} layers",
        (Series.of("skip_decode_lossy", points),),
        "layers of the last tokens",
        "price: total variation per token",
    )


CLAIMS = (
    Claim(
        "lenience_lossy",
        "A lower lenience accepts more drafts, at a price that grows.",
        "tokens per pass do not fall by more than 1 % and the price never falls from 1 to 0.1; no price at 1",
        _lenience,
    ),
    Claim(
        "blockwise_lossy",
        "Accepting any of the target's best k tokens gives longer blocks, and changes the text.",
        "never falling over k of 1, 2 and 4; nothing changes at 1",
        _top_k,
    ),
    Claim(
        "bild_lossy",
        "The lower the threshold at which the small model hands over, the fewer passes of the large one.",
        "tokens per pass never fall from 0.9 to 0.3, and are above 1.2 there",
        _fallback,
    ),
    Claim(
        "early_exit_lossy",
        "The higher the threshold of the exits, the less they change; at the highest, nothing.",
        "the price never rises over thresholds of 0.5, 0.9 and 1, and is 0 at 1",
        _exits,
    ),
    Claim(
        "medusa_lossy",
        "Typical acceptance is greedy decoding at temperature 0, and a lower threshold accepts more above it.",
        "all greedy answers identical; tokens per pass never fall over 0.3, 0.09, 0.01",
        lambda lab: _typical(lab, "medusa_lossy"),
    ),
    Claim(
        "typical_lossy",
        "Typical acceptance is greedy decoding at temperature 0, and a lower threshold accepts more above it.",
        "all greedy answers identical; tokens per pass never fall over 0.3, 0.09, 0.01",
        lambda lab: _typical(lab, "typical_lossy"),
    ),
    Claim(
        "skip_decode_lossy",
        "A smaller budget of layers for later tokens costs more.",
        "the price never falls from all layers to 0.7 of them",
        _later_tokens,
    ),
)
