"""Checks that vLLM runs what `foretell export` writes, and the plug-in foretell-vllm (`make vllm`): every export gives
vLLM's own texts, and about as many tokens a pass as the same speculator in chains here; the plug-in gives about as many
as vLLM's own retrieval. Prints the tables of docs/formats.md and docs/howto/scale-out.md.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from foretell.api import Model
from foretell.bench.questions import BUILT_IN, load_questions
from foretell.load import load
from foretell.model.load.reference import DEFAULT_MODEL, resolve_reference
from foretell.verify.prompts import PROMPTS

MORE = (
    "List three fruits and say what colour each of them is.",
    "Explain in two sentences why the sky is blue.",
)
CONTEXT, TOLERANCE = 512, 0.05


RETRIEVAL: dict[str, dict[str, Any]] = {
    "`ngram`": {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "`suffix`": {"method": "suffix"},
    "foretell-vllm": {"method": "custom_class", "model": "foretell_vllm.ForetellProposer"},
}
"""vLLM's drafters without a model, and the plug-in."""
BUSY = 16
"""Requests at a time of the plug-in's second run."""


@dataclass(frozen=True)
class Export:
    """An export, how vLLM is told to draft with it, and how the same is drafted here."""

    speculator: str
    format: str
    config: dict[str, Any]
    method: str
    steps: int


EXPORTS = (
    Export("eagle3", "speculators", {"method": "eagle3"}, "eagle3", 3),
    Export("eagle3", "eagle3", {"method": "eagle3"}, "eagle3", 3),
    Export("medusa", "vllm-medusa", {"method": "medusa"}, "medusa", 3),
    Export("draft_model", "hf", {"method": "draft_model"}, "draft_model", 4),
)
METHODS = {"p_eagle": ("speculators", {"method": "eagle3", "parallel_drafting": True})}
METHODS |= {"dflash": ("speculators", {"method": "dflash"}), "eagle3": ("speculators", {"method": "eagle3"})}
METHODS |= {"mtp": ("hf", {"method": "mtp"})}
"""Formats and options for speculators of one's own, by kind."""


def main() -> None:
    """Print the table; exit with a sentence where an export differs."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--vllm", default=".venv-vllm/bin/python", help="Python of vLLM's environment")
    asked.add_argument("--out", type=Path, default=Path("build/vllm"))
    asked.add_argument("--tokens", type=int, default=64)
    asked.add_argument("--speculator", action="append", default=[], metavar="DIR", help="a trained one, too")
    asked.add_argument("--models", action="store_true", help="only write the target, and the same as a GLM-4 MoE")
    options = asked.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    target = target_directory(options.out / "target")
    if options.models:
        print(f"{target}\n{glm_directory(target, options.out / 'glm')}")
        return
    model = load(str(target), "float32")
    prompts = [model.tokens(prompt) for prompt in (*PROMPTS, *MORE)]
    job = {"model": str(target), "context": CONTEXT, "tokens": options.tokens, "prompts": prompts}
    plain = answers(options, "plain", job | {"speculative_config": None}).get("answers")
    if plain is None:
        sys.exit(f"vLLM does not run: see {options.out / 'plain.log'}")
    print("| speculator | format | same texts | tokens a pass, vLLM | here |\n|---|---|---|---|---|", flush=True)
    wrong = [e for e in (*EXPORTS, *own(options.speculator)) if not check(e, options, job, plain, model)]
    same = check_retrieval(options, job, model)
    if wrong or not same:
        sys.exit(f"{len(wrong)} of the exports differ" if wrong else "the plug-in changes texts or drafts worse")


def check_retrieval(options: argparse.Namespace, job: dict[str, Any], model: Model) -> bool:
    """Whether the plug-in keeps vLLM's texts and gives about as many tokens a pass as the best of vLLM's own retrieval,
    though it drafts for speed; prints a row for each drafter.
    """
    questions = sorted(load_questions(BUILT_IN).questions, key=lambda q: q.group)
    kinds = [q.group for q in questions]
    job = job | {"prompts": [model.tokens(q.turns[0]) for q in questions], "kinds": kinds, "context": 2 * CONTEXT}
    busy = job | {"kinds": [""] * len(kinds), "rows": BUSY}
    runs: dict[str, dict[str, Any] | None] = {"plain": None}
    runs |= {name: drafts | {"num_speculative_tokens": 8} for name, drafts in RETRIEVAL.items()}
    print(f"| drafter | same texts | {' | '.join(dict.fromkeys(kinds))} | all | seconds | {BUSY} at a time |")
    print("|" + "---|" * (5 + len(set(kinds))))
    rates, plain, same = dict[str, float](), list[list[int]](), True
    for name, drafts in runs.items():
        label = name.strip("`")
        result = answers(options, f"retrieval-{label}", job | {"speculative_config": drafts})
        loaded = answers(options, f"retrieval-{label}-{BUSY}", busy | {"speculative_config": drafts})
        if not result or not loaded:
            print(f"| {name} | does not run: see {options.out}/retrieval-{label}.log |", flush=True)
            same &= name != "foretell-vllm"
            continue
        plain = plain or result["answers"]
        tokens = Counter[str]()
        for kind, answer in zip(kinds, result["answers"], strict=True):
            tokens[kind] += len(answer)
        per_pass = [f"{n / (n - result['accepted'][kind]):.2f}" for kind, n in tokens.items()]
        rates[name] = tokens.total() / (tokens.total() - sum(result["accepted"].values()))
        equal = result["answers"] == plain and loaded["answers"] == plain
        same &= equal
        figures = " | ".join([*per_pass, f"{rates[name]:.2f}", f"{result['seconds']:.0f}", f"{loaded['seconds']:.0f}"])
        print(f"| {name} | {'yes' if equal else 'no'} | {figures} |", flush=True)
    return same and rates.get("foretell-vllm", 0.0) >= (1 - TOLERANCE) * max(rates.values())


def target_directory(folder: Path) -> Path:
    """The embedded model as a directory of safetensors that every engine reads."""
    if not (folder / "config.json").is_file():
        path = resolve_reference(DEFAULT_MODEL)
        source, file = str(path.parent), path.name
        wide = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=file, dtype=torch.float32, quantization_config=wide
        )
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(folder)
    return folder.absolute()


def glm_directory(target: Path, folder: Path) -> Path:
    """The same model as a GLM-4 MoE, which vLLM drafts for by multi-token prediction: the last layer's neurons are its
    shared expert, and its routed experts give nothing.
    """
    if not (folder / "config.json").is_file():
        config = json.loads((target / "config.json").read_text())
        tensors = load_file(target / "model.safetensors")
        last, hidden, part = config["num_hidden_layers"] - 1, config["hidden_size"], config["intermediate_size"] // 8
        at, drawn = f"model.layers.{last}.mlp.", torch.Generator().manual_seed(0)
        for name in ("gate_proj", "up_proj", "down_proj"):
            tensors[f"{at}shared_experts.{name}.weight"] = tensors.pop(f"{at}{name}.weight")
            for k in range(2):
                shape = (hidden, part) if name == "down_proj" else (part, hidden)
                drawn_weights = torch.randn(shape, generator=drawn) * hidden**-0.5 * (name != "down_proj")
                tensors[f"{at}experts.{k}.{name}.weight"] = drawn_weights
        tensors[f"{at}gate.weight"] = torch.randn((2, hidden), generator=drawn) * hidden**-0.5
        tensors[f"{at}gate.e_score_correction_bias"] = torch.zeros(2)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
            shutil.copy(target / file, folder)
        theta = (config.get("rope_parameters") or config)["rope_theta"]
        config |= {
            "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "tie_word_embeddings": False,
            "attention_bias": False, "use_qk_norm": False, "first_k_dense_replace": last, "n_routed_experts": 2,
            "num_experts_per_tok": 1, "n_shared_experts": 8, "moe_intermediate_size": part, "n_group": 1,
            "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 1.0},
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder.absolute()


def own(folders: list[str]) -> list[Export]:
    """The exports of speculators in these directories."""
    exports = []
    for folder in folders:
        config = json.loads((Path(folder) / "config.json").read_text())
        format_name, options = METHODS[config["kind"]]
        format_name = "dflash" if config.get("window_causal") else format_name  # JetSpec
        steps = config.get("depth") or config.get("block_size", 4) - 1
        exports.append(Export(folder, format_name, options, config["kind"], min(steps, 5)))
    return exports


def answers(options: argparse.Namespace, name: str, job: dict[str, Any]) -> dict[str, Any]:
    """What vLLM answers, from a file where it has answered before."""
    out = options.out / f"{name}.json"
    if not out.is_file():
        (options.out / f"{name}.job").write_text(json.dumps(job | {"out": str(out)}))
        script = Path(__file__).with_name("vllm_answers.py")
        with (options.out / f"{name}.log").open("w") as log:
            subprocess.run(
                [options.vllm, script, options.out / f"{name}.job"], stdout=log, stderr=log, check=False,
            )  # fmt: skip
    return dict(json.loads(out.read_text())) if out.is_file() else {}


def check(
    export: Export, options: argparse.Namespace, job: dict[str, Any], plain: list[list[int]], model: Model
) -> bool:
    """Whether vLLM runs an export as it is run here; prints a row."""
    name = f"{Path(export.speculator).name}-{export.format}"
    folder, inside = (options.out / name).absolute(), export.method == "mtp"
    if not folder.is_dir():
        target = glm_directory(Path(job["model"]), options.out / "glm") if inside else job["model"]
        common = ("--format", export.format, "--out", folder, "--model", target, "--dtype", "float32")
        subprocess.run([sys.executable, "-m", "foretell", "export", export.speculator, *common], check=True)
        if inside:
            shutil.copytree(target, folder, dirs_exist_ok=True)
            files = {f.name: load_file(f) for f in folder.glob("*.safetensors")}
            index = {"metadata": {}, "weight_map": {name: file for file, tensors in files.items() for name in tensors}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    drafts = {"num_speculative_tokens": export.steps} | export.config
    if inside:
        job, model = job | {"model": str(folder)}, load(str(folder), "float32")
    else:
        drafts["model"] = str(folder)
    theirs = answers(options, name, job | {"speculative_config": drafts})
    if not theirs:
        print(f"| {export.speculator} | {export.format} | fails: see {options.out / name}.log | | |", flush=True)
        return False
    chain = {"speculative_tree": [[0] * length for length in range(1, export.steps + 1)]}
    chain = {"num_speculative_tokens": export.steps} if export.method == "draft_model" else chain
    draft = load(str(folder), "float32") if export.method == "draft_model" else folder
    method = model.method(export.method, chain, drafts=[] if inside else [draft])
    ours = model.generate([*PROMPTS, *MORE], method, max_new_tokens=job["tokens"], rows=1)
    # The pass over a prompt has no drafts; vLLM counts those that have.
    passes = sum(a.statistics.target_passes - 1 for a in ours)
    here = sum(a.statistics.new_tokens - 1 for a in ours) / passes
    # Not its count of accepted tokens, which includes those beyond the end of an answer.
    there = sum(len(answer) - 1 for answer in theirs["answers"]) / max(theirs["num_drafts"], 1)
    same = theirs["answers"] == plain
    print(
        f"| {export.speculator} | {export.format} | {'yes' if same else 'no'} | {there:.2f} | {here:.2f} |", flush=True
    )
    return same and abs(there - here) <= TOLERANCE * here


if __name__ == "__main__":
    main()
