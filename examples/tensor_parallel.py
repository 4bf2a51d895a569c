"""A target in several processes, each with a part of its weights: tokens per second and texts, with and without drafts.

torchrun starts the processes; the first one decodes and drafts, the others run their parts of its passes. Without
torchrun, one process has the whole model, which transformers runs, too.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py
    torchrun --nproc-per-node 2 examples/tensor_parallel.py --pipeline
    OMP_NUM_THREADS=1 python examples/tensor_parallel.py
"""

import argparse
import hashlib
import os
import time
from pathlib import Path
from tempfile import gettempdir

import torch

import foretell
from foretell.bench.peers.export import as_directory
from foretell.engine.budget import Budget
from foretell.engine.engine import Engine
from foretell.engine.request import Request
from foretell.model.load.transformers import HFRunner, load_hf

PROMPTS = (
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday,",
    "The sea is salty because rivers carry salt to the sea. Why is the sea salty? The sea is",
)
PROCESSES = int(os.environ.get("WORLD_SIZE", 1))
RANK = int(os.environ.get("RANK", 0))


def main() -> None:
    """Decode the prompts by plain decoding and with drafts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="a directory in safetensors, or a GGUF file like Llama")
    parser.add_argument("--method", default="sam_recycling")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--pipeline", action="store_true", help="split the list of layers in place of every layer")
    options = parser.parse_args()
    # Of a GGUF file every process writes its own directory.
    path = as_directory(options.model, Path(gettempdir()) / f"foretell-part-{RANK}")
    parts = {"pipeline_parallel" if options.pipeline else "tensor_parallel": PROCESSES}
    model = foretell.load(str(path), "float32", **parts)  # Returns in the first process only.
    runner = model.runner() if PROCESSES > 1 else HFRunner(load_hf(path, torch.float32, torch.device("cpu")))
    print(runner.backend)
    parameters = foretell.SamplingParams(temperature=options.temperature, seed=1)
    requests = [Request(model.codec.encode(text), parameters, options.tokens) for text in PROMPTS]
    for name in ("autoregressive", options.method):
        engine = Engine(runner, model.method(name), rows=1, budget=Budget())
        engine.complete(requests[:1])  # The budget learns the times of passes.
        start = time.perf_counter()
        answers = engine.complete(requests)
        seconds, tokens = time.perf_counter() - start, sum(len(a.tokens) for a in answers)
        per_pass = tokens / sum(a.statistics.target_passes for a in answers)
        digest = hashlib.sha256(repr([a.tokens for a in answers]).encode()).hexdigest()[:8]
        print(
            f"{name:15} {tokens / seconds:6.1f} tokens/s  {per_pass:5.2f} tokens per pass  texts {digest}", flush=True
        )


if __name__ == "__main__":
    main()
