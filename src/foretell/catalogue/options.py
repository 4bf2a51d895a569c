"""The options of the methods: one pydantic model per method, with the default values.

Options have the names of vLLM's `speculative_config` where it has them, else those of SGLang (trees), TensorRT-LLM
(lookahead), Medusa (typical acceptance) or Hugging Face (schedules). Other names are aliases.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from foretell.utils.validation import explain


class MethodOptions(BaseModel):
    """The options of a method; this class has none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def from_values(cls, method: str, values: Mapping[str, object]) -> Self:
        """Validate option values by name for the method of this name.

        Raises:
            ValueError: an option that the method does not have (the message lists those it has), one option under two
                names, or an invalid value.
        """
        seen: dict[str, str] = {}
        for key in values:
            option = next((name for name, field in cls.model_fields.items() if key in option_names(name, field)), None)
            if option is None:
                raise cls._unknown_option(method, key)
            if option in seen:
                raise ValueError(f"method {method}: {seen[option]} and {key} are one option; give one of them")
            seen[option] = key
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            separator = ", " if error.errors()[0]["loc"] else ": "
            raise ValueError(f"method {method}{separator}{explain(error)}") from error

    @classmethod
    def _unknown_option(cls, method: str, key: str) -> ValueError:
        if not cls.model_fields:
            return ValueError(f"method {method} does not read {key!r}: it has no options")
        known = [s for name, field in cls.model_fields.items() for s in option_names(name, field)]
        near = get_close_matches(key, known, n=1, cutoff=0.6)
        hint = f": did you mean {near[0]!r}? It" if near else "; it"
        return ValueError(f"method {method} does not read {key!r}{hint} reads: {', '.join(cls.model_fields)}")

    def is_set(self, name: str) -> bool:
        """Whether the user has set this option."""
        return name in self.model_fields_set


def option_names(name: str, field: FieldInfo) -> list[str]:
    """The name of an option, then its aliases."""
    alias = field.validation_alias
    return [str(c) for c in alias.choices] if isinstance(alias, AliasChoices) else [name]


def _aliases(*choices: str) -> Any:
    return AliasChoices(*choices)


ChainLength = Annotated[int, Field(ge=0, le=256, description="Most tokens of a draft chain.")]
TrieNodes = Annotated[int, Field(ge=0, le=256, description="Most nodes of the trie of retrieved continuations.")]
TreeNodes = Annotated[
    int,
    Field(
        ge=1,
        le=1024,
        description="Most nodes of the draft tree.",
        validation_alias=_aliases("num_draft_tokens", "num_speculative_tokens", "speculative_num_draft_tokens"),
    ),
]
WindowSize = Annotated[
    int,
    Field(
        ge=1,
        le=64,
        description="Positions in the window of one pass.",
        validation_alias=_aliases("max_window_size", "num_speculative_tokens"),
    ),
]
Depth = Annotated[
    int,
    Field(
        ge=1, description="Most levels of the tree.", validation_alias=_aliases("num_steps", "speculative_num_steps")
    ),
]
BeamWidth = Annotated[
    int | None,
    Field(
        ge=1,
        description=(
            "Nodes per level that are expanded; 1: a chain. Unset: 4, or a sixth of num_draft_tokens where that is "
            "set and larger."
        ),
        validation_alias=_aliases("eagle_topk", "speculative_eagle_topk"),
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
        validation_alias=_aliases("confidence_threshold", "assistant_confidence_threshold"),
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
    Literal["constant", "heuristic", "threshold"],
    Field(
        description=(
            "How the chain adapts per request. heuristic: 2 tokens more after a fully accepted chain, 1 fewer after "
            "any other (Hugging Face). threshold: confidence_threshold is adjusted towards an acceptance rate of 0.9 "
            "(Draft & Verify)."
        )
    ),
]
LongestMatch = Annotated[int, Field(ge=1, description="Longest n-gram that is looked up, in tokens.")]
ShortestMatch = Annotated[int, Field(ge=1, description="Shortest match that is used, in tokens.")]
Tree = Annotated[
    list[Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]] | None,
    Field(
        description="Rank paths of a fixed tree, in the format of `medusa_choices`: [[0], [1], [0, 0]].",
        validation_alias=_aliases("speculative_tree", "medusa_choices"),
    ),
]
_RATES = "Measured acceptance rate per rank; the optimal fixed tree for these rates is used."
Rates = Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=1, description=_RATES)]
OptionalRates = Annotated[list[Annotated[float, Field(ge=0, le=1)]] | None, Field(min_length=1, description=_RATES)]
TypicalEpsilon = Annotated[float, Field(gt=0, le=1, description="Epsilon of typical acceptance.")]
TypicalDelta = Annotated[
    float | None, Field(gt=0, description="Delta of typical acceptance. Unset: the square root of epsilon.")
]


_TREE_SIZES = (
    "num_draft_tokens",
    "num_speculative_tokens",
    "num_steps",
    "eagle_topk",
    "acceptance",
    "confidence_threshold",
)


class FixedTreeOptions(MethodOptions):
    """A fixed tree, by its paths or by acceptance rates."""

    acceptance: OptionalRates = None
    speculative_tree: Tree = None

    @model_validator(mode="after")
    def _one_tree(self) -> Self:
        if self.speculative_tree is not None:
            self._reject("speculative_tree names every node of the tree", *_TREE_SIZES)
        return self

    def _reject(self, reason: str, *names: str) -> None:
        unread = [name for name in names if self.is_set(name)]
        if unread:
            raise ValueError(f"{reason}, so {' and '.join(unread)} would not be read: leave that out")


class RejectionOptions(MethodOptions):
    """How sampled drafts are accepted."""

    rejection_sample_method: Annotated[
        Literal["standard", "block"], Field(description="Rejection sampling token by token, or block verification.")
    ] = "standard"


class ChainOptions(MethodOptions):
    """A draft chain."""

    num_speculative_tokens: ChainLength = 5
    confidence_threshold: ChainConfidence = 0.0
    draft_sample_method: DraftSampling = "probabilistic"
    num_assistant_tokens_schedule: Schedule = "constant"


class DraftModelOptions(ChainOptions, RejectionOptions):
    """A chain of a draft model with rejection sampling."""


class TrieOptions(MethodOptions):
    """A trie of retrieved continuations."""

    num_speculative_tokens: TrieNodes = 8
    confidence_threshold: TrieConfidence = 0.1


class NgramOptions(TrieOptions):
    """Prompt lookup."""

    num_speculative_tokens: TrieNodes = 10
    prompt_lookup_max: LongestMatch = 3
    prompt_lookup_min: ShortestMatch = 1


class LlmaOptions(NgramOptions):
    """LLMA: prompt lookup in references."""

    num_speculative_tokens: TrieNodes = 15
    confidence_threshold: TrieConfidence = 0.0
    prompt_lookup_max: LongestMatch = 5


class SuffixOptions(TrieOptions):
    """The longest suffix match."""

    prompt_lookup_min: ShortestMatch = 1


class RecyclingOptions(TrieOptions):
    """Token recycling."""

    confidence_threshold: TrieConfidence = 0.06


class SamRecyclingOptions(TrieOptions):
    """Suffix matches and token recycling."""

    num_speculative_tokens: TrieNodes = 7


class PhraseOptions(TrieOptions):
    """Phrase retrieval by hidden state."""

    num_speculative_tokens: TrieNodes = 16
    confidence_threshold: TrieConfidence = 0.04


class RestOptions(PhraseOptions):
    """REST: a datastore."""

    datastore: Annotated[
        str | None,
        Field(
            description="Directory written by `foretell datastore build`. Unset: the --reference documents are indexed."
        ),
    ] = None
    prompt_lookup_max: Annotated[
        int | None,
        Field(
            ge=1,
            description="Longest match that is looked up, in tokens. Unset: the depth of the datastore, 16 by default.",
        ),
    ] = None
    prompt_lookup_min: ShortestMatch = 2


PassTimes = Annotated[
    dict[int, Annotated[float, Field(gt=0)]] | None,
    Field(description="Seconds of a target pass by its number of tokens. Unset: measured while decoding."),
]


class HybridOptions(MethodOptions):
    """A trie of retrieved continuations of the most profitable size."""

    num_draft_tokens: TreeNodes = 24
    pass_cost: PassTimes = None


class LookaheadOptions(MethodOptions):
    """Lookahead decoding, with TensorRT-LLM's names."""

    max_window_size: Annotated[int, Field(ge=1, le=64, description="Columns of the window (W).")] = 7
    max_ngram_size: Annotated[int, Field(ge=2, le=32, description="Tokens of an n-gram (N).")] = 5
    max_verification_set_size: Annotated[
        int | None, Field(ge=0, le=64, description="Most n-grams verified per pass (G). Unset: as many as columns.")
    ] = None
    num_speculative_tokens: Annotated[
        int | None, Field(ge=0, le=256, description="Most nodes of the trie of verified n-grams. Unset: G (N - 1).")
    ] = None
    confidence_threshold: TrieConfidence = 0.0


class JacobiOptions(MethodOptions):
    """Jacobi decoding."""

    max_window_size: WindowSize = 8
    confidence_threshold: TrieConfidence = 0.0


class GaussSeidelJacobiOptions(JacobiOptions):
    """Jacobi decoding with one block after another."""

    max_window_size: WindowSize = 3


VectorCount = Annotated[
    int | None, Field(ge=0, le=256, description="Most draft tokens per pass. Unset: one for each learned embedding.")
]


class LookAheadEmbeddingsOptions(DraftModelOptions):
    """PaSS: look-ahead embeddings."""

    num_speculative_tokens: VectorCount = None  # type: ignore[assignment]
    look_ahead_groups: Annotated[
        int,
        Field(
            ge=0,
            description=(
                "Nodes of the draft tree that get look-ahead embeddings; 0: every second pass reads only look-ahead "
                "embeddings, as in the paper."
            ),
        ),
    ] = 2


class SelfDraftOptions(DraftModelOptions):
    """A chain of a cheaper version of the target."""

    num_speculative_tokens: ChainLength = 4
    confidence_threshold: ChainConfidence = 0.4


ExitLayer = Annotated[
    int | None,
    Field(
        ge=1,
        description="Number of the target's first blocks that draft. Unset: a third of them.",
        validation_alias=_aliases("exit_layer", "assistant_early_exit"),
    ),
]


class LayerSkipOptions(SelfDraftOptions):
    """The target's first blocks."""

    exit_layer: ExitLayer = None


class SelfSpeculativeOptions(RejectionOptions):
    """The target without some sub-layers."""

    num_speculative_tokens: ChainLength = 8
    confidence_threshold: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description=(
                "A chain ends with the first token to which the drafter gives a smaller probability; adjusted per "
                "request towards an acceptance rate of 0.9."
            ),
        ),
    ] = 0.8
    draft_sample_method: DraftSampling = "probabilistic"
    skip_set: Annotated[
        str | None,
        Field(
            description=(
                "File written by `foretell tune skip` with the sub-layers to leave out. Unset: the attention of every "
                "second middle block."
            )
        ),
    ] = None


class QuantisedDraftOptions(SelfDraftOptions):
    """The quantised target."""

    quantization_bits: Annotated[
        int, Field(ge=2, le=8, description="Bits of the draft's weights; fewer than 8 are simulated.")
    ] = 8
    quantization_group: Annotated[
        int, Field(ge=0, description="Input columns that share a scale in a simulated quantisation; 0: all.")
    ] = 64


class PrunedDraftOptions(SelfDraftOptions):
    """The target without some blocks."""

    pruned_layers: Annotated[
        int | None,
        Field(ge=0, description="Blocks to leave out, least influential first. Unset: a quarter of them."),
    ] = None
    sparsity: Annotated[
        float, Field(ge=0, le=1, description="Share of the drafter's weights that are set to zero.")
    ] = 0.0


class UniversalDraftOptions(MethodOptions):
    """A draft model with another tokenizer."""

    num_speculative_tokens: Annotated[
        int, Field(ge=1, le=256, description="Most draft tokens, in tokens of the draft model.")
    ] = 6
    confidence_threshold: ChainConfidence = 0.3


class LLMCadOptions(MethodOptions):
    """LLMCad's tree."""

    num_draft_tokens: TreeNodes = 16
    confidence_threshold: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description=(
                "Drafting ends where the best path has a smaller probability; halved after a step in which every draft "
                "was right, raised after any other."
            ),
        ),
    ] = 0.01


class SpecInferOptions(MethodOptions):
    """A tree with fixed branching."""

    num_draft_tokens: Annotated[
        int,
        Field(
            ge=1,
            le=256,
            description="Most nodes of the tree, whose levels branch by 2, 2, 1, 1 and so on.",
            validation_alias=_aliases("num_draft_tokens", "num_speculative_tokens", "speculative_num_draft_tokens"),
        ),
    ] = 10


class SpecTrOptions(MethodOptions):
    """Independent chains."""

    eagle_topk: Annotated[
        int,
        Field(
            ge=1,
            description="Independent chains (k).",
            validation_alias=_aliases("eagle_topk", "speculative_eagle_topk"),
        ),
    ] = 4
    num_steps: Annotated[
        int,
        Field(
            ge=1,
            le=256,
            description="Tokens of each chain.",
            validation_alias=_aliases("num_steps", "num_speculative_tokens", "speculative_num_steps"),
        ),
    ] = 4


class SequoiaOptions(FixedTreeOptions):
    """The optimal fixed tree for its number of nodes."""

    num_draft_tokens: TreeNodes = 16
    num_steps: Depth = 6
    acceptance: Rates = [0.6, 0.15, 0.07, 0.04, 0.025, 0.02, 0.015, 0.01]
    draft_sample_method: TreeSampling = "greedy"


class BeamOptions(MethodOptions):
    """A dynamic tree: nodes are expanded where the drafter is confident."""

    num_draft_tokens: TreeNodes = 16
    eagle_topk: BeamWidth = None
    confidence_threshold: NodeConfidence = 0.01


class DynamicTreeOptions(BeamOptions):
    """A dynamic tree of a draft model."""

    num_steps: Depth = 5


class OnlineOptions(MethodOptions):
    """A draft model that keeps learning."""

    num_speculative_tokens: ChainLength = 5
    confidence_threshold: ChainConfidence = 0.0
    online_update_interval: Annotated[
        int, Field(ge=0, description="Requests between two optimiser steps; 0: no learning.")
    ] = 8
    online_buffer: Annotated[int, Field(ge=1, description="Most corrections kept to learn from.")] = 2048
    online_learning_rate: Annotated[float, Field(gt=0, description="Learning rate of AdamW, constant.")] = 1e-4


class MedusaOptions(FixedTreeOptions):
    """The fixed tree of heads; by default the nodes that training measured as the most often accepted."""

    num_draft_tokens: TreeNodes = 8


class BlockwiseOptions(FixedTreeOptions):
    """A chain of heads, or a tree where an option asks for one."""

    num_speculative_tokens: Annotated[
        int | None, Field(ge=0, le=256, description="Most tokens of the chain. Unset: one for each head.")
    ] = None
    num_draft_tokens: Annotated[
        int | None, Field(ge=1, le=1024, description="Nodes of a tree, which replaces the chain.")
    ] = None

    @property
    def is_tree(self) -> bool:
        """Whether an option asks for a tree."""
        return any(v is not None for v in (self.num_draft_tokens, self.acceptance, self.speculative_tree))

    @model_validator(mode="after")
    def _chain_or_tree(self) -> Self:
        if self.is_tree:
            self._reject("a tree was asked for, whose size is num_draft_tokens", "num_speculative_tokens")
        return self


class FeatureTreeOptions(BeamOptions, FixedTreeOptions):
    """A tree of a feature-level drafter."""

    num_draft_tokens: Annotated[
        int,
        Field(
            ge=1,
            le=1024,
            description=(
                "Most nodes of the draft tree. Unset, and confidence_threshold as well: as many as pay on this "
                "machine, at most 64; a fixed tree has 12."
            ),
            validation_alias=_aliases("num_draft_tokens", "num_speculative_tokens", "speculative_num_draft_tokens"),
        ),
    ] = 12
    confidence_threshold: NodeConfidence = 0.07
    draft_sample_method: TreeSampling = "greedy"

    _sampled_chain_options: ClassVar[tuple[str, ...]] = ("confidence_threshold",)
    """Options that a sampled chain reads and a sampled tree does not."""

    @model_validator(mode="after")
    def _fixed_or_dynamic(self) -> Self:
        if self.acceptance is not None:
            self._reject("acceptance asks for a fixed tree", "eagle_topk", "confidence_threshold")
        elif self.draft_sample_method == "probabilistic" and self.eagle_topk != 1:
            self._reject(
                "only a chain (eagle_topk 1) or a fixed tree can be sampled", "eagle_topk", *self._sampled_chain_options
            )
        return self


class MLPSpeculatorOptions(FeatureTreeOptions):
    """A tree of an MLP speculator; sampled drafts form a chain unless the tree is fixed."""

    _sampled_chain_options = ()

    num_steps: Annotated[
        int | None,
        Field(
            ge=1,
            description="Most levels of the tree. Unset: one for each stage.",
            validation_alias=_aliases("num_steps", "speculative_num_steps"),
        ),
    ] = None


class EagleTreeOptions(FeatureTreeOptions):
    """EAGLE-2's and EAGLE-3's tree."""

    num_steps: Annotated[
        int | None,
        Field(
            ge=1,
            description=(
                "Most levels of the tree. Unset: 8; where num_draft_tokens is set, 5 and one more for every 30 nodes."
            ),
            validation_alias=_aliases("num_steps", "speculative_num_steps"),
        ),
    ] = None


class EagleOptions(FixedTreeOptions):
    """EAGLE-1's fixed tree."""

    num_draft_tokens: Annotated[
        int | None,
        Field(
            ge=1,
            le=1024,
            description="Nodes of the optimal fixed tree. Unset: the paper's tree of 25 nodes.",
            validation_alias=_aliases("num_draft_tokens", "num_speculative_tokens", "speculative_num_draft_tokens"),
        ),
    ] = None
    eagle_topk: Annotated[
        Literal[1] | None,
        Field(description="1: a chain.", validation_alias=_aliases("eagle_topk", "speculative_eagle_topk")),
    ] = None
    num_steps: Depth = 5
    draft_sample_method: TreeSampling = "greedy"


class HybridModelOptions(HybridOptions):
    """Retrieved continuations, and the options of the drafter beside them."""

    num_draft_tokens: Annotated[
        int, Field(ge=1, le=1024, description="Most nodes of the trie of retrieved continuations.")
    ] = 24
    num_speculative_tokens: Annotated[
        int | None,
        Field(ge=1, le=256, description="Draft tokens of the drafter. Unset: its own default; 5 for a draft model."),
    ] = None
    confidence_threshold: Annotated[
        float | None,
        Field(ge=0, le=1, description="Option of the drafter. Unset: its own default; 0.4 for a draft model."),
    ] = None
    eagle_topk: Annotated[int | None, Field(ge=1, description="Option of the drafter, where it has it.")] = None
    num_steps: Annotated[int | None, Field(ge=1, description="Option of the drafter, where it has it.")] = None
    acceptance: OptionalRates = None
    speculative_tree: Tree = None
    exit_layer: ExitLayer = None


class LenienceOptions(ChainOptions):
    """Rejection sampling with lenience."""

    lenience: Annotated[
        float,
        Field(gt=0, le=1, description="Factor on the draft's probability in the rejection test; 1: the exact test."),
    ] = 0.5


class TypicalOptions(ChainOptions):
    """Typical acceptance of a chain."""

    posterior_threshold: TypicalEpsilon = 0.09
    posterior_alpha: TypicalDelta = None


class MedusaTypicalOptions(MedusaOptions):
    """Typical acceptance of the tree of heads."""

    posterior_threshold: TypicalEpsilon = 0.09
    posterior_alpha: TypicalDelta = None


class BlockwiseLossyOptions(MethodOptions):
    """The approximate criteria of blockwise parallel decoding."""

    num_speculative_tokens: ChainLength = 5
    accept_top_k: Annotated[
        int, Field(ge=1, description="Drafts among this number of most probable tokens of the target are accepted.")
    ] = 2
    accept_distance: Annotated[
        int | None,
        Field(
            ge=0,
            description="In place of accept_top_k: drafts with a token id this close to the best token's are accepted.",
        ),
    ] = None
    minimum_block: Annotated[int, Field(ge=1, description="Least number of tokens per pass.")] = 1

    @model_validator(mode="after")
    def _one_criterion(self) -> Self:
        if self.is_set("accept_top_k") and self.accept_distance is not None:
            raise ValueError("accept_top_k and accept_distance are two criteria; give one of them")
        return self


class BiLDOptions(MethodOptions):
    """Big Little Decoder."""

    num_speculative_tokens: ChainLength = 10
    fallback_threshold: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="The chain ends where the most probable token of the draft model has a smaller probability.",
        ),
    ] = 0.6
    rollback_threshold: Annotated[
        float,
        Field(
            ge=0,
            description="Drafts whose negative log-probability under the target is at most this (nats) are accepted.",
        ),
    ] = 5.0
