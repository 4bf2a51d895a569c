"""Claims about trained speculators."""

from collections.abc import Sequence
from functools import partial

from foretell.lab.reproduce.claim import Claim, Finding, Series, percent, rises
from foretell.lab.reproduce.lab import Lab

_FIXED = {"confidence_threshold": 0.0}
"""Trees of exactly the number of nodes that is asked for."""
_BLOCK_NODES = 60
"""Nodes of a tree of a block's predictions, which take one pass of the drafter however many they are."""
_CHAIN = [[0] * depth for depth in range(1, 6)]
"""A tree without branches, five drafts deep."""


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
        f"mean blocks of {', '.join(f'{v:.2f}' for v in values)} tokens with one, two and three heads: each head "
        f"adds less",
        (Series.of("blockwise", points),),
        "heads",
        "mean accepted block, tokens",
    )


def _by_depth(rates: Sequence[float]) -> str:
    return f"of the drafts reached at depths 1 to {len(rates)}, {', '.join(map(percent, rates))} are accepted"


def _steady_acceptance(lab: Lab) -> Finding:
    run = lab.run("eagle3", {**_FIXED, "num_draft_tokens": 12, "eagle_topk": 1, "num_steps": 6})
    rates = [run.conditional_acceptance(d) for d in range(1, 6)]
    return Finding(
        min(rates[1:]) >= 0.9 * rates[0],
        _by_depth(rates),
        (Series.of("eagle3", list(enumerate(rates, 1))),),
        "depth of the draft",
        "share accepted of those reached",
        "Later drafts read the drafter's own outputs for more steps than it was trained on, or the answers are too few "
        "and too short to tell.",
    )


def _grows_with_tree(lab: Lab) -> Finding:
    points = [(n, lab.run("eagle3", {**_FIXED, "num_draft_tokens": n}).tokens_per_pass) for n in (4, 8, 16, 32, 60)]
    values = [y for _, y in points]
    return Finding(
        rises(values, 0.0) and values[-1] >= 1.25 * values[0],
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
        f"at depth 2, {percent(rates[0][1])} of the reached drafts are accepted, {percent(rates[1][1])} with heads "
        f"that do "
        f"not know the first; {stages.tokens_per_pass:.2f} against {heads.tokens_per_pass:.2f} tokens per pass",
        (
            Series.of("stages that read the token before", list(enumerate(rates[0], 1))),
            Series.of("independent heads", list(enumerate(rates[1], 1))),
        ),
        "depth of the draft",
        "share accepted of those reached",
    )


def _features(lab: Lab) -> Finding:
    run = lab.run("eagle", {"speculative_tree": _CHAIN})
    rates = [run.conditional_acceptance(d) for d in (1, 2, 3, 4)]
    return Finding(
        rates[0] > 0 and min(rates[1:]) >= 0.7 * rates[0],
        _by_depth(rates),
        (Series.of("eagle", list(enumerate(rates, 1))),),
        "depth of the draft",
        "share accepted of those reached",
        "The drafter reads its own estimates of the features, whose errors add up; they are learned slowly.",
    )


def _dynamic_features(lab: Lab) -> Finding:
    dynamic = lab.run("eagle2", {**_FIXED, "num_draft_tokens": 16}).tokens_per_pass
    fixed = lab.run("eagle", {"num_draft_tokens": 16}).tokens_per_pass
    return Finding(
        dynamic >= fixed,
        f"{dynamic:.2f} tokens per pass with dynamic trees of 16 nodes, {fixed:.2f} with a fixed one",
        (Series.of("tokens per pass", [(0, fixed), (1, dynamic)]),),
        "0: fixed tree, 1: dynamic tree",
        reason="Dynamic trees follow the drafter's own probabilities, which are not right yet after a short training.",
    )


def _layer_of_the_checkpoint(lab: Lab) -> Finding:
    run = lab.run("mtp", {**_FIXED, "num_draft_tokens": 1})
    return Finding(
        run.acceptance >= 0.7,
        f"the second token is accepted in {percent(run.acceptance)} of the passes",
        (Series.of("mtp", [(1, run.acceptance)]),),
        "depth of the draft",
        "share of accepted drafts",
    )


def _look_ahead(lab: Lab) -> Finding:
    run = lab.run("pass")
    return Finding(
        run.tokens_per_pass > 1.2,
        f"{run.tokens_per_pass:.2f} tokens per pass, the look-ahead's own passes not counted",
        (Series.of("pass", run.accepted_by_depth),),
        "depth of the draft",
        "passes that accept",
        "The embeddings are all that is trained: a few thousand numbers in front of a frozen model.",
    )


def _block_in_one_pass(lab: Lab, method: str, least: float = 1.5) -> Finding:
    run = lab.run(method, {**_FIXED, "num_draft_tokens": _BLOCK_NODES})
    deep = sum(run.accepted_per_position[1:]) / max(1, sum(run.accepted_per_position))
    return Finding(
        run.tokens_per_pass > least and deep >= 0.3,
        f"{run.tokens_per_pass:.2f} tokens per pass; {percent(deep)} of the accepted tokens stand behind the first of "
        "their block, though all were predicted in one pass",
        (Series.of(method, run.accepted_by_depth),),
        "place in the block",
        "passes that accept",
        "Predicting several tokens at once is learned slowly; published drafters of this kind read hundreds of times "
        "as much text as one that is trained here in minutes.",
    )


def _beams(lab: Lab) -> Finding:
    points = [(n, lab.run("redrafter", {"num_beams": n}).tokens_per_pass) for n in (1, 2, 4, 8)]
    values = [y for _, y in points]
    return Finding(
        rises(values, 0.0) and values[-1] >= 1.1 * values[0],
        f"{values[0]:.2f} tokens per pass with one sequence, {values[-1]:.2f} with eight",
        (Series.of("redrafter", points),),
        "sequences of the beam",
        reason="After a short training the drafter's second-best sequences are seldom right.",
    )


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
    Claim(
        "eagle",
        "Drafting in feature space, with the token before, keeps its acceptance along the draft.",
        "acceptance at depths 2 to 4 at least 0.7 of that at depth 1",
        _features,
    ),
    Claim(
        "eagle2",
        "Dynamic trees are accepted further than fixed ones of the same drafter and size.",
        "tokens per pass not below those of the fixed tree, 16 nodes",
        _dynamic_features,
    ),
    Claim(
        "eagle3",
        "Trained on its own outputs, the drafter's acceptance does not fall along the draft, and larger trees go on "
        "gaining.",
        "acceptance at depths 2 to 5 at least 0.9 of that at depth 1; tokens per pass never fall from 4 to 60 nodes, "
        "and rise by a quarter",
        _eagle3,
    ),
    Claim(
        "mtp",
        "A multi-token prediction layer that comes with a checkpoint drafts the second token well.",
        "accepted in 70 % of the passes",
        _layer_of_the_checkpoint,
    ),
    Claim(
        "mlp_speculator",
        "Stages that read the token drafted before them are accepted more often than independent heads.",
        "higher acceptance at depth 2 and more tokens per pass, 16 drafts each",
        _knows_the_token_before,
    ),
    Claim("pass", "Look-ahead embeddings let the target draft for itself.", "above 1.2 tokens per pass", _look_ahead),
    Claim(
        "dflash",
        "A network that reads the target's features drafts a whole block in one pass.",
        f"above 1.5 tokens per pass with {_BLOCK_NODES} drafts, and 30 % of the accepted tokens stand behind the first "
        "of their block",
        partial(_block_in_one_pass, method="dflash"),
    ),
    Claim(
        "p_eagle",
        "EAGLE's layers draft several tokens in one pass, where masks stand for the tokens between.",
        f"above 1.5 tokens per pass with {_BLOCK_NODES} drafts, and 30 % of the accepted tokens stand behind the first "
        "of their block",
        partial(_block_in_one_pass, method="p_eagle"),
    ),
    Claim(
        "redrafter",
        "Wider beams of a recurrent drafter are accepted further.",
        "tokens per pass never fall over 1, 2, 4 and 8 sequences, and eight give 10 % more than one",
        _beams,
    ),
    Claim(
        "pard",
        "A draft model with mask tokens drafts several tokens in one pass.",
        f"above 1.3 tokens per pass with {_BLOCK_NODES} drafts, and 30 % of the accepted tokens stand behind the first "
        "of their draft",
        partial(_block_in_one_pass, method="pard", least=1.3),
    ),
)
