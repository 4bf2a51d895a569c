"""What requests cost and gained, counted step by step."""

from dataclasses import dataclass, field

from foretell.accept.fidelity import FidelityLoss


@dataclass(frozen=True)
class StepTime:
    """Seconds that a step took: in the drafter, in the target's pass, altogether."""

    draft: float
    verify: float
    total: float


@dataclass
class RequestStatistics:
    """What a request cost and gained. Times in seconds; a shared pass counts fully for every request in it."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that were not read again, because the cache still held them."""
    new_tokens: int = 0
    target_passes: int = 0
    """Passes that decided tokens. The last chunk of a prompt is read by such a pass."""
    drafted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    """How many passes accepted a draft at depth 1, 2, …"""
    prefill_seconds: float = 0.0
    """Until the first new token."""
    decode_seconds: float = 0.0
    """After the first new token."""
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    decode_tokens: int = 0
    """New tokens that `decode_seconds` paid for."""
    fidelity: FidelityLoss = field(default_factory=FidelityLoss)
    """How far a lossy method strayed from the target; zero for lossless ones."""
    experts_read: int = 0
    """Distinct experts that passes after the prompt read, summed over their mixture-of-experts layers."""
    moe_layers_read: int = 0
    """Mixture-of-experts layers of those passes."""

    @property
    def experts_per_pass(self) -> float:
        """Mean distinct experts that a decoding pass reads in a mixture-of-experts layer; 0 for dense models."""
        return self.experts_read / self.moe_layers_read if self.moe_layers_read else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Mean tokens decided by a pass, the target's own included."""
        return self.new_tokens / self.target_passes if self.target_passes else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Speed of decoding, prefill apart."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def add(self, time: StepTime, prefix_length: int, drafted: int, accepted: int | None, tokens: int) -> None:
        """Count one step; `accepted` is None while a prompt is being read."""
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
        self.drafted += drafted
        self.accepted_per_position += [0] * (accepted - len(self.accepted_per_position))
        for depth in range(accepted):
            self.accepted_per_position[depth] += 1
