"""What a run writes: one record per finished answer while it goes, and `results.json` at the end.

`foretell bench schema` prints its JSON schema.
"""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Data that does not change, and knows all its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Divergence(Frozen):
    """Where an answer first leaves that of plain decoding."""

    question: str
    turn: int
    position: int
    """Index among the new tokens; equal to the length where one answer is the beginning of the other."""
    token: int | None
    plain: int | None
    margin: float | None
    """How much more plain decoding's token scores than the other one, in logits, when the target reads the common text
    in one go; near zero is a tie that rounding decided. None where one answer has ended.
    """


class Price(Frozen):
    """What a lossy method changed, in means per token: divergences of the law it followed from the target's, in nats
    and as a probability.
    """

    kl: float
    total_variation: float
    changed: float


class Turn(Frozen):
    """One answer."""

    prompt_tokens: int
    tokens: tuple[int, ...]
    at: tuple[float, ...]
    """Seconds after the request at which tokens arrived."""
    count: tuple[int, ...]
    """How many arrived together then."""
    retokenized: int
    """Tokens of the stripped text, as Spec-Bench counts those of the baseline."""
    passes: int = 0
    """Target passes that decided tokens; 0 for peers, which do not say."""
    drafted: int = 0
    tested: tuple[int, ...] = ()
    """Passes that got to test a draft at depth 1, 2, …"""
    accepted: tuple[int, ...] = ()
    """Passes that accepted one there."""
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    step_seconds: float = 0.0
    """Of all decoding steps; less drafting and verifying: everything else the engine does."""
    price: Price | None = None


class Record(Frozen):
    """One contender's answers to one question; the unit that an interrupted run keeps."""

    question: str
    category: str
    group: str
    contender: str
    repeat: int
    turns: tuple[Turn, ...] = ()
    divergence: Divergence | None = None
    compared: bool = False
    """Whether the answers were held against plain decoding's."""
    refused: str | None = None
    """Why there is no answer."""


class PerQuestion(Frozen):
    """Figures of one question: medians over the repeats; what `compare` resamples."""

    question: str
    category: str
    tokens: int
    passes: int
    decode_tokens: int
    decode_seconds: float
    total_seconds: float


class Figures(Frozen):
    """Pooled over questions; `DEFINITIONS` says what each is."""

    questions: int
    tokens: int
    passes: int
    tokens_per_pass: float | None
    accepted_per_pass: float | None
    drafted_per_pass: float | None
    acceptance_conditional: tuple[float, ...]
    acceptance_cumulative: tuple[float, ...]
    tokens_per_second: float
    end_to_end_tokens_per_second: float
    speedup: float | None
    end_to_end_speedup: float | None
    over_peers: Mapping[str, float]
    draft_share: float | None
    verify_share: float | None
    other_share: float | None
    prefill_seconds: float
    inter_token_p50_ms: float
    inter_token_p95_ms: float
    gap_p95_ms: float


class Mean(Frozen):
    """Arithmetic means over the categories."""

    tokens_per_pass: float | None
    tokens_per_second: float
    speedup: float | None
    over_peers: Mapping[str, float]


class SpecBench(Frozen):
    """Figures computed as Spec-Bench's `speed.py` does."""

    mat: float | None
    speedup: Mapping[str, float]
    """By its six groups."""
    overall: float


class Contender(Frozen):
    """Everything about one contender."""

    name: str
    peer: bool
    lossless: bool
    categories: Mapping[str, Figures]
    pooled: Figures
    mean: Mean
    spec_bench: SpecBench
    identical: int
    compared: int
    divergences: tuple[Divergence, ...]
    refused: Mapping[str, str]
    price: Price | None = None
    peak_memory_bytes: int | None = None
    per_question: tuple[PerQuestion, ...] = ()


class Settings(Frozen):
    """What a run was asked to do. Runs that go on in one folder must agree in all but methods, peers and repeats."""

    model: str
    tasks: str
    digest: str
    max_new_tokens: int
    temperature: float
    seed: int
    threads: int
    dtypes: tuple[str, ...]
    device: str = "cpu"
    remember: bool = False
    """Methods kept what they learned from earlier questions."""
    draft_model: str | None = None
    references: tuple[str, ...] = ()


class Results(Frozen):
    """`results.json`."""

    format: str = "foretell bench 1"
    created: str
    machine: Mapping[str, str]
    settings: Settings
    repeats: int
    definitions: Mapping[str, str]
    contenders: tuple[Contender, ...]
