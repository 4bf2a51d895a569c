"""The options of a method, under the names that vLLM's `--speculative-config` gave them (and SGLang's and Medusa's for trees)."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from foretell.names import unknown
from foretell.validation import parse_object, validate

_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 8}'
Count = Annotated[int, Field(ge=0, le=256)]


class SpeculativeConfig(BaseModel):
    """What a user may say about a method; anything unsaid is the method's own default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str | None = None
    model: str | None = None
    """Draft model: reference of a checkpoint; several separated by commas are mixed."""
    num_speculative_tokens: Count | None = None
    """Length of a chain, or nodes of a tree."""
    prompt_lookup_max: Annotated[int, Field(ge=1)] | None = None
    prompt_lookup_min: Annotated[int, Field(ge=1)] | None = None
    max_window_size: Annotated[int, Field(ge=1, le=64)] | None = None
    """Positions that lookahead iterates on, or a block of Jacobi decoding (this and the next two: names of TensorRT-LLM)."""
    max_ngram_size: Annotated[int, Field(ge=2, le=32)] | None = None
    max_verification_set_size: Annotated[int, Field(ge=0, le=64)] | None = None
    look_ahead_groups: Annotated[int, Field(ge=0)] | None = None
    """PaSS: nodes of a tree after which the target looks ahead; 0: it looks ahead in every other pass, as published."""
    datastore: str | None = None
    """Directory that `foretell datastore build` wrote."""
    rejection_sample_method: Literal["standard", "block"] = "standard"
    draft_sample_method: Literal["greedy", "probabilistic"] | None = None
    num_steps: Annotated[int, Field(ge=1)] | None = None
    eagle_topk: Annotated[int, Field(ge=1)] | None = None
    num_draft_tokens: Annotated[int, Field(ge=1)] | None = None
    speculative_tree: list[list[int]] | None = None
    """Rank paths of a fixed tree, as `medusa_choices` are written."""
    exit_layer: Annotated[int, Field(ge=1)] | None = None
    """Blocks of the target that draft for it (LayerSkip)."""
    skip_set: str | None = None
    """File that `foretell tune skip` wrote: the sub-layers that self-speculation leaves out."""
    quantization_bits: Annotated[int, Field(ge=2, le=8)] = 8
    """Bits of a quantised draft; fewer than 8 are simulated."""
    quantization_group: Annotated[int, Field(ge=0)] = 64
    """Inputs that share a scale in a simulated quantisation; 0: all."""
    pruned_layers: Annotated[int, Field(ge=0)] | None = None
    """Blocks that a pruned draft lacks; a quarter of them if unsaid."""
    sparsity: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the weights of a pruned draft that are zero."""
    confidence_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    """A chain stops after a token the drafter gives less than this probability; a retrieved token below it is not proposed."""
    acceptance: list[Annotated[float, Field(ge=0, le=1)]] | None = None
    """Measured acceptance per rank, for the optimal tree."""
    pass_cost: dict[int, Annotated[float, Field(gt=0)]] | None = None
    """Hybrid: seconds of a target pass by number of tokens read; learned while running if unsaid."""
    num_assistant_tokens_schedule: Literal["constant", "heuristic", "threshold"] = "constant"
    """How a chain adapts: Hugging Face's +2/-1 to its length, or Draft & Verify's moving threshold to the confidence it stops at."""
    lenience: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Lossy: a draft is refused only for what its probability exceeds the target's by more than this factor."""
    accept_top_k: Annotated[int, Field(ge=1)] = 2
    """Lossy, blockwise: how many of the target's best tokens stand."""
    accept_distance: Annotated[int, Field(ge=0)] | None = None
    """Lossy, blockwise: stand by distance in token number instead, for ordered vocabularies."""
    minimum_block: Annotated[int, Field(ge=1)] = 1
    """Lossy, blockwise: tokens that a pass decides at the least."""
    fallback_threshold: Annotated[float, Field(ge=0, le=1)] = 0.6
    """BiLD: the small model hands over where its best token has less than this probability."""
    rollback_threshold: Annotated[float, Field(ge=0)] = 5.0
    """Lossy, BiLD: a small model's token less likely than this many nats under the target is rolled back."""
    online_update_interval: Annotated[int, Field(ge=0)] = 8
    """Online distillation: requests between two steps of learning; 0: none."""
    online_buffer: Annotated[int, Field(ge=1)] = 2048
    """Online distillation: most corrections kept to learn from."""
    online_learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    """Online distillation: of AdamW, constant."""
    posterior_threshold: Annotated[float, Field(gt=0, le=1)] = 0.09
    """Epsilon of typical acceptance."""
    posterior_alpha: Annotated[float, Field(gt=0)] | None = None
    """Delta of typical acceptance; the square root of epsilon if unsaid."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: object) -> object:
        if isinstance(values, dict):
            for key in values:
                if key not in cls.model_fields:
                    raise unknown("key in the speculative config", str(key), cls.model_fields)
        return values

    @classmethod
    def parse(cls, text: str) -> "SpeculativeConfig":
        """Read the JSON of `--speculative-config`.

        Raises:
            ValueError: invalid JSON, an unknown key, or a value out of range, in one sentence.
        """
        return cls.read(parse_object(text, f"speculative config {text!r}", f"write for example {_EXAMPLE!r}"))

    @classmethod
    def read(cls, values: dict[str, object]) -> "SpeculativeConfig":
        """Validate a mapping; errors in one sentence."""
        return validate(cls, values, "speculative config")
