"""Writes LoRA adapters in PEFT's format, which `foretell.model.load.peft_adapter` reads."""

import json
from pathlib import Path

import torch

from foretell.model.block.spec import LinearWeights
from foretell.model.block.weights import collect_rows, linear_places
from foretell.model.config.families import family_of
from foretell.model.config.model import ModelConfig
from foretell.model.load.peft_adapter import CONFIG, TENSORS
from foretell.speculator.checkpoint import write_weights
from foretell.speculator.network.low_rank import ADAPTED, SCALE, LoRAAdapters, LoRAUpdate
from foretell.utils.paths import replace_file


def write_peft(folder: Path, adapters: LoRAAdapters, config: ModelConfig, target: str) -> None:
    """Write the adapters of a model with this configuration and name, float32, as PEFT does. Matrices that one update
    changes together, as those of queries, keys and values, have the same `lora_A`.
    """
    family, updates = family_of(config.architecture), iter(adapters)
    tensors, rank = dict[str, torch.Tensor](), 0
    for i in range(config.layers):
        places = linear_places(config, i)
        for path in ADAPTED:
            update, own = next(updates), dict[str, torch.Tensor]()
            assert isinstance(update, LoRAUpdate)
            down, rank = update.down.detach().float().cpu(), len(update.down)
            collect_rows(places[path], LinearWeights((update.up.detach().float().cpu(),)), 0, own)
            for name, up in own.items():
                module = f"base_model.model.model.layers.{i}.{family.name(name).removesuffix('.weight')}"
                tensors[f"{module}.lora_A.weight"] = down.clone()
                tensors[f"{module}.lora_B.weight"] = up.contiguous().clone()
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder, tensors, TENSORS)
    values = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": target, "bias": "none", "r": rank,
        "lora_alpha": SCALE * rank, "lora_dropout": 0.0, "target_modules": sorted({n.split(".")[-3] for n in tensors}),
    }  # fmt: skip
    replace_file(folder / CONFIG, json.dumps(values, indent=2) + "\n")
