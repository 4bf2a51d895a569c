"""What a run writes: one record per finished answer while it goes, and `results.json` at the end.

`foretell bench schema` prints its JSON schema.
"""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """Data that does not change, and knows all its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class AnswerDivergence(FrozenModel):
    """Where an answer first leaves that of plain decoding."""

    question: str
    turn: int
    position: int
    """Index among the new tokens; equal to the length where one answer is the beginning of the other."""
    token: int | None
    plain_token: int | None
    margin: float | None
    """How much more plain decoding's token scores than the other one, in logits, when the target reads the common text
    in one go; near zero is a tie that rounding decided. None where one answer has ended.
    """


class MeanFidelityLoss(FrozenModel):
    """What a lossy method changed, in means per token: divergences of the law it followed from the target's, in nats
    and as a probability.
    """

    kl: float
    total_variation: float
    changed: float


class Answer(FrozenModel):
    """One answer."""

    prompt_tokens: int
    tokens: tuple[int, ...]
    arrival_seconds: tuple[float, ...]
    """Seconds after the request at which tokens arrived."""
    arrival_counts: tuple[int, ...]
    """How many arrived together then."""
    retokenized_tokens: int
    """Tokens of the stripped text, as Spec-Bench counts those of the baseline."""
    passes: int = 0
    """Target passes that decided tokens; 0 for peers, which do not say."""
    drafted: int = 0
    tested_per_position: tuple[int, ...] = ()
    """Passes that got to test a draft at depth 1, 2, …"""
    accepted_per_position: tuple[int, ...] = ()
    """Passes that accepted one there."""
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    step_seconds: float = 0.0
    """Of all decoding steps; less drafting and verifying: everything else the engine does."""
    fidelity: MeanFidelityLoss | None = None


class QuestionResult(FrozenModel):
    """One competitor's answers to one question; the unit that an interrupted run keeps."""

    question: str
    category: str
    group: str
    competitor: str
    repeat: int
    answers: tuple[Answer, ...] = ()
    divergence: AnswerDivergence | None = None
    compared: bool = False
    """Whether the answers were held against plain decoding's."""
    error: str | None = None
    """Why there is no answer."""


class QuestionMetrics(FrozenModel):
    """Figures of one question: medians over the repeats; what `compare` resamples."""

    question: str
    category: str
    tokens: int
    passes: int
    decode_tokens: int
    decode_seconds: float
    total_seconds: float


class Metrics(FrozenModel):
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


class CategoryMeans(FrozenModel):
    """Arithmetic means over the categories."""

    tokens_per_pass: float | None
    tokens_per_second: float
    speedup: float | None
    over_peers: Mapping[str, float]


class SpecBenchMetrics(FrozenModel):
    """Figures computed as Spec-Bench's `speed.py` does."""

    mean_accepted_tokens: float | None
    speedup: Mapping[str, float]
    """By its six groups."""
    overall: float


class CompetitorResult(FrozenModel):
    """Everything about one competitor."""

    name: str
    peer: bool
    lossless: bool
    categories: Mapping[str, Metrics]
    pooled: Metrics
    category_means: CategoryMeans
    spec_bench: SpecBenchMetrics
    identical: int
    compared: int
    divergences: tuple[AnswerDivergence, ...]
    errors: Mapping[str, str]
    fidelity: MeanFidelityLoss | None = None
    peak_memory_bytes: int | None = None
    per_question: tuple[QuestionMetrics, ...] = ()


class BenchSettings(FrozenModel):
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


class BenchResults(FrozenModel):
    """`results.json`."""

    format: str = "foretell bench 1"
    created: str
    machine: Mapping[str, str]
    settings: BenchSettings
    repeats: int
    definitions: Mapping[str, str]
    competitors: tuple[CompetitorResult, ...]
