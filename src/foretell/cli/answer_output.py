"""How `foretell generate` prints an answer: as text, or as a JSON object."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foretell.api import Answer
    from foretell.cli.batch import AnsweredPrompt
    from foretell.model.kernels.expert_cache import ExpertReads


_TITLE_WIDTH = 60
"""Characters of a prompt that are printed above its answer."""


@dataclass(frozen=True)
class OutputFormat:
    """How answers are printed; `is_batch`: each with the number of its line."""

    as_json: bool
    stream: bool
    logprobs: int | None
    """Most probable tokens to print in the place of each token; None: no log-probabilities."""
    is_batch: bool
    prompt_logprobs: int | None = None


def print_answer(answered: "AnsweredPrompt", output: OutputFormat, reads: "ExpertReads | None" = None) -> None:
    """Print a finished answer, unless it was streamed; `reads`: of an offloaded mixture of experts, up to now."""
    if output.as_json:
        record = answer_record(answered.answer, output)
        if reads is not None:
            record["expert_reads"] = reads.to_dict()
        print(json.dumps(record, ensure_ascii=False), flush=True)
    elif output.is_batch:
        print(f"── {answered.line} ── {answered.title[:_TITLE_WIDTH]}\n{answered.answer.text}\n", flush=True)
    elif not output.stream:
        print(answered.answer.text, flush=True)


def answer_record(answer: "Answer", output: OutputFormat) -> dict[str, object]:
    """An answer as `--json` prints it; times in seconds."""
    s = answer.statistics
    out: dict[str, object] = {
        "text": answer.text,
        "tokens": list(answer.tokens),
        "prompt_tokens": s.prompt_tokens,
        "new_tokens": s.new_tokens,
        "method": answer.method,
        "drafter": answer.drafter,
        "lossless": answer.lossless,
        "exact": answer.exact,
        "backend": answer.backend.to_dict(),
        "target_passes": s.target_passes,
        "tokens_per_pass": s.tokens_per_pass,
        "accepted_per_position": list(s.accepted_per_position),
        "prefill_seconds": s.prefill_seconds,
        "decode_seconds": s.decode_seconds,
        "draft_seconds": s.draft_seconds,
        "verify_seconds": s.verify_seconds,
        "tokens_per_second": s.tokens_per_second,
        "finish_reason": answer.finish_reason,
    }
    if answer.error:
        out["error"] = answer.error
    if s.moe_layers_read:
        out["experts_per_pass"] = s.experts_per_pass
    if s.accepted_prediction_tokens or s.rejected_prediction_tokens:
        out["accepted_prediction_tokens"] = s.accepted_prediction_tokens
        out["rejected_prediction_tokens"] = s.rejected_prediction_tokens
    if answer.plan is not None:
        out["plan"] = vars(answer.plan)
    elif not answer.lossless and not answer.backend.lossy:
        out["fidelity_loss"] = {
            "changed_share": s.fidelity.changed_share,
            "total_variation": s.fidelity.mean_variation,
            "kl_divergence": s.fidelity.mean_divergence,
        }
    if answer.stop_reason is not None:
        out["stop_reason"] = answer.stop_reason
    if output.logprobs is not None:
        out["logprobs"] = list(answer.logprobs)
    if output.logprobs:
        out["top_logprobs"] = answer.top_logprobs
    if output.prompt_logprobs is not None:
        out["prompt_logprobs"] = [None, *answer.prompt_logprobs]
    if output.prompt_logprobs:
        out["prompt_top_logprobs"] = [None, *answer.prompt_top_logprobs]
    return out
