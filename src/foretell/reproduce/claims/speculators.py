"""Claims about trained speculators."""

from foretell.reproduce.claim import Claim, Finding, Series, percent, rises
from foretell.reproduce.lab import Lab

_FIXED = {"confidence_threshold": 0.0}
"""Trees of exactly the number of nodes that is asked for."""


def _tree_of_heads(lab: Lab) -> Finding:
    points = [(n, lab.run("medusa", {"num_draft_tokens": n}).tokens_per_pass) for n in (4, 16, 60)]
    chain = lab.run("blockwise").tokens_per_pass
    values = [y for _, y in points]
    return Finding(
        rises(values, 0.0) and values[-1] > chain * 1.1,
        f"a tree of 60 candidates {values[-1]:.2f} tokens per pass, of 4 {values[0]:.2f}; a chain of heads {chain:.2f}",
        (Series.of("medusa", points),),
        "drafts of the tree",
        reason="The second-best candidates of these heads are seldom right.",
    )


def _blocks(lab: Lab) -> Finding:
    points = [(k, lab.run("blockwise", {"num_speculative_tokens": k}).tokens_per_pass) for k in (1, 2, 3)]
    values = [y for _, y in points]
    gains = [b - a for a, b in zip([1.0, *values], values, strict=False)]
    return Finding(
        rises(values, 0.0) and gains[0] > gains[-1],
        f"mean blocks of {', '.join(f'{v:.2f}' for v in values)} tokens with one, two and three heads: each head adds less",
        (Series.of("blockwise", points),),
        "heads",
        "mean accepted block, tokens",
    )


def _steady_acceptance(lab: Lab) -> Finding:
    run = lab.run("eagle3", {**_FIXED, "num_draft_tokens": 12, "eagle_topk": 1, "num_steps": 6})
    rates = [run.conditional_acceptance(d) for d in range(1, 6)]
    return Finding(
        min(rates[1:]) >= 0.9 * rates[0],
        f"of the drafts that are reached, {percent(rates[0])} are accepted at depth 1 and {percent(rates[-1])} at depth 5",
        (Series.of("eagle3", list(enumerate(rates, 1))),),
        "depth of the draft",
        "share accepted of those reached",
        "Later drafts read the drafter's own outputs for more steps than it was trained on.",
    )


def _grows_with_tree(lab: Lab) -> Finding:
    points = [(n, lab.run("eagle3", {**_FIXED, "num_draft_tokens": n}).tokens_per_pass) for n in (4, 8, 16, 32, 60)]
    values = [y for _, y in points]
    return Finding(
        rises(values, 0.0) and values[-1] >= 3,
        f"{values[0]:.2f} tokens per pass with 4 nodes, {values[-1]:.2f} with 60",
        (Series.of("eagle3", points),),
        "nodes of the tree",
    )


def _eagle3(lab: Lab) -> Finding:
    steady, grows = _steady_acceptance(lab), _grows_with_tree(lab)
    return Finding(
        steady.holds and grows.holds,
        f"{steady.summary}; {grows.summary}",
        grows.series,
        grows.x,
        reason=steady.reason if not steady.holds else "",
    )


def _knows_the_token_before(lab: Lab) -> Finding:
    stages = lab.run("mlp_speculator", {**_FIXED, "num_draft_tokens": 16})
    heads = lab.run("medusa", {"num_draft_tokens": 16})
    rates = [[r.conditional_acceptance(d) for d in (1, 2, 3)] for r in (stages, heads)]
    return Finding(
        rates[0][1] > rates[1][1] and stages.tokens_per_pass > heads.tokens_per_pass,
        f"at depth 2, {percent(rates[0][1])} of the reached drafts are accepted, {percent(rates[1][1])} with heads that do "
        f"not know the first; {stages.tokens_per_pass:.2f} against {heads.tokens_per_pass:.2f} tokens per pass",
        (
            Series.of("stages that read the token before", list(enumerate(rates[0], 1))),
            Series.of("independent heads", list(enumerate(rates[1], 1))),
        ),
        "depth of the draft",
        "share accepted of those reached",
    )


_TRAIN = "No speculator of this kind ships: train one (`foretell train {}`), then name it with --draft-model."

CLAIMS = (
    Claim(
        "medusa",
        "A tree of the heads' candidates, verified in one pass, is accepted further than their single best chain.",
        "tokens per pass never fall from 4 to 60 candidates, and are above a chain by 10 %",
        _tree_of_heads,
    ),
    Claim(
        "blockwise",
        "The mean accepted block grows with the number of heads, and each adds less than the one before.",
        "never falling over one to three heads; the third adds less than the first",
        _blocks,
    ),
    Claim("eagle", "Drafting in feature space is accepted more often than by tokens alone.", "-", None, _TRAIN.format("eagle")),
    Claim("eagle2", "Dynamic trees beat fixed ones of the same drafter.", "-", None, _TRAIN.format("eagle")),
    Claim(
        "eagle3",
        "Trained on its own outputs, the drafter's acceptance does not fall along the draft, and larger trees go on gaining.",
        "acceptance at depths 2 to 5 at least 0.9 of that at depth 1; at least 3 tokens per pass with 60 nodes",
        _eagle3,
    ),
    Claim(
        "mtp",
        "A multi-token prediction layer that comes with a checkpoint drafts without further training.",
        "-",
        None,
        "No checkpoint with such a layer ships; the tests of the suite check it with random weights.",
    ),
    Claim(
        "mlp_speculator",
        "Stages that read the token drafted before them are accepted more often than independent heads.",
        "higher acceptance at depth 2 and more tokens per pass, 16 drafts each",
        _knows_the_token_before,
    ),
    Claim("pass", "Look-ahead embeddings let the target draft for itself.", "-", None, _TRAIN.format("pass")),
)
