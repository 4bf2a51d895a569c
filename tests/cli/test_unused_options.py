"""Options that have no effect beside others are refused in one sentence, before anything is loaded."""

import pytest

from command import expect_error

CASES = {
    "generate hello --logprobs --top-logprobs 2": "--logprobs, --top-logprobs would have no effect: log-probabilities",
    "generate hello --prompt-logprobs 1": "--prompt-logprobs would have no effect: log-probabilities are printed with",
    "generate hello --json --no-stream": "--no-stream would have no effect: --json prints an answer when it",
    "generate --prompts x.jsonl --no-stream": "--no-stream would have no effect: --prompts prints",
    "generate hello --rows 4": "--rows would have no effect: there is one prompt; leave it out",
    "generate hello --raw --allow-special-tokens": "--allow-special-tokens would have no effect: --raw encodes",
    "generate hello --regex a+ --any-whitespace": "--any-whitespace would have no effect: it is for --json-schema",
    "reproduce ngram --prompts x.jsonl --per-category 2": "--per-category would have no effect: --prompts names",
    "data generate --text x --tokens 9 --out y --temperature 1": "--temperature would have no effect: the model does",
    "data generate --prompts x --tokens 9 --out y --max-question 9": "--max-question would have no effect: --prompts",
    "train eagle3 --data x --out y --steps 3 --epochs 3": "--epochs would have no effect: --steps says how long",
    "train eagle3 --data x --out y --measure-every 0 --patience 2": "--patience would have no effect",
    "train eagle3 --data x --out y --features stream --cache-gib 2": "--cache-gib would have no effect",
    "train exits x --out y --lr 0.1": "--lr would have no effect: there are no gradient steps without --steps",
    "train exits x --out y --exit-weights linear": "--exit-weights would have no effect: --joint trains",
    "train exits x --out y --oracle correctness": "--oracle would have no effect: --halting agreement",
    "train matformer x --out y --text z --seed 1": "--seed would have no effect: --text names the text",
    "train decoder --out y --from x --layers 3": "--layers would have no effect: --from names a model",
    "train free x --out y --data z --tokens 9": "--tokens would have no effect: --data names the answers",
    "calibrate exits x --data z --tokens 9": "--tokens would have no effect: --data names the answers",
    "calibrate sparsity x --out y --text z --seed 1": "--seed would have no effect: --text names the text",
    "calibrate placement x --sparsity y --passes 3": "--passes would have no effect: passes are measured at",
    "quantize x --out y --text z --seed 1": "--seed would have no effect: --text names the text",
    "compress x --out y --text z --seed 1": "--seed would have no effect: --text names the text",
    "evaluate --from 3": "--from would have no effect: it is read with --kv-cache-policy only",
    "evaluate --text x --seed 1": "--seed would have no effect: --text names the text",
    "assess --against-dtype int8": "--against-dtype would have no effect: no --against names a model",
    "diffusion generate hello --model x --threshold 0.9 --steps 2": "--steps would have no effect: --threshold",
    "diffusion evaluate --model x --data y --masks 2": "--masks would have no effect: they compare with a --sibling",
    "bench run --out x --gguf-cache y": "--gguf-cache would have no effect: no --peers of llama.cpp, onnxruntime",
    "bench step --shape llama-3-8b --model x": "--model would have no effect: --shape names random weights",
    "bench step --no-engine --rows 2": "--rows would have no effect: --no-engine times single passes only",
    "bench frontier --out x --families weights --exits y": "--exits would have no effect: --families leaves exits out",
    "bench frontier --out x --json --csv": "--csv would have no effect: --json is another format",
    "bench serve a=http://x --identity --repeats 2": "--repeats would have no effect: --identity compares answers",
    "serve --uds x --port 80": "--port would have no effect: --uds listens on a unix socket",
    "roofline analyze llama-3-8b --chunk 9": "--chunk would have no effect: it is for --stage chunked, and this is",
    "roofline analyze llama-3-8b --tier nvme": "--tier would have no effect: no --offload says",
    "roofline analyze llama-3-8b --sweep batch=1:4 --offload weights=1": "--offload would have no effect: --sweep",
    "roofline plan llama-3-8b --curve --nodes 8": "--nodes would have no effect: --curve has the best shape",
    "roofline published --fit x --out y": "--out would have no effect: --fit prints the figures",
    "roofline load llama-3-8b --trace x --rate 3": "--rate would have no effect: --trace names the requests",
}


@pytest.mark.parametrize("command", CASES)
def test_an_option_without_effect_is_refused(command: str) -> None:
    assert CASES[command] in expect_error(*command.split())
