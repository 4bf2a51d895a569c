"""Claims about methods that combine drafters."""

from collections.abc import Mapping

from foretell.lab.reproduce.claim import Claim, Finding, Series
from foretell.lab.reproduce.lab import COPY, Lab


def _better_than_its_parts(
    lab: Lab,
    method: str,
    options: Mapping[str, object],
    parts: Mapping[str, Mapping[str, object]],
    pass_seconds: Mapping[int, float] | None = None,
) -> Finding:
    prompts = (*COPY, *lab.free)
    values = {
        m: lab.run(m, o, prompts=prompts, pass_seconds=pass_seconds).tokens_per_pass
        for m, o in (*parts.items(), (method, options))
    }
    return Finding(
        values[method] >= 0.98 * max(values[m] for m in parts),
        ", ".join(f"{m} {v:.2f}" for m, v in values.items()) + " tokens per pass",
        (Series.of("tokens per pass", list(enumerate(values.values()))),),
        ", ".join(f"{i}: {m}" for i, m in enumerate(values)),
    )


def _costs(share: float, first: float = 0.01) -> dict[int, float]:
    """Seconds of passes over 1 to 64 tokens, where each further token takes a share of the first one's time."""
    return {n: first * (1 + share * (n - 1)) for n in range(1, 65)}


_NODES = 16
"""Nodes of the speculator's trees."""
_SLOW_PASSES = _costs(0.001, 1.0)
"""Passes beside which drafting takes no time, so that tokens per pass are what counts and no time of this machine."""


def _spends_less(lab: Lab) -> Finding:
    prompts = (*COPY, *lab.free)
    cheap, dear = (lab.run("hybrid", prompts=prompts, pass_seconds=_costs(share)) for share in (0.01, 0.5))
    return Finding(
        dear.drafted / dear.passes < cheap.drafted / cheap.passes,
        f"{cheap.drafted / cheap.passes:.1f} drafts per pass where a further token costs a hundredth of a pass, "
        f"{dear.drafted / dear.passes:.1f} where it costs half of one",
        (Series.of("drafts per pass", [(0.01, cheap.drafted / cheap.passes), (0.5, dear.drafted / dear.passes)]),),
        "cost of a further token, passes",
        "drafts per pass",
    )


CLAIMS = (
    Claim(
        "hybrid",
        "Drafts sized by their cost are fewer where a further token is dear.",
        "fewer drafts per pass at a cost of 0.5 than of 0.01",
        _spends_less,
    ),
    Claim(
        "hybrid_model",
        "Copies and a speculator together are not worse than either alone, on copied and on free text.",
        f"not below the better part by more than 2 % where drafts cost nothing, with {_NODES} nodes of the speculator",
        lambda lab: _better_than_its_parts(
            lab,
            "hybrid_model",
            {"num_speculative_tokens": _NODES},
            {"sam_recycling": {}, "eagle3": {"num_draft_tokens": _NODES}},
            _SLOW_PASSES,
        ),
    ),
    Claim(
        "auto",
        "The default finds the drafters that a model has, and is not worse than copies alone.",
        "not below `sam_recycling` by more than 2 %",
        lambda lab: _better_than_its_parts(lab, "auto", {}, {"sam_recycling": {}}),
    ),
)
