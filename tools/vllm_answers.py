"""Answers of vLLM, for `tools/check_vllm.py`: run by the Python of its environment with a job in JSON; writes the
tokens of every answer, the number of passes with drafts, the accepted drafts of each kind of prompt, and seconds.
"""

import json
import sys
import time
from pathlib import Path

from vllm import LLM, SamplingParams


def counter(llm: LLM, name: str) -> float:
    """A counter of vLLM's speculative decoding."""
    return sum(m.value for m in llm.get_metrics() if m.name == f"vllm:spec_decode_{name}")


def main() -> None:
    """Answer the prompts of a job."""
    job = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(
        job["model"], dtype="float32", max_model_len=job["context"], enforce_eager=True,
        max_num_seqs=job.get("rows", 1), speculative_config=job["speculative_config"], disable_log_stats=False,
        additional_config=job.get("additional_config", {}), enable_prefix_caching=False,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=job["tokens"])
    prompts = [{"prompt_token_ids": tokens} for tokens in job["prompts"]]
    kinds = job.get("kinds", [""] * len(prompts))
    answers, accepted, begun = list[list[int]](), dict[str, float](), time.perf_counter()
    for kind in dict.fromkeys(kinds):
        before = counter(llm, "num_accepted_tokens")
        own = [prompt for prompt, its in zip(prompts, kinds, strict=True) if its == kind]
        answers += [list(o.outputs[0].token_ids) for o in llm.generate(own, greedy, use_tqdm=False)]
        accepted[kind] = counter(llm, "num_accepted_tokens") - before
    result = {"answers": answers, "accepted": accepted, "seconds": time.perf_counter() - begun}
    result |= {name: counter(llm, name) for name in ("num_drafts", "num_draft_tokens")}
    Path(job["out"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
