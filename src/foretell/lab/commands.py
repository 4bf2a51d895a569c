"""The commands of the laboratory, which the entry point `foretell.commands` registers."""

from collections.abc import Mapping, Sequence

from foretell.cli.commands import Command

_SUMMARIES: Mapping[str, str] = {
    "reproduce": "Check what the papers claim, on a model here.",
    "diffusion": "Decode and measure masked diffusion models, such as LLaDA.",
    "nat": "Sequence-to-sequence models that do not decode from left to right.",
    "phrases": "Write text by copying phrases from an index. LOSSY.",
    "quantize": "Write a model with few bits per weight (RTN, GPTQ, AWQ, HQQ).",
    "compress": "Prune a model, lower its rank or drop blocks; write it with a card.",
    "evaluate": "Compare a dtype with the model's exact numbers: KL and perplexity.",
    "assess": "Report what a compression changed: fidelity, knowledge, robustness.",
    "tune": "Search for settings of a method on your prompts.",
}
"""In the order of the help; a new command is a line here and a file of its name in `lab/cli`."""

_OF_GROUPS = (
    "bench frontier", "calibrate sparsity", "calibrate placement",
    "train decoder", "train free", "train matformer", "train sparsity",
)  # fmt: skip
"""Commands of the engine's groups; the file of `train free` is `train_free.py`."""

COMMANDS: Sequence[Command] = tuple(
    Command(name, f"foretell.lab.cli.{name.replace(' ', '_')}", _SUMMARIES.get(name, ""), panel="Laboratory")
    for name in (*_SUMMARIES, *_OF_GROUPS)
)
