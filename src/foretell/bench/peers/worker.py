"""Another runtime in a virtual environment of its own: a script that needs the standard library and this runtime alone.

It reads lines of JSON. The first is the settings, and is answered by {} once the model is loaded; each further one is a
prompt and a number of new tokens, answered by the tokens and the seconds of their arrivals.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Generate = Callable[[list[int], int], Iterator[Sequence[int]]]
"""Yields the new tokens of a prompt as they arrive, greedily and whatever the model ends with."""


def load_xllamacpp(settings: dict[str, Any]) -> Generate:
    """llama.cpp's server, with its own speculation."""
    import xllamacpp as package

    kinds = {"lookup": "NGRAM_SIMPLE", "ngram-mod": "NGRAM_MOD", "ngram-cache": "NGRAM_CACHE", "draft": "DRAFT_SIMPLE"}
    params = package.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = settings["model"], settings["context"], 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    if kind := kinds.get(settings["mode"]):
        params.speculative.types = [getattr(package.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{kind}")]
    if settings["mode"] == "draft":
        params.speculative.draft.mparams.path = settings["draft_model"]
        params.speculative.draft.cpuparams.n_threads = settings["threads"]
    server = package.Server(params)

    def generate(prompt: list[int], count: int) -> Iterator[Sequence[int]]:
        from urllib.request import Request, urlopen

        assert server is not None  # It ends with its last reference.
        body = {
            "prompt": prompt, "n_predict": count, "temperature": 0, "ignore_eos": True, "stream": True,
            "return_tokens": True, "cache_prompt": False,
        }  # fmt: skip
        request = Request(f"{server.listening_address}/completion", json.dumps(body).encode())
        with urlopen(request) as response:
            for line in response:
                if line.startswith(b"data: ") and (tokens := json.loads(line[6:]).get("tokens")):
                    yield tokens

    return generate


def load_openvino(settings: dict[str, Any]) -> Generate:
    """OpenVINO GenAI, which reads GGUF files."""
    from queue import SimpleQueue
    from threading import Thread

    import numpy as np
    import openvino_genai as package
    from openvino import Tensor

    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": settings["threads"]}
    if settings["mode"] == "lookup":
        options["prompt_lookup"] = True
    if settings["mode"] == "draft":
        options["draft_model"] = package.draft_model(settings["draft_model"], "CPU")
    pipeline = package.LLMPipeline(settings["model"], "CPU", **options)

    class Streamer(package.StreamerBase):  # type: ignore[misc, unused-ignore]
        def __init__(self, arrived: "SimpleQueue[Sequence[int] | None]") -> None:
            super().__init__()
            self.arrived = arrived

        def write(self, token: int | list[int]) -> Any:
            self.arrived.put([token] if isinstance(token, int) else list(token))
            return package.StreamingStatus.RUNNING

        def end(self) -> None:
            return

    def generate(prompt: list[int], count: int) -> Iterator[Sequence[int]]:
        config = package.GenerationConfig(max_new_tokens=count, ignore_eos=True, do_sample=False)
        if settings["mode"] != "plain":
            config.num_assistant_tokens = settings["drafts"]
        if settings["mode"] == "lookup":
            config.max_ngram_size = settings["ngram"]
        arrived = SimpleQueue[Sequence[int] | None]()

        def run() -> None:
            try:
                pipeline.generate(Tensor(np.array([prompt], np.int64)), config, Streamer(arrived))
            finally:
                arrived.put(None)

        thread = Thread(target=run)
        thread.start()
        yield from iter(arrived.get, None)
        thread.join()

    return generate


def load_onnxruntime(settings: dict[str, Any]) -> Generate:
    """ONNX Runtime GenAI, on what its own converter makes of the model, which is kept."""
    import subprocess
    import tempfile
    from pathlib import Path

    import onnxruntime_genai as package

    source, folder = settings["model"], Path(settings["converted"])
    if not folder.is_dir():
        builder = Path(package.__file__).parent / "models" / "builder.py"
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            made = Path(temporary) / "model"
            command = [sys.executable, builder, "-m", source, "-i", source, "-o", made, "-p", "int4", "-e", "cpu"]
            subprocess.run([*command, "-c", temporary], check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
            made.rename(folder)
    config = package.Config(str(folder))
    session = {"intra_op_num_threads": settings["threads"]}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": session}, "eos_token_id": []}}))
    model = package.Model(config)

    def generate(prompt: list[int], count: int) -> Iterator[Sequence[int]]:
        params = package.GeneratorParams(model)
        params.set_search_options(do_sample=False, max_length=len(prompt) + count)
        generator = package.Generator(model, params)
        generator.append_tokens(prompt)
        for _ in range(count):
            generator.generate_next_token()
            yield [int(generator.get_next_tokens()[0])]

    return generate


def load_vllm(settings: dict[str, Any]) -> Generate:
    """vLLM on the CPU."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(settings["threads"]), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
    from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

    modes: dict[str, dict[str, Any] | None] = {
        "plain": None,
        "lookup": {"method": "ngram", "prompt_lookup_max": settings["ngram"]},
        "draft": {"method": "draft_model", "model": settings["draft_model"]},
    }
    drafts = modes[settings["mode"]]
    engine = LLM(
        settings["model"], max_model_len=settings["context"], max_num_seqs=1, enable_prefix_caching=False,
        skip_tokenizer_init=True,
        speculative_config=drafts and drafts | {"num_speculative_tokens": settings["drafts"]},
    ).llm_engine  # fmt: skip

    def generate(prompt: list[int], count: int) -> Iterator[Sequence[int]]:
        params = SamplingParams(
            temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        engine.add_request("0", {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            yield from (list(output.outputs[0].token_ids) for output in engine.step())

    return generate


LOADERS = {
    "xllamacpp": load_xllamacpp, "openvino": load_openvino, "onnxruntime": load_onnxruntime, "vllm": load_vllm,
}  # fmt: skip


def main() -> None:
    """Answer the lines of the standard input. What a runtime prints goes to the standard error."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    generate = LOADERS[settings["runtime"]](settings)
    replies.write("{}\n")
    for line in sys.stdin:
        asked = json.loads(line)
        started, seconds, tokens = time.perf_counter(), list[float](), list[Sequence[int]]()
        for new in generate(asked["prompt"], asked["count"]):
            seconds.append(time.perf_counter() - started)
            tokens.append(new)
        replies.write(json.dumps({"tokens": tokens, "seconds": seconds}) + "\n")
    os._exit(0)  # A runtime's threads may not end by themselves.


if __name__ == "__main__":
    main()
