"""Claims about drafts of a smaller model."""

from collections.abc import Sequence

from foretell.lab.reproduce.claim import Claim, Finding, Series, percent, rises
from foretell.lab.reproduce.lab import Lab, LabRun

_SAMPLED = 1.0
"""Temperature of the claims about sampling."""


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Tokens per pass of a chain whose drafts are accepted independently with one probability (arXiv 2211.17192)."""
    if acceptance >= 1:
        return drafts + 1.0
    return float((1 - acceptance ** (drafts + 1)) / (1 - acceptance))


def _chain(lab: Lab, method: str, drafts: int, repeat: int = 2) -> LabRun:
    return lab.run(method, {"num_speculative_tokens": drafts}, temperature=_SAMPLED, repeat=repeat)


def _capped_geometric(lab: Lab) -> Finding:
    lengths = (1, 2, 4, 6)
    runs = {n: _chain(lab, "draft_model", n) for n in lengths}
    acceptance = runs[1].acceptance
    measured = [(n, runs[n].tokens_per_drafting_pass) for n in lengths]
    predicted = [(n, expected_tokens(acceptance, n)) for n in lengths]
    error = max(abs(m / p - 1) for (_, m), (_, p) in zip(measured, predicted, strict=True))
    return Finding(
        error <= 0.1,
        f"with the acceptance {acceptance:.2f} of chains of one, the formula is off by at most {percent(error)} up "
        f"to chains "
        "of 6",
        (Series.of("measured", measured), Series.of("(1 - a^(n+1)) / (1 - a)", predicted)),
        "drafted tokens n",
        reason="Acceptance is not independent along a chain: a text that is easy stays easy, so the mean of powers "
        "is above "
        "the power of the mean (Jensen).",
    )


def _block(lab: Lab) -> Finding:
    lengths = (3, 6)
    token = [(n, _chain(lab, "draft_model", n, 8).tokens_per_pass) for n in lengths]
    block = [(n, _chain(lab, "block_verification", n, 8).tokens_per_pass) for n in lengths]
    gain = [b / t for (_, b), (_, t) in zip(block, token, strict=True)]
    return Finding(
        min(gain) >= 0.98 and max(gain) >= 1.0,
        f"block verification gives {gain[0]:.3f} and {gain[1]:.3f} times the tokens per pass of token verification",
        (Series.of("token by token", token), Series.of("block", block)),
        "drafted tokens",
        reason="The gain is a few per cent, less than the noise of this many samples.",
    )


def _wider_trees(lab: Lab) -> Finding:
    points = [(n, lab.run("specinfer", {"num_draft_tokens": n}).tokens_per_pass) for n in (2, 6, 10, 14)]
    return Finding(
        rises([y for _, y in points], 0.01) and points[-1][1] > points[0][1],
        f"from {points[0][1]:.2f} tokens per pass with 2 drafts to {points[-1][1]:.2f} with 14",
        (Series.of("specinfer", points),),
        "drafts of the tree",
    )


def _more_chains(lab: Lab) -> Finding:
    points = [
        (k, lab.run("spectr", {"eagle_topk": k, "num_steps": 3}, temperature=_SAMPLED, repeat=2).tokens_per_pass)
        for k in (1, 2, 4)
    ]
    values = [y for _, y in points]
    return Finding(
        rises(values, 0.01) and values[-1] > values[0],
        f"{values[0]:.2f} tokens per pass with one chain of three drafts, {values[-1]:.2f} with four",
        (Series.of("spectr", points),),
        "chains drawn",
    )


def _scalable_tree(lab: Lab) -> Finding:
    sizes = (4, 8, 16, 32)
    sequoia = [(n, lab.run("sequoia", {"num_draft_tokens": n}).tokens_per_pass) for n in sizes]
    chain = [
        (n, lab.run("draft_model", {"num_speculative_tokens": n, "draft_sample_method": "greedy"}).tokens_per_pass)
        for n in sizes[:3]
    ]
    return Finding(
        rises([y for _, y in sequoia], 0.0) and sequoia[2][1] > chain[2][1],
        f"its trees go on growing ({sequoia[0][1]:.2f} to {sequoia[-1][1]:.2f} tokens per pass from 4 to 32 drafts), "
        f"a chain "
        f"of 16 gives {chain[2][1]:.2f}",
        (Series.of("sequoia", sequoia), Series.of("chain", chain)),
        "drafts",
        reason="Chains of a good draft model rarely break early.",
    )


def _dynamic(lab: Lab) -> Finding:
    names, sizes, temperatures = ("dynamic_tree", "sequoia"), (8, 16, 32), (0.0, _SAMPLED)

    def tokens_per_pass(name: str, temperature: float) -> list[float]:
        options = [{"num_draft_tokens": n, "num_steps": 8} for n in sizes]
        repeat = 2 if temperature else 1
        return [lab.run(name, o, temperature=temperature, repeat=repeat).tokens_per_pass for o in options]

    runs = {(name, t): tokens_per_pass(name, t) for name in names for t in temperatures}
    pairs = [zip(*(runs[name, t] for name in names), strict=True) for t in temperatures]
    return Finding(
        all(dynamic >= fixed * 0.98 for pair in pairs for dynamic, fixed in pair),
        "with 8, 16 and 32 drafts, trees that follow the draft's confidence and the best fixed trees have "
        + "; ".join(
            f"{_listed(runs[names[0], t])} and {_listed(runs[names[1], t])} tokens per pass at temperature {t:g}"
            for t in temperatures
        ),
        tuple(
            Series.of(f"{name}, temperature {t:g}", list(zip(sizes, values, strict=True)))
            for (name, t), values in runs.items()
        ),
        "nodes of the tree",
        reason="The draft's probabilities are not those with which its tokens are right.",
    )


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _paced(lab: Lab) -> Finding:
    points = [(t, lab.run("llmcad", {"confidence_threshold": t})) for t in (0.5, 0.1, 0.01)]
    yields = [r.tokens_per_pass for _, r in points]
    return Finding(
        yields[-1] > 1.3 and rises(yields, 0.01),
        f"the target's weights are read {1 / yields[-1]:.2f} times per token instead of once; a lower threshold drafts "
        "more before the target is asked",
        (Series.of("llmcad", [(t, r.tokens_per_pass) for t, r in points]),),
        "confidence below which the target is asked",
    )


def _cascade(lab: Lab) -> Finding:
    options = {"num_speculative_tokens": 5}
    cascade, chain = (lab.run(m, options).tokens_per_pass for m in ("cascade", "draft_model"))
    return Finding(
        abs(cascade / chain - 1) <= 0.02,
        f"{cascade:.2f} tokens per pass, {chain:.2f} without the cascade: the drafts are the same, made in fewer "
        f"passes of "
        "the draft model",
        (Series.of("tokens per pass", [(0, chain), (1, cascade)]),),
        "0: draft model alone, 1: drafted for by copies",
    )


def _learns(lab: Lab) -> Finding:
    base = lab.run("draft_model", {"num_speculative_tokens": 5, "draft_sample_method": "greedy"})
    online = lab.run("online", {"num_speculative_tokens": 5, "online_update_interval": 2, "online_learning_rate": 3e-4})
    return Finding(
        online.tokens_per_pass >= base.tokens_per_pass,
        f"{online.tokens_per_pass:.2f} tokens per pass while it learns from its corrections, "
        f"{base.tokens_per_pass:.2f} "
        "without",
        (Series.of("tokens per pass", [(0, base.tokens_per_pass), (1, online.tokens_per_pass)]),),
        "0: fixed, 1: learning",
        reason="The answers of this check hold too few corrections to learn from; the paper's curves rise over "
        "thousands of "
        "requests.",
    )


def _other_tokenizer(lab: Lab) -> Finding:
    run = lab.run("universal_draft")
    return Finding(
        run.identical == run.answers and run.tokens_per_pass > 1,
        f"{run.identical} of {run.answers} answers identical, {run.tokens_per_pass:.2f} tokens per pass",
        (Series.of("universal_draft", run.accepted_by_depth),),
        "depth of the draft",
        "passes that accept",
    )


def _denoising_steps(lab: Lab) -> Finding:
    points = [(s, lab.run("masked_diffusion", {"denoising_steps": s}).tokens_per_pass) for s in (1, 2, 4)]
    values = [y for _, y in points]
    return Finding(
        rises(values, 0.02) and values[-1] > 1,
        f"{values[0]:.2f} tokens per pass with drafts of one denoising step, {values[-1]:.2f} with four",
        (Series.of("masked_diffusion", points),),
        "denoising steps of a draft",
        reason="A short adaptation has hardly left the autoregressive model, which predicts no token behind a mask; "
        "published ones read billions of tokens.",
    )


CLAIMS = (
    Claim(
        "draft_model",
        "With a probability a of accepting a draft, a chain of n drafts gives (1 - a^(n+1)) / (1 - a) tokens per pass.",
        "within 10 % for chains of 1 to 6, at temperature 1, with a measured on chains of one",
        _capped_geometric,
    ),
    Claim(
        "block_verification",
        "Verifying a block jointly accepts at least as much as verifying token by token, with the same drafts.",
        "not below by more than 2 % (noise) for 3 and 6 drafts, and not below in the mean of one of them",
        _block,
    ),
    Claim(
        "universal_draft",
        "A draft model with another tokenizer drafts, and the text stays the same.",
        "all greedy answers identical, and more than 1 token per pass",
        _other_tokenizer,
    ),
    Claim(
        "llmcad",
        "A draft that is paced by its confidence reads the target's weights less often than once per token.",
        "above 1.3 tokens per pass; lower thresholds do not lower it by more than 1 %",
        _paced,
    ),
    Claim(
        "specinfer",
        "Larger trees of drafts have the target's tokens more often.",
        "tokens per pass do not fall by more than 1 % from 2 to 14 drafts, and rise over all",
        _wider_trees,
    ),
    Claim(
        "spectr",
        "With optimal transport, more chains drawn from the draft give more accepted tokens.",
        "one, two and four chains of 3: no fall by more than 1 %, and a gain",
        _more_chains,
    ),
    Claim(
        "sequoia",
        "Trees that are optimal for measured acceptance go on gaining where chains have stopped.",
        "never falling from 4 to 32 drafts; above a chain at 16",
        _scalable_tree,
    ),
    Claim(
        "dynamic_tree",
        "Trees that follow the draft's confidence are at least as good as fixed ones of the same size.",
        "not below the optimal fixed tree by more than 2 % at 8, 16 and 32 drafts, greedy and at temperature 1",
        _dynamic,
    ),
    Claim(
        "cascade",
        "A draft model that is itself drafted for gives the same drafts.",
        "tokens per pass within 2 % of those of the draft model alone",
        _cascade,
    ),
    Claim(
        "online",
        "A draft model that is distilled while it serves is accepted more often.",
        "tokens per pass not below those of the fixed draft model",
        _learns,
    ),
    Claim(
        "masked_diffusion",
        "A masked diffusion model drafts a block in one pass, and more denoising steps draft it better.",
        "above 1 token per pass; one, two and four steps do not lower it by more than 2 %",
        _denoising_steps,
    ),
)
