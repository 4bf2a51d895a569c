"""The claims: of each method the paper's number whose quantity can be measured here without the paper's hardware.

Methods without one either have no number of the kind (their papers report seconds alone), or one that they meet by
construction. Numbers are from the papers, or from Spec-Bench's table of 2025-04 (Vicuna-7B on an A100 unless said).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from foretell.catalogue import catalogue
from foretell.lab.reproduce.claim import SPEC_BENCH, Claim, Options, Run
from foretell.lab.reproduce.counts import Samples, Totals
from foretell.utils.names import unknown

_EXACT = {"confidence_threshold": 0.0}
"""Drafts of exactly the size that is asked for."""
_TREE = {**_EXACT, "num_draft_tokens": 60, "num_steps": 6}
_SMALL_TARGET = (
    "A target of 135M parameters repeats itself and its input more than one of 7B, so copies and drafts fit."
)


def _per_pass(runs: Sequence[Totals]) -> Samples:
    return runs[0].per_pass


def _times(runs: Sequence[Totals]) -> Samples:
    """Tokens per pass of the first run, in those of the second."""
    return runs[0].per_pass / runs[1].per_pass


def _acceptance(runs: Sequence[Totals]) -> Samples:
    return runs[0].acceptance


def _of_second(runs: Sequence[Totals]) -> Samples:
    return runs[1].acceptance


def _spec_bench(
    method: str,
    published: float,
    options: Mapping[str, object],
    scale: str,
    model: str = "Vicuna-7B",
) -> Claim:
    return Claim(
        method=method,
        paper=f"{SPEC_BENCH}, {model}: {published:g} tokens per pass.",
        published=published,
        here="tokens per pass, greedy; plain decoding has 1",
        runs=(Run(method, options),),
        value=_per_pass,
        scale=scale,
    )


def _faster(method: str, published: float, paper: str, here: str, runs: tuple[Run, Run], scale: str) -> Claim:
    """A claim about tokens per pass of one run in those of another with the same budget."""
    return Claim(method=method, paper=paper, published=published, here=here, runs=runs, value=_times, scale=scale)


def _self_drafting(method: str, published: float, paper: str, share: float, options: Options, scale: str) -> Claim:
    """A claim about the speed of a target that drafts with a `share` of its weights."""

    def all_options(layers: int) -> Mapping[str, object]:
        return {**_EXACT, "num_speculative_tokens": 3, **(options(layers) if callable(options) else options)}

    return Claim(
        method=method,
        paper=paper,
        published=published,
        here=f"tokens per pass-time, where a draft takes the share {share:g} of a pass that it reads; chains of 3, "
        "greedy; plain decoding has 1",
        runs=(Run(method, all_options),),
        value=lambda runs: runs[0].gain(share),
        scale=scale,
    )


def _sampled(method: str, drafts: int, repeat: int = 4, **options: object) -> Run:
    return Run(method, {"num_speculative_tokens": drafts, **options}, temperature=1.0, repeat=repeat)


def _online(interval: int) -> Run:
    """A step after so many requests, 0: none."""
    options = {"num_speculative_tokens": 5, "online_update_interval": interval, "online_learning_rate": 1e-3}
    return Run("online", {**_EXACT, **options}, noise=0.3)


_MEDUSA = Run("medusa", {"num_draft_tokens": 63})
_EAGLE3 = Run("eagle3", _TREE)

CLAIMS: tuple[Claim, ...] = (
    _spec_bench("ngram", 1.75, {**_EXACT, "num_speculative_tokens": 10}, _SMALL_TARGET),
    _spec_bench(
        "recycling",
        2.73,
        {**_EXACT, "num_speculative_tokens": 64},
        "The matrix is filled by the requests themselves: 480 questions fill it further than these few.",
    ),
    Claim(
        method="rest",
        paper="REST (arXiv 2311.08252), greedy, CodeLlama-7B on HumanEval with code of The Stack: 2.65 tokens per "
        "pass, by the result file of its repository.",
        published=2.65,
        here="tokens per pass, greedy; pieces of 24 modules of Python's library and 12 of rich and Jinja2 are "
        "continued, and the datastore holds their other modules; plain decoding has 1",
        runs=(Run("rest", {**_EXACT, "num_speculative_tokens": 64}, "code", corpus=True),),
        value=_per_pass,
        scale="The datastore has 11 MB of code, the paper's 0.9 GB; a larger one of the target's domain shows more.",
    ),
    _spec_bench(
        "lookahead",
        1.64,
        {
            **_EXACT,
            "max_window_size": 7,
            "max_ngram_size": 5,
            "max_verification_set_size": 7,
            "pool_from_prompt": False,
        },
        "N-grams are collected while an answer grows, and answers here are short; 200 tokens and more fill the pool.",
    ),
    Claim(
        method="jacobi",
        paper="Lookahead decoding (arXiv 2402.02057): on language models, Jacobi iteration alone advances hardly; "
        "about 1.1 tokens per pass.",
        published=1.1,
        here="tokens per pass with a window of 8, greedy; plain decoding has 1",
        runs=(Run("jacobi", {**_EXACT, "max_window_size": 8}),),
        value=_per_pass,
        scale="A guess becomes right only behind a right prefix; texts with fixed phrases show more of it.",
    ),
    _spec_bench(
        "draft_model",
        2.28,
        {**_EXACT, "num_speculative_tokens": 5, "draft_sample_method": "greedy"},
        "Vicuna's draft model of 68M parameters read gigabytes of text; this one was distilled in an hour.",
    ),
    _faster(
        "block_verification",
        1.065,
        "Sun et al. (arXiv 2403.10444): block verification is 5 % to 8 % faster than token verification of the same "
        "drafts.",
        "tokens per pass in those of token verification, 8 drafts, temperature 1, 16 seeds",
        (_sampled("block_verification", 8, 16), _sampled("draft_model", 8, 16)),
        "The gain grows with the length of accepted chains: a better draft model shows more of it.",
    ),
    _faster(
        "spectr",
        1.37,
        "Sun et al. (arXiv 2310.15141): SpecTr is a further 1.37 times faster than speculative decoding with one "
        "chain (PaLM-2).",
        "tokens per pass of 8 chains of 6, in those of one chain of 6; temperature 1, 4 seeds",
        (
            Run("spectr", {"eagle_topk": 8, "num_steps": 6}, temperature=1.0, repeat=4),
            _sampled("draft_model", 6),
        ),
        "Chains of a draft model that is sure of itself are alike; a draft of higher entropy shows more.",
    ),
    _faster(
        "specinfer",
        1.35,
        "SpecInfer (arXiv 2305.09781): trees of drafts are 1.2 to 1.5 times as fast as chains of one draft model.",
        "tokens per pass of trees of 30 drafts, in those of a chain of 8, as deep; temperature 1, 4 seeds",
        (
            Run("specinfer", {"num_draft_tokens": 30}, temperature=1.0, repeat=4),
            _sampled("draft_model", 8),
        ),
        "Second-best tokens of a small distilled draft are seldom the target's.",
    ),
    Claim(
        method="online",
        paper="Online speculative decoding (arXiv 2310.07177): distillation while serving raises acceptance by 0.1 to "
        "0.65.",
        published=0.1,
        here="share of accepted first drafts while it learns, less that of the same draft model as it was: the "
        "installed one with noise in its matrices, 30 % of their standard deviation, so that it knows less of the "
        "target's answers",
        runs=(_online(2), _online(0)),
        value=lambda runs: runs[0].acceptance - runs[1].acceptance,
        null=0.0,
        scale="The paper's curves rise over thousands of requests; these few hold hundreds of corrections.",
    ),
    _self_drafting(
        "self_speculative",
        1.99,
        "Draft & Verify (arXiv 2309.08168): up to 1.99 times as fast (LLaMA-2, 13B to 70B).",
        0.94,
        {},
        "The default skips the attention of 9 of 30 blocks, 6 % of the weights; of 135M parameters no larger part can "
        "be left out without the draft failing. LLaMA-2 13B spares about half of its sub-layers.",
    ),
    _self_drafting(
        "layer_skip",
        2.16,
        "LayerSkip (arXiv 2404.16710): 2.16 times as fast on CNN/DM (Llama trained with layer dropout and early-exit "
        "loss, 8 of 32 layers draft).",
        0.25,
        lambda layers: {"exit_layer": max(1, layers // 4)},
        "SmolLM2 was not trained to leave early; a quarter of its layers predicts nothing. A model trained by the "
        "paper's recipe would show it.",
    ),
    Claim(
        method="quantised_draft",
        paper="QuantSpec (arXiv 2502.10424): drafts of the target in 4 bits are accepted to more than 90 %.",
        published=0.9,
        here="share of accepted first drafts in 4 bits, greedy; null: drafts of a quarter of the layers, which read as "
        "many bytes",
        runs=(
            Run("quantised_draft", {**_EXACT, "num_speculative_tokens": 3, "quantization_bits": 4}),
            Run("layer_skip", lambda n: {**_EXACT, "num_speculative_tokens": 3, "exit_layer": max(1, n // 4)}),
        ),
        value=_acceptance,
        null=_of_second,
        scale="Rounding to four bits without calibration costs 135M parameters more than 7B.",
    ),
    Claim(
        method="sparse_kv_draft",
        paper="TriForce (arXiv 2404.11912): a retrieved part of the cache of 4,096 of 124,928 keys drafts with an "
        "acceptance of about 0.9.",
        published=0.9,
        here="share of accepted first drafts with 128 keys of long prompts, greedy; null: the last 128 keys "
        "(StreamingLLM)",
        runs=(
            Run("sparse_kv_draft", {**_EXACT, "num_speculative_tokens": 3, "cache_budget": 128}, "long"),
            Run(
                "sparse_kv_draft",
                {**_EXACT, "num_speculative_tokens": 3, "cache_budget": 128, "cache_policy": "streaming_llm"},
                "long",
            ),
        ),
        value=_acceptance,
        null=_of_second,
        scale="Two thousand keys are few: what was written last is a large part of them. The paper's 125,000 show it.",
    ),
    _spec_bench(
        "medusa",
        2.31,
        {"num_draft_tokens": 63},
        "Four heads over 12,288 tokens, trained for an hour; Vicuna's have its whole vocabulary and more text.",
    ),
    Claim(
        method="blockwise",
        paper="Stern et al. (arXiv 1811.03115): heads on a frozen model accept blocks of 1.76 tokens in the mean (WMT "
        "En-De, exact).",
        published=1.76,
        here="tokens per pass of a chain of all heads, greedy; plain decoding has 1",
        runs=(Run("blockwise"),),
        value=_per_pass,
        scale="Chat answers are less certain than translations.",
    ),
    _faster(
        "mlp_speculator",
        1.41,
        "Heads that read the token drafted before them against independent ones on Spec-Bench (Vicuna-7B): Hydra 3.26, "
        "Medusa 2.31 tokens per pass, 1.41 times as many.",
        "tokens per pass in those of Medusa's heads, trees of 63 drafts, greedy",
        (Run("mlp_speculator", {**_EXACT, "num_draft_tokens": 63}), _MEDUSA),
        "Both were trained for an hour, and the stages have three positions to Medusa's four.",
    ),
    _spec_bench(
        "eagle",
        3.58,
        {"num_draft_tokens": 25},
        "EAGLE-1 learns features slowly: minutes of training do not reach what the paper's days do.",
    ),
    _faster(
        "eagle2",
        1.21,
        "EAGLE-2's dynamic trees against EAGLE's fixed tree on Spec-Bench, the same network (Vicuna-7B): 4.34 and 3.58 "
        "tokens per pass, 1.21 times as many.",
        "tokens per pass of dynamic trees of 60 nodes, in those of the optimal fixed tree of 60; the installed EAGLE-3 "
        "network, greedy",
        (
            _EAGLE3,
            Run(
                "eagle3",
                {"num_draft_tokens": 60, "acceptance": [0.6, 0.15, 0.07, 0.04, 0.025, 0.02, 0.015, 0.01]},
            ),
        ),
        "The papers' trees differ in size (60 and 25 nodes), which favours the dynamic one; here both have 60.",
    ),
    _spec_bench("eagle3", 5.71, _TREE, "One layer over 12,288 tokens, distilled in hours on two cores.", "Vicuna-13B"),
    Claim(
        method="dflash",
        paper="DSpark's table 1 (arXiv 2607.05147): DFlash has 3.07 tokens per round on MT-Bench, chains of 7, "
        "temperature 1 (Qwen3-4B, 1.3M answers, 10 epochs).",
        published=3.07,
        here="tokens per pass of chains of 7, temperature 1",
        runs=(Run("dflash", {**_EXACT, "num_draft_tokens": 7, "eagle_topk": 1}, temperature=1.0),),
        value=_per_pass,
        scale="Predicting several tokens at once is learned slowly; 60,000 tokens of answers are a ten-thousandth of "
        "the paper's.",
    ),
    _faster(
        "hybrid_model",
        1.055,
        "SAM Decoding beside EAGLE-2 against EAGLE-2 alone on Spec-Bench (Vicuna-7B): 4.58 and 4.34 tokens per pass, "
        "1.055 times as many.",
        "tokens per pass of copies beside the speculator, in those of the speculator alone; trees of 60 nodes, greedy, "
        "drafts that cost nothing",
        (
            Run("hybrid_model", {"num_speculative_tokens": 60, **_EXACT, "num_steps": 6}, free=True),
            replace(_EAGLE3, free=True),
        ),
        "",
    ),
    _faster(
        "lenience_lossy",
        2.0,
        "Leviathan et al. (arXiv 2211.17192), T5-XXL, WMT En-De, temperature 1: 2.5 times as fast at a lenience of 1, "
        "5 times at 0.1, twice as much.",
        "tokens per pass at a lenience of 0.1, in those at 1; chains of 7, temperature 1, 4 seeds",
        (_sampled("lenience_lossy", 7, lenience=0.1), _sampled("lenience_lossy", 7, lenience=1.0)),
        "",
    ),
)


def claim_of(method: str) -> Claim:
    """The claim about a method, by its name or one of its other names.

    Raises:
        ValueError: there is none; for an unknown name the nearest one is suggested.
    """
    names = {alias: entry.name for entry in catalogue().values() for alias in (entry.name, *entry.aliases)}
    claims = {c.method: c for c in CLAIMS}
    name = names.get(method.replace("-", "_"), method)
    if name in catalogue() and name not in claims:
        raise ValueError(
            f"method {name!r} has no claim to check: no paper's number about it can be measured here as the same "
            f"quantity; check its output with `foretell verify {name}`, and its speed with `foretell bench run "
            f"--methods {name}`"
        )
    if name not in claims:
        raise unknown("method", method, claims)
    return claims[name]
