"""Claims about drafts that are copied."""

from foretell.lab.reproduce.claim import Claim, Finding, Series, rises
from foretell.lab.reproduce.lab import COPY, PLAIN, Lab


def _plain(lab: Lab) -> Finding:
    run = lab.run(PLAIN)
    return Finding(
        run.passes == run.new_tokens,
        f"{run.new_tokens} tokens in {run.passes} passes",
        (Series.of("plain decoding", [(0, run.tokens_per_pass)]),),
        "-",
    )


def _copies_pay_on_copied_text(lab: Lab) -> Finding:
    copied, free = lab.run("ngram", prompts=COPY), lab.run("ngram", prompts=lab.free)
    return Finding(
        copied.tokens_per_pass >= 2 and free.tokens_per_pass < copied.tokens_per_pass / 1.5,
        f"{copied.tokens_per_pass:.2f} tokens per pass where the answer repeats its prompt, "
        f"{free.tokens_per_pass:.2f} in free answers",
        (Series.of("ngram", [(0, free.tokens_per_pass), (1, copied.tokens_per_pass)]),),
        "0: free answers, 1: answers that repeat the prompt",
        reason="The model does not repeat the prompts that ask for it, or free answers repeat themselves.",
    )


def _longer_copies(lab: Lab) -> Finding:
    references = lab.plain_texts()
    points = [
        (n, lab.run("llma", {"num_speculative_tokens": n}, references=references).tokens_per_pass)
        for n in (2, 4, 8, 15)
    ]
    values = [y for _, y in points]
    return Finding(
        rises(values, 0.0) and values[-1] >= 2 * values[0],
        f"from {values[0]:.2f} tokens per pass with copies of 2 tokens to {values[-1]:.2f} with copies of 15",
        (Series.of("llma", points),),
        "longest copy, tokens",
        reason="The references hold the answers, so copies should run to their end.",
    )


def _any_length(lab: Lab) -> Finding:
    prompts = (*COPY, *lab.free)
    options = {"num_speculative_tokens": 10}
    suffix, ngram = (lab.run(m, options, prompts=prompts).tokens_per_pass for m in ("suffix", "ngram"))
    return Finding(
        suffix >= ngram * 0.97,
        f"suffix automaton {suffix:.2f} tokens per pass, n-grams of at most three tokens {ngram:.2f}",
        (Series.of("tokens per pass", [(0, ngram), (1, suffix)]),),
        "0: ngram, 1: suffix",
        reason="On short texts long matches are rare, and both find the same copies.",
    )


def _warms_up(lab: Lab) -> Finding:
    small, large = (lab.run("recycling", {"num_speculative_tokens": n}).tokens_per_pass for n in (2, 24))
    return Finding(
        small > 1.1 and large > small,
        f"{small:.2f} tokens per pass with 2 recycled candidates, {large:.2f} with 24; nothing is trained or stored "
        "beforehand",
        (Series.of("recycling", [(2, small), (24, large)]),),
        "drafted tokens per pass",
        reason="The successors of a short answer's tokens are not known yet.",
    )


def _both_are_better(lab: Lab) -> Finding:
    options = {"num_speculative_tokens": 12}
    values = {m: lab.run(m, options).tokens_per_pass for m in ("suffix", "recycling", "sam_recycling")}
    return Finding(
        values["sam_recycling"] >= max(values["suffix"], values["recycling"]) * 0.98,
        ", ".join(f"{m} {v:.2f}" for m, v in values.items()) + " tokens per pass at 12 drafts",
        (Series.of("tokens per pass", list(enumerate(values.values()))),),
        "0: suffix, 1: recycling, 2: both",
        reason="The two share one budget of drafts, and one part's drafts displace the other's.",
    )


def _larger_datastore(lab: Lab) -> Finding:
    texts = lab.plain_texts()
    shares = (0.25, 0.5, 1.0)
    points = [(s, lab.run("rest", references=texts[: max(1, round(s * len(texts)))]).tokens_per_pass) for s in shares]
    values = [y for _, y in points]
    return Finding(
        rises(values, 0.01) and values[-1] > values[0] * 1.05,
        f"{values[0]:.2f} tokens per pass with a quarter of the datastore, {values[-1]:.2f} with all of it",
        (Series.of("rest", points),),
        "share of the datastore",
        reason="The texts do not resemble the answers.",
    )


def _phrases(lab: Lab) -> Finding:
    run = lab.run("phrases", prompts=(*COPY, *lab.free))
    deep = sum(run.accepted_per_position[1:]) / max(1, sum(run.accepted_per_position))
    return Finding(
        run.tokens_per_pass > 1.1 and deep > 0.3,
        f"{run.tokens_per_pass:.2f} tokens per pass; {100 * deep:.0f} % of the accepted tokens continue a phrase "
        f"beyond its "
        "first token",
        (Series.of("phrases", run.accepted_by_depth),),
        "depth in the phrase",
        "passes that accept",
        "Hidden states of a small model say little about which phrase follows.",
    )


CLAIMS = (
    Claim(PLAIN, "Plain decoding gives one token per pass.", "passes equal tokens", _plain),
    Claim(
        "ngram",
        "Copying what followed the same n-gram in the prompt gives much where the answer repeats its input, and little "
        "elsewhere.",
        "at least 2 tokens per pass where answers repeat the prompt, and 1.5 times those of free answers",
        _copies_pay_on_copied_text,
    ),
    Claim(
        "llma",
        "Where references hold the answer, tokens per pass grow with the length of the copies.",
        "they never fall from 2 to 15 copied tokens, and at least double",
        _longer_copies,
    ),
    Claim(
        "suffix",
        "Matches of any length, found by a suffix automaton, are at least as good as n-grams of a fixed length.",
        "not below n-grams by more than 3 %, at equal budgets",
        _any_length,
    ),
    Claim(
        "recycling",
        "Candidates that passes have computed anyway draft without training, and more of them draft more.",
        "above 1.1 tokens per pass with two candidates, and more with 24",
        _warms_up,
    ),
    Claim(
        "sam_recycling",
        "Copies and recycled candidates together are better than each alone.",
        "not below the better part by more than 2 %, at an equal budget",
        _both_are_better,
    ),
    Claim(
        "rest",
        "A larger datastore gives more tokens per pass.",
        "they do not fall by more than 1 % from a quarter to all of the datastore, and rise by at least 5 %",
        _larger_datastore,
    ),
    Claim(
        "phrases",
        "Phrases found by their hidden state continue a text over several tokens.",
        "above 1.1 tokens per pass, and at least 30 % of the accepted tokens lie behind a phrase's first",
        _phrases,
    ),
)
