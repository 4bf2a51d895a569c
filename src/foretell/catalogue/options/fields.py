"""Options that several methods have, with their bounds and descriptions."""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field


def option(description: str, *names: str, **bounds: Any) -> Any:
    """An option with its description and bounds; `names`: its name and its aliases, if it has any."""
    alias: dict[str, Any] = {"validation_alias": AliasChoices(*names)} if names else {}
    return Field(description=description, **alias, **bounds)


NODES = ("num_draft_tokens", "num_speculative_tokens", "speculative_num_draft_tokens")
STEPS = ("num_steps", "speculative_num_steps")
TOP_K = ("eagle_topk", "speculative_eagle_topk")
"""Names of an option, its aliases after the first."""
ChainLength = Annotated[int, option("Most tokens of a draft chain.", ge=0, le=256)]
TrieNodes = Annotated[int, option("Most nodes of the trie of retrieved continuations.", ge=0, le=256)]
TreeNodes = Annotated[int, option("Most nodes of the draft tree.", *NODES, ge=1, le=1024)]
WindowSize = Annotated[
    int, option("Positions in the window of one pass.", "max_window_size", "num_speculative_tokens", ge=1, le=64)
]
Depth = Annotated[int, option("Most levels of the tree.", *STEPS, ge=1)]
BeamWidth = Annotated[
    int | None,
    option(
        "Nodes per level that are expanded; 1: a chain. Unset: 4, or a sixth of num_draft_tokens where that is "
        "set and larger.",
        *TOP_K,
        ge=1,
    ),
]
Sampling = Literal["greedy", "probabilistic"]
DraftSampling = Annotated[
    Sampling, option("Draft tokens are sampled (probabilistic) or the most probable are taken (greedy).")
]
TreeSampling = Annotated[
    Sampling,
    option(
        "greedy: the most probable tokens are taken and matched; probabilistic: tokens are sampled without "
        "replacement and accepted by rejection sampling."
    ),
]
ChainConfidence = Annotated[
    float,
    option(
        "A chain ends with the first token to which the drafter gives a smaller probability.",
        "confidence_threshold",
        "assistant_confidence_threshold",
        ge=0,
        le=1,
    ),
]
TrieConfidence = Annotated[
    float, option("Tokens with a smaller estimated probability of acceptance are not proposed.", ge=0, le=1)
]
NodeConfidence = Annotated[
    float,
    option(
        "Nodes with a smaller path probability are left out. The default applies where num_draft_tokens is unset; "
        "otherwise it is 0.",
        ge=0,
        le=1,
    ),
]
Schedule = Annotated[
    Literal["constant", "adaptive"],
    option(
        "adaptive: the chain of a request is as long as the acceptance of its earlier ones makes worth while, at "
        "most num_speculative_tokens."
    ),
]
LongestMatch = Annotated[int, option("Longest n-gram that is looked up, in tokens.", ge=1)]
ShortestMatch = Annotated[int, option("Shortest match that is used, in tokens.", ge=1)]
Tree = Annotated[
    list[Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]] | None,
    option(
        "Rank paths of a fixed tree, in the format of `medusa_choices`: [[0], [1], [0, 0]].",
        "speculative_tree",
        "medusa_choices",
    ),
]
_RATES = "Measured acceptance rate per rank; the optimal fixed tree for these rates is used."
Rates = Annotated[list[Annotated[float, Field(ge=0, le=1)]], option(_RATES, min_length=1)]
OptionalRates = Annotated[list[Annotated[float, Field(ge=0, le=1)]] | None, option(_RATES, min_length=1)]
TypicalEpsilon = Annotated[float, option("Epsilon of typical acceptance.", gt=0, le=1)]
TypicalDelta = Annotated[float | None, option("Delta of typical acceptance. Unset: the square root of epsilon.", gt=0)]


VectorCount = Annotated[
    int | None, option("Most draft tokens per pass. Unset: one for each learned embedding.", ge=0, le=256)
]


ExitLayer = Annotated[
    int | None,
    option(
        "Number of the target's first blocks that draft. Unset: a third of them; with fitted exits, those "
        "that promise most.",
        "exit_layer",
        "assistant_early_exit",
        ge=1,
    ),
]
