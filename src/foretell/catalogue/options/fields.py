"""Options that several methods have, with their bounds and descriptions."""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field


def aliases(*choices: str) -> Any:
    """The name of an option, then its aliases."""
    return AliasChoices(*choices)


ChainLength = Annotated[int, Field(ge=0, le=256, description="Most tokens of a draft chain.")]
TrieNodes = Annotated[int, Field(ge=0, le=256, description="Most nodes of the trie of retrieved continuations.")]
TreeNodes = Annotated[
    int,
    Field(
        ge=1,
        le=1024,
        description="Most nodes of the draft tree.",
        validation_alias=aliases("num_draft_tokens", "num_speculative_tokens", "speculative_num_draft_tokens"),
    ),
]
WindowSize = Annotated[
    int,
    Field(
        ge=1,
        le=64,
        description="Positions in the window of one pass.",
        validation_alias=aliases("max_window_size", "num_speculative_tokens"),
    ),
]
Depth = Annotated[
    int,
    Field(ge=1, description="Most levels of the tree.", validation_alias=aliases("num_steps", "speculative_num_steps")),
]
BeamWidth = Annotated[
    int | None,
    Field(
        ge=1,
        description=(
            "Nodes per level that are expanded; 1: a chain. Unset: 4, or a sixth of num_draft_tokens where that is "
            "set and larger."
        ),
        validation_alias=aliases("eagle_topk", "speculative_eagle_topk"),
    ),
]
Sampling = Literal["greedy", "probabilistic"]
DraftSampling = Annotated[
    Sampling, Field(description="Draft tokens are sampled (probabilistic) or the most probable are taken (greedy).")
]
TreeSampling = Annotated[
    Sampling,
    Field(
        description=(
            "greedy: the most probable tokens are taken and matched; probabilistic: tokens are sampled without "
            "replacement and accepted by rejection sampling."
        )
    ),
]
ChainConfidence = Annotated[
    float,
    Field(
        ge=0,
        le=1,
        description="A chain ends with the first token to which the drafter gives a smaller probability.",
        validation_alias=aliases("confidence_threshold", "assistant_confidence_threshold"),
    ),
]
TrieConfidence = Annotated[
    float, Field(ge=0, le=1, description="Tokens with a smaller estimated probability of acceptance are not proposed.")
]
NodeConfidence = Annotated[
    float,
    Field(
        ge=0,
        le=1,
        description=(
            "Nodes with a smaller path probability are left out. The default applies where num_draft_tokens is unset; "
            "otherwise it is 0."
        ),
    ),
]
Schedule = Annotated[
    Literal["constant", "adaptive"],
    Field(
        description=(
            "adaptive: the chain of a request is as long as the acceptance of its earlier ones makes worth while, at "
            "most num_speculative_tokens."
        )
    ),
]
LongestMatch = Annotated[int, Field(ge=1, description="Longest n-gram that is looked up, in tokens.")]
ShortestMatch = Annotated[int, Field(ge=1, description="Shortest match that is used, in tokens.")]
Tree = Annotated[
    list[Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]] | None,
    Field(
        description="Rank paths of a fixed tree, in the format of `medusa_choices`: [[0], [1], [0, 0]].",
        validation_alias=aliases("speculative_tree", "medusa_choices"),
    ),
]
_RATES = "Measured acceptance rate per rank; the optimal fixed tree for these rates is used."
Rates = Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=1, description=_RATES)]
OptionalRates = Annotated[list[Annotated[float, Field(ge=0, le=1)]] | None, Field(min_length=1, description=_RATES)]
TypicalEpsilon = Annotated[float, Field(gt=0, le=1, description="Epsilon of typical acceptance.")]
TypicalDelta = Annotated[
    float | None, Field(gt=0, description="Delta of typical acceptance. Unset: the square root of epsilon.")
]


VectorCount = Annotated[
    int | None, Field(ge=0, le=256, description="Most draft tokens per pass. Unset: one for each learned embedding.")
]


ExitLayer = Annotated[
    int | None,
    Field(
        ge=1,
        description="Number of the target's first blocks that draft. Unset: a third of them; with fitted exits, those "
        "that promise most.",
        validation_alias=aliases("exit_layer", "assistant_early_exit"),
    ),
]
