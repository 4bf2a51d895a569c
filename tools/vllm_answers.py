"""Answers of vLLM, for `tools/check_vllm.py`: run by the Python of its environment with a job in JSON; writes the
tokens of every answer, and the number of drafts.
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams


def main() -> None:
    """Answer the prompts of a job."""
    job = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(
        job["model"], dtype="float32", max_model_len=job["context"], enforce_eager=True, max_num_seqs=1,
        speculative_config=job["speculative_config"], disable_log_stats=False, enable_prefix_caching=False,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=job["tokens"])
    outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in job["prompts"]], greedy, use_tqdm=False)
    counts = {m.name.removeprefix("vllm:spec_decode_"): m.value for m in llm.get_metrics() if hasattr(m, "value")}
    result = {"answers": [list(o.outputs[0].token_ids) for o in outputs]}
    result["num_drafts"] = counts.get("num_drafts", 0)
    Path(job["out"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
