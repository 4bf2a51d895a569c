"""Files of a run: one `QuestionResult` per line while it goes, and `results.json` (`BenchResults`) at the end.

`foretell bench schema` prints the JSON schema of `results.json`.
"""

from collections.abc import Mapping

from pydantic import model_validator

from foretell.core.target_options import PLAIN_TARGET, TargetOptions
from foretell.utils.validation import FrozenModel


class FileModel(FrozenModel):
    """A file with a version: the subclass's default of `format`. A file of another version is refused."""

    format: str

    @model_validator(mode="before")
    @classmethod
    def _check_format(cls, values: object) -> object:
        wanted = cls.model_fields["format"].default
        if isinstance(values, dict) and (file_format := values.get("format", wanted)) != wanted:
            raise ValueError(
                f"the file has the format {file_format!r}, this version of foretell reads {wanted!r}; run again"
            )
        return values


class AnswerDivergence(FrozenModel):
    """The first token at which an answer differs from that of plain decoding."""

    question: str
    turn: int
    position: int
    """Index among the new tokens; the shorter answer's length where one answer is a prefix of the other."""
    token: int | None
    plain_token: int | None
    margin: float | None
    """Logit of plain decoding's token minus logit of the other one, when the target reads the common prefix without
    speculation. Near zero: a tie that rounding decided. None where one answer has ended.
    """


class MeanFidelityLoss(FrozenModel):
    """How far a lossy method's distribution is from the target's, in means per token."""

    kl: float
    """Kullback-Leibler divergence, in nats."""
    total_variation: float
    changed: float
    """Share of tokens that a lossless method would not have chosen."""


class Answer(FrozenModel):
    """The answer to one turn of a conversation."""

    prompt_tokens: int
    tokens: tuple[int, ...]
    arrival_seconds: tuple[float, ...]
    """Times after the request at which tokens arrived."""
    arrival_counts: tuple[int, ...]
    """How many tokens arrived at each of these times."""
    retokenized_tokens: int
    """Tokens of the stripped text encoded again, which Spec-Bench counts for the baseline."""
    passes: int = 0
    """Target passes that decided tokens; 0 for peers, which do not report them."""
    drafted: int = 0
    tested_per_position: tuple[int, ...] = ()
    """Passes that tested a draft at depth 1, 2, …: all drafts before it were accepted."""
    accepted_per_position: tuple[int, ...] = ()
    """Passes that accepted a draft at depth 1, 2, …"""
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    step_seconds: float = 0.0
    """Of all decoding steps, drafting and verifying included."""
    read_per_pass: float = 0.0
    """Mean tokens that the passes after the prompt read of a request: root, drafts and probes."""
    requests_per_pass: float = 1.0
    """Mean requests in these passes."""
    fidelity: MeanFidelityLoss | None = None


class QuestionResult(FrozenModel):
    """One competitor's answers to one question; the unit that an interrupted run keeps."""

    question: str
    category: str
    group: str
    """Column of Spec-Bench's table."""
    competitor: str
    repeat: int
    answers: tuple[Answer, ...] = ()
    divergence: AnswerDivergence | None = None
    compared: bool = False
    """Whether the answers were compared with those of plain decoding."""
    error: str | None = None
    """Why there is no answer."""


class QuestionMetrics(FrozenModel):
    """Metrics of one question: times are medians over the repeats. `compare` resamples these."""

    question: str
    category: str
    tokens: int
    passes: int
    decode_tokens: int
    decode_seconds: float
    total_seconds: float


class Metrics(FrozenModel):
    """Metrics pooled over questions; `DEFINITIONS` defines each."""

    questions: int
    tokens: int
    passes: int
    tokens_per_pass: float | None
    accepted_per_pass: float | None
    drafted_per_pass: float | None
    read_per_pass: float | None = None
    requests_per_pass: float = 1.0
    decode_tokens_per_pass: float | None = None
    """Both counted after the first arrival."""
    mean_context: float = 0.0
    """Tokens of a sequence halfway through its answer."""
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
    """Metrics computed as Spec-Bench's `speed.py` does."""

    mean_accepted_tokens: float | None
    speedup: Mapping[str, float]
    """By its six groups."""
    overall: float


class CompetitorResult(FrozenModel):
    """All metrics of one competitor."""

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
    """Reason by question."""
    fidelity: MeanFidelityLoss | None = None
    peak_memory_bytes: int | None = None
    per_question: tuple[QuestionMetrics, ...] = ()


class BenchSettings(FileModel):
    """Settings of a run. A run continued in the same folder may change methods, peers and repeats only."""

    format: str = "foretell bench run 2"
    model: str
    tasks: str
    """The question file, or `builtin`."""
    digest: str
    """Hash of its questions."""
    max_new_tokens: int
    temperature: float
    seed: int
    threads: int
    dtypes: tuple[str, ...]
    device: str = "cpu"
    batch: int = 1
    """Questions answered at a time."""
    remember: bool = False
    """Methods keep their state from question to question."""
    draft_model: str | None = None
    """Comma-separated references."""
    references: tuple[str, ...] = ()
    memory_limit: int | None = None
    """Bytes that the weights of the target may take."""
    target: TargetOptions = PLAIN_TARGET
    """How the target is loaded."""


class BenchResults(FileModel):
    """`results.json`."""

    format: str = "foretell bench 2"
    created: str
    machine: Mapping[str, str]
    settings: BenchSettings
    repeats: int
    definitions: Mapping[str, str]
    competitors: tuple[CompetitorResult, ...]
