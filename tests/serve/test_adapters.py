"""Requests choose an adapter of the model by its name; the texts are compared with those of models merged by hand."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from serving import SETTINGS, running_server

from command import save_tiny_model
from foretell.load import load

PROMPT = "once upon a time"


def save_wide_model(path: Path) -> Path:
    return save_tiny_model(path, hidden=32, ffn=40)


def write_adapter(path: Path, merged: Path, seed: int) -> None:
    """An adapter of the feed-forward networks, and the model that has it merged."""
    torch.manual_seed(seed)
    weights, factors = load_file(save_wide_model(merged) / "model.safetensors"), dict[str, torch.Tensor]()
    for module in (f"model.layers.{i}.mlp.{name}" for i in range(2) for name in ("gate_proj", "down_proj")):
        whole = weights[f"{module}.weight"].float()
        low, high = 0.3 * torch.randn(4, whole.shape[1]), 0.3 * torch.randn(whole.shape[0], 4)
        weights[f"{module}.weight"] = whole + 2 * high @ low
        factors |= {f"{module}.lora_A.weight": low, f"{module}.lora_B.weight": high}
    save_file(weights, merged / "model.safetensors")
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    save_file({f"base_model.model.{name}": t for name, t in factors.items()}, path / "adapter_model.safetensors")


def test_the_server_answers_by_the_adapter_that_a_request_names(tmp_path: Path) -> None:
    merged = {"": save_wide_model(tmp_path / "base")}
    for seed, name in enumerate(("one", "two")):
        merged[name] = tmp_path / f"merged_{name}"
        write_adapter(tmp_path / name, merged[name], seed)
    texts = {name: load(str(place), "float32").generate([PROMPT], max_new_tokens=16) for name, place in merged.items()}
    assert len({answers[0].text for answers in texts.values()}) == 3
    model = load(str(tmp_path / "base"), "float32", adapters=[f"{name}={tmp_path / name}" for name in ("one", "two")])
    settings = replace(SETTINGS, served_names=("plain", "one", "two"))
    with running_server(settings, "ngram", loaded_model=model) as server:
        listed = server.http.get("/v1/models").json()["data"]
        assert [(each["id"], each["parent"]) for each in listed] == [
            ("plain", None), ("one", "plain"), ("two", "plain"),
        ]  # fmt: skip
        for _ in range(2):  # the second time its prefix is in the cache of all
            for name, (wanted,) in texts.items():
                answer = server.chat(PROMPT, max_tokens=16, **({"model": name} if name else {})).json()
                assert answer["choices"][0]["message"]["content"] == wanted.text
                assert answer["model"] == (name or "plain")
                ollama = {"model": f"{name or 'plain'}:latest", "messages": [{"role": "user", "content": PROMPT}]}
                options = {"stream": False, "options": {"temperature": 0, "num_predict": 16}}
                assert server.post("/api/chat", ollama | options).json()["message"]["content"] == wanted.text
        assert server.chat(PROMPT, model="three").status_code == 404
