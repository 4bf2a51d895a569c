"""Statistics of a request, updated step by step."""

from dataclasses import dataclass, field

from foretell.accept.fidelity import FidelityLoss
from foretell.core.context import StepResult


@dataclass(frozen=True)
class StepCounts:
    """What the pass of a step read and gave, over all its requests."""

    requests: int = 0
    read: int = 0
    """Tokens that the target read: those of prompts, roots, drafts and probes."""
    reads_prompt: bool = True
    """Whether tokens of a prompt were among them."""
    drafted: int = 0
    accepted: int = 0
    new: int = 0

    @staticmethod
    def of(step: StepResult) -> "StepCounts":
        """The counts of a step."""
        tree, requests = step.tree, len(step.paths)
        decodes = tree.is_decode
        before = requests if decodes else sum(tree.prefix_length.tolist())
        return StepCounts(
            requests,
            tree.active_count,
            not decodes,
            sum(tree.drafted_counts),
            sum(map(len, step.paths)) - before,
            sum(map(len, step.new_tokens)),
        )


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: drafting, the target's pass, acceptance with the cache's update, and all together."""

    draft: float
    verify: float
    total: float
    sample: float = 0.0
    counts: StepCounts = StepCounts()
    between: float = 0.0
    """From the end of the step before to the begin of this one: text, sockets, or nothing to do."""


@dataclass
class RequestStatistics:
    """Statistics of a request. Times are in seconds; the time of a shared pass counts fully for every request in it."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that were found in the cache and not read again."""
    new_tokens: int = 0
    target_passes: int = 0
    """Passes that gave new tokens; the one that reads the last chunk of the prompt is among them."""
    drafting_passes: int = 0
    """Those of these passes that had drafts."""
    drafted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    """Number of passes that accepted a draft at depth 1, 2, …"""
    queue_seconds: float = 0.0
    """Time until the request was first given a row."""
    prefill_seconds: float = 0.0
    """Time until the first new token."""
    decode_seconds: float = 0.0
    """Time after the first new token."""
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    decode_tokens: int = 0
    """New tokens within `decode_seconds`."""
    fidelity: FidelityLoss = field(default_factory=FidelityLoss)
    """Deviation of a lossy method from the target; zero for lossless ones."""
    accepted_prediction_tokens: int = 0
    """Tokens of the request's prediction that appeared in the answer, in its order (OpenAI's definition)."""
    rejected_prediction_tokens: int = 0
    """Tokens of the prediction that did not."""
    preemptions: int = 0
    """How often the request had to wait and to read its tokens again, because the cache was full."""
    experts_read: int = 0
    """Distinct experts read by passes after the prompt, summed over their mixture-of-experts layers."""
    moe_layers_read: int = 0
    """Mixture-of-experts layers of those passes, summed over the passes."""

    @property
    def experts_per_pass(self) -> float:
        """Mean distinct experts that a decoding pass reads per mixture-of-experts layer; 0 for dense models."""
        return self.experts_read / self.moe_layers_read if self.moe_layers_read else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Mean new tokens per pass, the target's own included."""
        return self.new_tokens / self.target_passes if self.target_passes else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed, without prefill."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def add(self, time: StepTime, prefix_length: int, drafted: int, accepted: int | None, tokens: int) -> None:
        """Count one step; `accepted` is None while the prompt is being read."""
        if prefix_length > 1 or self.new_tokens == 0:
            self.prefill_seconds += time.total
        else:
            self.decode_seconds += time.total
            self.decode_tokens += tokens
            self.draft_seconds += time.draft
            self.verify_seconds += time.verify
        if accepted is None:
            return
        self.new_tokens += tokens
        self.target_passes += 1
        self.drafting_passes += drafted > 0
        self.drafted += drafted
        self.accepted_per_position += [0] * (accepted - len(self.accepted_per_position))
        for depth in range(accepted):
            self.accepted_per_position[depth] += 1
