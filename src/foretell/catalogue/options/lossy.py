"""Options of the lossy methods."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from foretell.catalogue.options.base import MethodOptions
from foretell.catalogue.options.fields import ChainLength, TypicalDelta, TypicalEpsilon, option
from foretell.catalogue.options.heads import MedusaOptions
from foretell.catalogue.options.shared import ChainOptions


class LenienceOptions(ChainOptions):
    """Rejection sampling with lenience."""

    lenience: Annotated[
        float, option("Factor on the draft's probability in the rejection test; 1: the exact test.", gt=0, le=1)
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
        int, option("Drafts among this number of most probable tokens of the target are accepted.", ge=1)
    ] = 2
    accept_distance: Annotated[
        int | None,
        option("In place of accept_top_k: drafts with a token id this close to the best token's are accepted.", ge=0),
    ] = None
    minimum_block: Annotated[int, option("Least number of tokens per pass.", ge=1)] = 1

    @model_validator(mode="after")
    def _one_criterion(self) -> Self:
        if self.is_set("accept_top_k") and self.accept_distance is not None:
            raise ValueError("accept_top_k and accept_distance are two criteria; give one of them")
        return self


class EarlyExitOptions(MethodOptions):
    """Answers of exits."""

    num_speculative_tokens: Annotated[
        int, option("Most tokens that leave early before one runs all layers.", ge=1, le=256)
    ] = 8
    calibration: Annotated[
        str | None, option("File of `foretell calibrate exits` with exits and thresholds. Unset: `exit_threshold`.")
    ] = None
    exit_layers: Annotated[
        tuple[int, ...] | None, option("Exits after so many layers. Unset: all that were fitted.")
    ] = None
    exit_threshold: Annotated[
        float, option("A token leaves at the first exit whose confidence is greater; 1: none does.", ge=0, le=1)
    ] = 0.9
    exit_confidence: Annotated[
        Literal["softmax", "probability", "state", "classifier"],
        option(
            "softmax: difference of the two largest probabilities; probability: the largest one; state: cosine of "
            "the outputs of the last two layers; classifier: a trained one."
        ),
    ] = "softmax"
    exit_decay: Annotated[
        float, option("The threshold l falls over the answer: 0.9 l + 0.1 exp(-exit_decay * t / 256).", ge=0)
    ] = 0.0
    exit_adaptive: Annotated[
        bool,
        option(
            "With one exit of softmax or probability confidence: its threshold adapts to the requests so far by a "
            "mixture of two Beta distributions (FREE), from `exit_threshold` on, so answers depend on earlier ones."
        ),
    ] = False
    exit_posterior: Annotated[
        float, option("Least share of the density of tokens that agree, above the adaptive threshold.", gt=0, lt=1)
    ] = 0.4
    missing_keys: Annotated[
        Literal["recompute", "copy"],
        option(
            "Keys and values of the layers that a token did not run: computed with the next token that runs them "
            "(recompute), or made of the state at its exit (copy)."
        ),
    ] = "recompute"

    rollback_threshold: Annotated[
        float | None,
        option(
            "A token that left is taken back, with those after it, where the whole model gives it a negative "
            "log-probability above this (nats); the whole model's token follows (FREE's RollBack). Unset: none is.",
            ge=0,
        ),
    ] = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        names = "exit_layers", "exit_threshold", "exit_confidence", "exit_decay", "exit_adaptive"
        unread = [name for name in names if self.is_set(name)]
        if self.calibration is not None and unread:
            raise ValueError(f"calibration names exits and thresholds, so {' and '.join(unread)} would not be read")
        if self.exit_adaptive and (self.missing_keys == "copy" or self.exit_decay):
            raise ValueError(
                "exit_adaptive learns from the whole model's tokens after those that left, and sets the threshold: it "
                "needs missing_keys recompute and exit_decay 0"
            )
        if self.rollback_threshold is not None and self.missing_keys == "copy":
            raise ValueError(
                "rollback_threshold compares tokens that left with the whole model's, which copied keys do not give: "
                "it needs missing_keys recompute"
            )
        if self.exit_adaptive and self.exit_confidence not in ("softmax", "probability"):
            raise ValueError(
                f"exit_adaptive needs a probability as confidence, not exit_confidence {self.exit_confidence}"
            )
        if self.exit_posterior != 0.4 and not self.exit_adaptive:
            raise ValueError("exit_posterior would not be read without exit_adaptive")
        return self


class SkipDecodeOptions(MethodOptions):
    """A budget of layers that falls over the answer."""

    max_layers: Annotated[int | None, option("Layers that the first token of an answer runs. Unset: all.", ge=1)] = None
    min_layers: Annotated[
        int | None, option("Layers that tokens from `horizon` on run. Unset: two thirds of all.", ge=1)
    ] = None
    warmup_layers: Annotated[
        int | None, option("First layers that every token runs, before those left out. Unset: a third of all.", ge=0)
    ] = None
    horizon: Annotated[int, option("Tokens over which the budget falls.", ge=2)] = 256
    measure: Annotated[
        bool,
        option(
            "The whole model reads the answer too, to report what changes, which makes decoding slower; false: "
            "nothing is reported."
        ),
    ] = True


class BiLDOptions(MethodOptions):
    """Big Little Decoder."""

    num_speculative_tokens: ChainLength = 10
    fallback_threshold: Annotated[
        float,
        option(
            "The chain ends where the most probable token of the draft model has a smaller probability.", ge=0, le=1
        ),
    ] = 0.6
    rollback_threshold: Annotated[
        float,
        option("Drafts whose negative log-probability under the target is at most this (nats) are accepted.", ge=0),
    ] = 5.0


class SyntheticOptions(MethodOptions):
    """Synthetic acceptance."""

    num_speculative_tokens: Annotated[
        int, option("Tokens of a draft chain, where a mean length and no rates are given.", ge=1, le=256)
    ] = 5
    synthetic_acceptance_rates: Annotated[
        tuple[Annotated[float, Field(ge=0, le=1)], ...],
        option("By position: the chance that the drafts up to it are all accepted; does not rise.", min_length=1),
    ] = (0.8, 0.6, 0.4, 0.3, 0.2)
    synthetic_acceptance_length: Annotated[
        float | None,
        option("In place of the rates: mean number of tokens a pass, the target's own one counted.", ge=1),
    ] = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        drafts, length = self.num_speculative_tokens, self.synthetic_acceptance_length
        rates = len(self.synthetic_acceptance_rates)
        if length is None:
            if self.is_set("num_speculative_tokens") and drafts != rates:
                raise ValueError(f"{rates} synthetic_acceptance_rates for {drafts} drafts; give one for each")
        elif self.is_set("synthetic_acceptance_rates"):
            raise ValueError("give either synthetic_acceptance_rates or synthetic_acceptance_length")
        elif length > drafts + 1:
            raise ValueError(f"{drafts} drafts give at most {drafts + 1} tokens, not a mean of {length}; draft more")
        return self
