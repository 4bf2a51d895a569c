"""Drafters in GGUF files: written with the names, keys and orders of llama.cpp's loader, read back with the same
logits, and refused in a sentence where its graphs have no place for a part.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from published import CARD, D, V, embedding_and_head, put
from test_corrections import checkpoint
from test_dflash_formats import MASK, SIZE, dflash, load, predicted
from test_export import KEPT, VERIFIER, eagle3, eagle_logits

from foretell.api import Model
from foretell.catalogue.speculators import embedding_and_head as ends_of
from foretell.cli.export import _states
from foretell.load import load as load_model
from foretell.load import load_draft
from foretell.model.load.reference import DEFAULT_MODEL, resolve_reference
from foretell.speculator.export import export
from foretell.speculator.formats.base import Verifier
from foretell.speculator.formats.eagle_export import before_final_norm
from foretell.speculator.load import is_speculator, load_speculator
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.eagle import Eagle3
from foretell.verify.prompts import PROMPTS

TOKENS = [f"t{i}" for i in range(V)]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """The tokenizer's part of a target's file."""
    writer = GGUFWriter(tmp_path / "target.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * V)
    writer.add_add_bos_token(False)
    writer.add_tensor("token_embd.weight", np.zeros((V, D), np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    return tmp_path / "target.gguf"


def written(network: Speculator, target: Path, out: Path) -> Path:
    export(network, replace(VERIFIER, gguf=target), "gguf", out)
    assert is_speculator(out / "model.gguf") and not is_speculator(target)
    assert load_draft(str(out / "model.gguf")) == out / "model.gguf"
    return out / "model.gguf"


def contents(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keys and tensors as llama.cpp's own reader shows them."""
    reader = GGUFReader(file)
    return {k: f.contents() for k, f in reader.fields.items()}, {t.name: t for t in reader.tensors}


@pytest.mark.parametrize(
    "more", [{}, {"draft_vocab": None, "own_head": True}, {"norm_before_residual": True, "own_embedding": True}]
)
def test_eagle3(tmp_path: Path, target: Path, more: dict[str, Any]) -> None:
    network = eagle3(**more)
    file = written(network, target, tmp_path / "out")
    again = load_speculator(file, CARD, embedding_and_head())
    torch.testing.assert_close(eagle_logits(again), eagle_logits(network), atol=1e-5, rtol=1e-5)
    keys, tensors = contents(file)
    assert keys["general.architecture"] == "eagle3" and keys["tokenizer.ggml.tokens"] == TOKENS
    assert keys["eagle3.target_layers"] == [1, 3, 5] and keys["eagle3.target_hidden_size"] == D
    assert keys["eagle3.norm_before_residual"] == bool(more.get("norm_before_residual"))
    wanted = {"fc.weight", "output_norm.weight", "output.weight"}
    wanted |= {f"blk.0.{n}.weight" for n in ("attn_norm", "attn_norm_2", "attn_q", "attn_k", "attn_v", "attn_output")}
    wanted |= {f"blk.0.ffn_{n}.weight" for n in ("norm", "gate", "up", "down")}
    wanted |= {"d2t"} if network.token_of is not None else set()
    assert set(tensors) == wanted | ({"token_embd.weight"} if more.get("own_embedding") else set())
    if network.token_of is not None:
        # Target tokens as they are, not less their index as in safetensors.
        assert tensors["d2t"].tensor_type.name == "I64" and tensors["d2t"].data.tolist() == KEPT.tolist()
    # llama.cpp rotates neighbouring rows of queries and keys together, transformers those half a head apart.
    q = network.get_parameter("layers.0.self_attn.qkv_proj.weight")[:16].detach()
    rows = [head * 4 + pair + half * 2 for head in range(4) for pair in range(2) for half in range(2)]
    assert np.array_equal(tensors["blk.0.attn_q.weight"].data, q[rows].numpy())


@pytest.mark.parametrize("name", ["dflash", "dspark", "dflash2", "window"])
def test_dflash(tmp_path: Path, target: Path, name: str) -> None:
    made = checkpoint(name) if name == "dflash2" else dflash(name == "dspark")
    network = load(put(tmp_path / "in", *made))
    if name == "dspark":
        network.confidence, network.config = None, network.config.model_copy(update={"confidence": False})
    if name == "window":
        network.config = network.config.model_copy(update={"window": 4, "window_layers": (1,)})
    file = written(network, target, tmp_path / "out")
    again = load(file)
    # The group of convolutions and the width of windows come along, and which slots predict.
    apart = {"target", "window_from_anchor", "norm_eps", "rope"}
    assert again.config.model_dump(exclude=apart) == network.config.model_dump(exclude=apart)
    torch.testing.assert_close(predicted(again)[0], predicted(network)[0], atol=1e-5, rtol=1e-5)
    keys, tensors = contents(file)
    # The inputs of these blocks: one more than the outputs that the authors' configuration counts.
    assert keys["dflash.target_layers"] == [2, 3] and keys["dflash.block_size"] == SIZE
    assert keys["tokenizer.ggml.mask_token_id"] == MASK
    assert keys["dflash.sample_from_anchor"] == (name == "dspark")
    assert {"fc.weight", "enc.output_norm.weight", "output_norm.weight", "blk.1.attn_q_norm.weight"} <= set(tensors)
    if name == "dflash2":
        assert keys["dflash.conv_group_size"] == 4 and keys["dflash.selector_top_k"] == 3
        assert tensors["blk.0.attn_conv_base"].shape.tolist() == [D, 2, 2]
        assert tensors["selector_hidden.weight"].shape.tolist() == [D, 4]
    if name == "window":
        assert keys["dflash.attention.sliding_window_pattern"] == [False, True]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"hidden_layers": (1, 3)}, "hidden states of other than three layers"),
        ({"fc_norm": True}, "norms of the hidden states"),
        ({"layers": 2}, "more than one layer"),
        ({"norm_output": True}, "a normed output that is fed back"),
    ],
)
def test_what_the_graph_has_no_place_for_is_refused(
    tmp_path: Path, target: Path, more: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=f"the format gguf has no place for {words}"):
        export(eagle3(**more), replace(VERIFIER, gguf=target), "gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_target_without_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the target is no GGUF file"):
        export(eagle3(), VERIFIER, "gguf", tmp_path / "out")


@pytest.mark.parametrize(("key", "tensor"), [("eagle3.tree_width", ""), ("", "blk.0.attn_gate.weight")])
def test_what_is_not_known_is_named(tmp_path: Path, target: Path, key: str, tensor: str) -> None:
    writer = GGUFWriter(tmp_path / "other.gguf", "eagle3")
    for name in filter(None, [key]):
        writer.add_uint32(name, 3)
    writer.add_tensor(tensor or "fc.weight", np.zeros((2, 2), np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    with pytest.raises(ValueError, match=key.removeprefix("eagle3.") or f"it holds {tensor}") as error:
        load_speculator(tmp_path / "other.gguf", CARD, embedding_and_head())
    assert "\n" not in str(error.value)


def of_three_states(model: Model, verifier: Verifier) -> Eagle3:
    """The shipped EAGLE-3 as llama.cpp's graph has it: without layer 2, and with `fc` for states of the usual length
    in place of norms.
    """
    shipped = model.speculator("eagle3")
    assert isinstance(shipped, Eagle3)
    shipped = before_final_norm(shipped, verifier)
    kept, norms = shipped.config.recorded_layers[1:], shipped.fc_norm
    assert norms is not None and verifier.states is not None
    parts = shipped.fc.weight.detach().chunk(1 + len(kept), 1)[1:]
    scales = [norm.get_parameter("weight").detach() for norm in norms][1:]
    lengths = [state.square().mean(-1).sqrt().median() for state in verifier.states(kept)]
    fused = [w * s / n for w, s, n in zip(parts, scales, lengths, strict=True)]
    config = shipped.config.model_copy(update={"hidden_layers": tuple(kept), "fc_norm": False})
    network = Eagle3(config, ends_of(model._build_context()))
    assert shipped.token_of is not None
    network.set_draft_vocab(shipped.token_of)
    rest = {name: t for name, t in shipped.state_dict().items() if not name.startswith("fc")}
    network.load_state_dict(rest | {"fc.weight": torch.cat(fused, 1)})
    return network


def llama_cpp(target: Path, drafter: Path | None, prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
    """Answers of llama.cpp's server, with chains of three drafts."""
    package = pytest.importorskip("xllamacpp")
    params = package.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = str(target), 512, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    if drafter is not None:
        drafts = params.speculative.draft
        params.speculative.types = [package.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3]
        drafts.mparams.path, drafts.n_max, drafts.p_min, drafts.cpuparams.n_threads = str(drafter), 3, 0.0, 1
    server, out = package.Server(params), list[dict[str, Any]]()
    fixed = {"n_predict": 24, "temperature": 0, "ignore_eos": True, "return_tokens": True, "cache_prompt": False}
    for prompt in prompts:
        body = json.dumps(fixed | {"prompt": prompt}).encode()
        with urlopen(Request(f"{server.listening_address}/completion", body)) as response:
            out.append(json.load(response))
    return out


@pytest.mark.exhaustive
def test_llama_cpp_drafts_with_it_as_is_done_here(tmp_path: Path) -> None:
    """The same texts as without a drafter, in about as many passes as here."""
    pytest.importorskip("xllamacpp")
    model, file = load_model(DEFAULT_MODEL, "float32"), resolve_reference(DEFAULT_MODEL)
    verifier = Verifier("owner/target", model.config, model.codec, partial(_states, model), file)
    export(of_three_states(model, verifier), verifier, "gguf", tmp_path / "out")
    prompts = [model.tokens(prompt) for prompt in PROMPTS]
    drafter = tmp_path / "out" / "model.gguf"
    plain, drafted = (llama_cpp(file, name, prompts) for name in (None, drafter))
    assert [answer["tokens"] for answer in drafted] == [answer["tokens"] for answer in plain]
    new = sum(len(answer["tokens"]) - 1 for answer in drafted)
    there = new / (new - sum(answer["timings"]["draft_n_accepted"] for answer in drafted))
    method = model.method("eagle3", {"speculative_tree": [[0], [0, 0], [0, 0, 0]]}, drafts=[drafter])
    ours = model.generate(PROMPTS, method, max_new_tokens=24, rows=1)
    here = sum(a.statistics.new_tokens - 1 for a in ours) / sum(a.statistics.target_passes - 1 for a in ours)
    assert there > 1.8 and abs(there - here) <= 0.15 * here, (there, here)
