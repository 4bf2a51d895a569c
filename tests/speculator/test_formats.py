"""Published checkpoints: detected, read, with the logits of their own projects; and what is refused."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from published import (
    CARD,
    D,
    V,
    authors_medusa,
    eagle1,
    eagle3,
    embedding_and_head,
    ibm_mlp,
    matrix,
    put,
    speculators_eagle3,
    vllm_medusa,
)
from safetensors.torch import load_file

from foretell.load import load as load_model
from foretell.load import load_draft
from foretell.speculator.load import is_speculator, load_speculator
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.medusa import Medusa
from foretell.speculator.network.mlp_speculator import MLPSpeculator

H = matrix(4, D, seed=9)


def load(folder: Path) -> Speculator:
    assert is_speculator(folder)
    return load_speculator(folder, CARD, embedding_and_head())


@pytest.mark.parametrize("prefix", ["", "medusa_head.", "heads."])
@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "model.safetensors"])
def test_medusa_of_its_authors(tmp_path: Path, file: str, prefix: str) -> None:
    config, tensors = authors_medusa()
    network = load(put(tmp_path, config, {prefix + n: t for n, t in tensors.items()}, file))
    assert (
        isinstance(network, Medusa)
        and network.target_info.name == "lmsys/vicuna-7b-v1.3"
        and network.hidden_layers == (7,)
    )
    logits = network(H)
    for h in range(3):
        x = H
        for i in range(2):
            x = x + F.silu(F.linear(x, tensors[f"{h}.{i}.linear.weight"], tensors[f"{h}.{i}.linear.bias"]))
        torch.testing.assert_close(logits[:, h], x @ tensors[f"{h}.2.weight"].T)


def test_medusa_of_text_generation_inference_ends_in_the_output_matrix_of_its_target(tmp_path: Path) -> None:
    config, tensors = authors_medusa(blocks=1)
    blocks = {n: t for n, t in tensors.items() if ".linear." in n}
    network = load(put(tmp_path, config, blocks, "medusa_lm_head.safetensors"))
    assert isinstance(network, Medusa) and not network.config.own_head
    logits = network(H)
    for h in range(3):
        x = H + F.silu(F.linear(H, tensors[f"{h}.0.linear.weight"], tensors[f"{h}.0.linear.bias"]))
        torch.testing.assert_close(logits[:, h], x @ embedding_and_head().head.T)


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("kept", [V, 9])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_medusa_of_vllm(tmp_path: Path, prefix: str, kept: int, biased: bool, shared: bool) -> None:
    config, tensors = vllm_medusa(kept=kept, biased=biased, shared=shared)
    network = load(put(tmp_path, config, {prefix + n: t for n, t in tensors.items()}))
    logits = network.to_target_vocab(network(H))
    for h in range(2):
        bias = tensors.get(f"blocks.{h}.layers.0.bias")
        x = H + F.silu(F.linear(H, tensors[f"blocks.{h}.layers.0.weight"], bias))
        wanted = torch.full((4, V), float("-inf"))
        wanted[:, tensors.get("token_map", torch.arange(V))] = x @ tensors[f"lm_heads.{0 if shared else h}.weight"].T
        torch.testing.assert_close(logits[:, h], wanted)


def test_medusa_of_vllm_with_whole_matrices_a_scale_and_other_names_of_its_counts(tmp_path: Path) -> None:
    config, tensors = vllm_medusa(kept=9)
    tensors |= {f"lm_heads.{h}.weight": matrix(V, D, seed=h) for h in range(2)}
    config |= {
        "logit_scale": 0.5,
        "medusa_num_heads": config.pop("num_heads"),
        "medusa_num_layers": config.pop("num_hidden_layers"),
    }
    found = load(put(tmp_path, config, tensors))
    x = H + F.silu(H @ tensors["blocks.1.layers.0.weight"].T)
    where = tensors["token_map"]
    torch.testing.assert_close(
        found.to_target_vocab(found(H))[:, 1][:, where], 0.5 * (x @ tensors["lm_heads.1.weight"].T)[:, where]
    )


@pytest.mark.parametrize("architecture", ["MLPSpeculatorPreTrainedModel", "MLPSpeculatorModel"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("inner", [0, 6])
@pytest.mark.parametrize("scale_input", [False, True])
def test_mlp_speculator(tmp_path: Path, architecture: str, tied: bool, inner: int, scale_input: bool) -> None:
    config, tensors = ibm_mlp(3, inner, tied, scale_input, architecture)
    if tied:
        del config["model_type"]
    prefix = "speculator." if scale_input else ""
    network = load(put(tmp_path, config, {prefix + n: t for n, t in tensors.items()}))
    assert isinstance(network, MLPSpeculator)
    tokens = torch.tensor([[3, 0, 22], [1, 2, 3], [5, 5, 5], [7, 8, 9]])
    found = network([H], tokens, lambda readings: [network.head_logits(r, i) for i, r in enumerate(readings)])
    for mine, theirs in zip(found, released(tensors, H, tokens, inner or D, tied, scale_input), strict=True):
        torch.testing.assert_close(mine, theirs)


def released(
    tensors: dict[str, torch.Tensor],
    state: torch.Tensor,
    tokens: torch.Tensor,
    inner: int,
    tied: bool,
    scale_input: bool,
) -> list[torch.Tensor]:
    """The recurrence of the released speculators, written plainly."""

    def unit(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)

    stages = tokens.shape[1]
    kept = 0.5 ** (0.5 / stages)
    weight = ((1 - kept**2) * inner / 2) ** 0.5 / kept
    state, out = unit(state) / 2**0.5 if scale_input else state, []
    for i in range(stages):
        j = 0 if tied else i
        x = (
            state @ tensors[f"proj.{min(i, 1) if tied else i}.weight"].T
            + weight * tensors[f"emb.{j}.weight"][tokens[:, i]]
        )
        state = F.gelu(unit(x) * tensors[f"ln.{j}.weight"] + tensors[f"ln.{j}.bias"])
        out.append(state @ tensors[f"head.{j}.weight"].T)
    return out


@pytest.mark.parametrize(
    ("make", "name"),
    [(authors_medusa, "1.0.linear.weight"), (vllm_medusa, "lm_heads.1.weight"), (ibm_mlp, "ln.2.bias")],
)
def test_missing_and_misshapen_tensors(tmp_path: Path, make: object, name: str) -> None:
    config, tensors = make()  # type: ignore[operator]
    less = {n: t for n, t in tensors.items() if n != name}
    with pytest.raises(ValueError, match=rf"less: the checkpoint lacks {name}; is it complete\?"):
        load(put(tmp_path / "less", config, less))
    with pytest.raises(ValueError, match=rf"{name} has the shape \[5, 3\], and its configuration asks for \["):
        load(put(tmp_path / "odd", config, tensors | {name: matrix(5, 3, seed=1)}))


@pytest.mark.parametrize("make", [authors_medusa, vllm_medusa, ibm_mlp])
def test_another_target(tmp_path: Path, make: object) -> None:
    folder = put(tmp_path, *make())  # type: ignore[operator]
    for change in ({"hidden": D + 1}, {"vocab": V - 1}):
        with pytest.raises(ValueError, match=rf"another model \(.*: width {D}, {V} tokens\); the target has width"):
            load_speculator(folder, CARD.model_copy(update=change), embedding_and_head())


def test_a_configuration_that_makes_no_sense(tmp_path: Path) -> None:
    config, tensors = ibm_mlp()
    with pytest.raises(ValueError, match=r"n_predict should be an integer, found 'three'"):
        load(put(tmp_path, config | {"n_predict": "three"}, tensors))


def test_pickles_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(authors_medusa()[0]))
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(
        ValueError, match=r"medusa_lm_head.pt: a pickle, and unpickling can run code; convert it once .* python -c"
    ) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)
    (tmp_path / "medusa_lm_head.pt").unlink()
    with pytest.raises(ValueError, match="no weights here"):
        load(tmp_path)


@pytest.mark.parametrize("make", [eagle1, pytest.param(lambda: eagle3(kept=V), marks=pytest.mark.exhaustive)])
def test_the_line_that_converts_a_pickle_makes_a_speculator_of_it(
    make: Callable[[], tuple[dict[str, Any], dict[str, torch.Tensor]]], tmp_path: Path
) -> None:
    """SafeAILab's directories hold a pickle under the name of a language model, and no tensor to recognise them by."""
    folder, (config, tensors) = tmp_path / "it's a $folder", make()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    torch.save(tensors | {"again": tensors["fc.weight"]}, folder / "pytorch_model.bin")
    torch.save({}, folder / "training_args.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin: a pickle, and unpickling can run code; convert") as error:
        load_draft(str(folder))
    line = str(error.value).split(": ", 2)[2]
    assert line.startswith("python -c ")
    subprocess.run(line.replace("python", shlex.quote(sys.executable), 1), shell=True, check=True)
    assert load_draft(str(folder)) == folder and is_speculator(folder)
    converted = load_file(folder / "model.safetensors")
    assert converted.keys() == {*tensors, "again"} and all(torch.equal(converted[n], t) for n, t in tensors.items())


def test_a_hub_id_of_a_speculator_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository, commit = tmp_path / "models--owner--name", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    put(folder, *eagle3())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    assert load_draft("owner/name") == folder


def test_a_draft_that_is_neither_speculator_nor_language_model(tmp_path: Path) -> None:
    """As Hydra's checkpoints, which name no type."""
    put(tmp_path, {"hydra_num_heads": 4, "hydra_num_layers": 1}, {"0.0.linear.weight": matrix(D, D, seed=1)})
    with pytest.raises(ValueError, match=r"no speculator in a known format .* and no language model"):
        load_draft(str(tmp_path))


def test_a_speculator_under_the_name_of_a_language_model_is_no_target(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a model was asked for, and this is a speculator, which drafts for one"):
        load_model(str(put(tmp_path, *eagle3())))


def test_language_models_and_other_directories_are_no_speculators(tmp_path: Path) -> None:
    model = put(
        tmp_path / "llama",
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        {"model.norm.weight": torch.ones(4)},
    )
    assert not is_speculator(model) and not is_speculator(tmp_path) and not is_speculator(Path("smollm2-135m"))
    with pytest.raises(ValueError, match=r"not a speculator in a known format; docs/formats.md"):
        load_speculator(model, CARD, embedding_and_head())


def test_damaged_weights_are_reported(tmp_path: Path) -> None:
    folder = put(tmp_path, *ibm_mlp())
    (folder / "model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="damaged safetensors file"):
        load(folder)


def test_a_quantised_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    config, tensors = eagle1()
    put(tmp_path / "a", config | {"quantization_config": {"quant_method": "gptq"}}, tensors)
    with pytest.raises(ValueError, match="quantised with gptq"):
        load_speculator(tmp_path / "a", CARD, embedding_and_head())
    name = "layers.0.mlp.up_proj.weight"
    put(tmp_path / "b", config, tensors | {name: tensors[name].to(torch.float8_e4m3fn)})
    with pytest.raises(ValueError, match=rf"{name} \(F8_E4M3\) belongs to a quantised checkpoint"):
        load_speculator(tmp_path / "b", CARD, embedding_and_head())


@pytest.mark.parametrize("make", [authors_medusa, vllm_medusa, ibm_mlp, eagle1, eagle3, speculators_eagle3])
def test_hostile_values_in_a_configuration_are_one_sentence(
    make: Callable[[], tuple[dict[str, Any], dict[str, torch.Tensor]]], tmp_path: Path
) -> None:
    config, tensors = make()
    put(tmp_path, config, tensors)
    for key in config:
        for value in ([], {}, "x", float("inf"), -1, 0, 10**30, [None], {"a": 1}):
            (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
            try:
                load_speculator(tmp_path, CARD, embedding_and_head())
            except ValueError as error:
                assert "\n" not in str(error), key
