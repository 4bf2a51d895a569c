"""Usage, times and speculation of a request, as OpenAI, vLLM and llama.cpp report them."""

from typing import Any

from foretell.engine.statistics import RequestStatistics
from foretell.serve.choices import Choice, Choices

MILLISECONDS = 1000.0


def usage(choices: Choices) -> dict[str, Any]:
    """OpenAI's `usage`."""
    prompt, new = choices.prompt_tokens, choices.completion_tokens
    over = [c.statistics for c in choices.all if c.statistics is not None]
    prompt_statistics = [c.statistics for c in choices.all[:: choices.per_prompt] if c.statistics is not None]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(s.cached_tokens for s in prompt_statistics)},
        "completion_tokens_details": {
            "reasoning_tokens": choices.reasoning_tokens,
            "accepted_prediction_tokens": sum(s.accepted_prediction_tokens for s in over),
            "rejected_prediction_tokens": sum(s.rejected_prediction_tokens for s in over),
        },
    }


def measurements(choices: Choices) -> dict[str, Any]:
    """vLLM's `metrics` and llama.cpp's `timings`, of a request with one choice that is over; else nothing."""
    if len(choices.all) != 1 or choices.all[0].statistics is None:
        return {}
    choice, statistics = choices.all[0], choices.all[0].statistics
    return {"metrics": _metrics(choice, statistics, choices.started), "timings": _timings(choice, statistics)}


def timings_so_far(choices: Choices) -> dict[str, Any]:
    """llama.cpp's `timings` of a request with one choice that goes on; else nothing.

    What is known only at the end, such as the cached tokens, is missing until then.
    """
    if len(choices.all) != 1:
        return {}
    choice = choices.all[0]
    if choice.statistics is not None:
        return {"timings": _timings(choice, choice.statistics)}
    seconds, decoded = choice.last_at - choice.first_at, max(choice.tokens - 1, 0)
    return {
        "timings": {
            "prompt_ms": MILLISECONDS * (choice.first_at - choices.started),
            "predicted_n": choice.tokens,
            "predicted_ms": MILLISECONDS * seconds,
            "predicted_per_second": decoded / seconds if seconds else 0.0,
            "draft_n": choice.drafted,
            "draft_n_accepted": choice.accepted,
        }
    }


def _metrics(choice: Choice, statistics: RequestStatistics, started: float) -> dict[str, Any]:
    first, generation = choice.first_at - started, choice.last_at - choice.first_at
    decoded = max(choice.tokens - 1, 0)
    return {
        "time_to_first_token_ms": MILLISECONDS * first,
        "generation_time_ms": MILLISECONDS * generation,
        "queue_time_ms": MILLISECONDS * max(first - statistics.prefill_seconds, 0.0),
        "mean_itl_ms": MILLISECONDS * generation / decoded if decoded else 0.0,
        "tokens_per_second": decoded / generation if generation else 0.0,
        "speculative_decoding": _speculation(statistics) if statistics.drafted else None,
    }


def _speculation(statistics: RequestStatistics) -> dict[str, Any]:
    passes, reached = statistics.target_passes, [*statistics.accepted_per_position, 0]
    accepted = sum(reached)
    return {
        "mean_acceptance_length": 1 + accepted / passes,
        "draft_acceptance_rate": accepted / statistics.drafted,
        "acceptance_histogram": [
            before - after for before, after in zip([passes, *reached], [*reached, 0], strict=True)
        ][:-1],
        "num_spec_steps": passes,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": statistics.drafted,
        "num_spec_tokens": len(statistics.accepted_per_position),
    }


def _timings(choice: Choice, statistics: RequestStatistics) -> dict[str, Any]:
    return {
        "cache_n": statistics.cached_tokens,
        "prompt_n": statistics.prompt_tokens - statistics.cached_tokens,
        "prompt_ms": MILLISECONDS * statistics.prefill_seconds,
        "predicted_n": choice.tokens,
        "predicted_ms": MILLISECONDS * statistics.decode_seconds,
        "predicted_per_second": statistics.tokens_per_second,
        "draft_n": statistics.drafted,
        "draft_n_accepted": sum(statistics.accepted_per_position),
    }
