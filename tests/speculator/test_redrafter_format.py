"""Apple's ReDrafter checkpoints: read as the authors compute, exported and read back, and refused in a sentence."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from published import CARD, D, Tensors, V, drawn, embedding_and_head, matrix, put
from test_export import KEPT, VERIFIER, random

from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.speculator.export import export
from foretell.speculator.load import load_speculator
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.redrafter import ReDrafter, ReDrafterConfig

PATH = torch.tensor([[3, 1, 22], [0, 7, 7]])


def redrafter(width: int = 2 * D, layers: int = 2, rnn: bool = True) -> tuple[dict[str, Any], Tensors]:
    """As ml-recurrent-drafter saves it."""
    shapes: dict[str, tuple[int, ...]] = {f"lm_head.{layers}.weight": (V, width)}
    for i in range(layers):
        shapes |= {f"lm_head.{i}.linear.weight": (width, width), f"lm_head.{i}.linear.bias": (width,)}
    if width != 2 * D:
        shapes |= {"input_proj.weight": (width, 2 * D), "input_proj.bias": (width,)}
    if rnn:
        shapes |= {"rnn_u.weight": (D, D), "rnn_u.bias": (D,), "rnn_w.weight": (D, D)}
    config = {
        "model_type": "recurrent_drafting_drafter",
        "vocab_size": V,
        "hidden_size": D,
        "exit_dim": width,
        "num_draft_layers": layers,
        "num_lookback_tokens": -1,
        "rnn": rnn,
    }
    return config, drawn(shapes)


def read(folder: Path, lent: EmbeddingAndHead | None = None) -> ReDrafter:
    network = load_speculator(folder, CARD, lent or embedding_and_head())
    assert isinstance(network, ReDrafter)
    return network


def predicted(network: Speculator) -> torch.Tensor:
    """Logits over the whole vocabulary after every token of two paths."""
    assert isinstance(network, ReDrafter)
    state, out = network.initial_state([matrix(2, D, seed=40)]), []
    for token in PATH.T:
        state, logits = network.draft_step(state, token, 0)
        out.append(network.to_target_vocab(logits).detach())
    return torch.stack(out)


def transcribed(t: Tensors, layers: int, rnn: bool) -> torch.Tensor:
    """The same, written as in the authors' code."""
    context, state, out = matrix(2, D, seed=40), torch.zeros(2, D), []
    for token in PATH.T:
        e = embedding_and_head().embedding[token]
        state = F.silu(e @ t["rnn_w.weight"].T + state @ t["rnn_u.weight"].T + t["rnn_u.bias"]) if rnn else e + state
        x = torch.cat((context, state), -1)
        x = F.linear(x, t["input_proj.weight"], t["input_proj.bias"]) if "input_proj.weight" in t else x
        for i in range(layers):
            x = x + F.silu(F.linear(x, t[f"lm_head.{i}.linear.weight"], t[f"lm_head.{i}.linear.bias"]))
        out.append(x @ t[f"lm_head.{layers}.weight"].T)
    return torch.stack(out)


@pytest.mark.parametrize(("width", "layers", "rnn"), [(2 * D, 2, True), (D, 1, True), (12, 0, True), (2 * D, 1, False)])
def test_what_is_read_drafts_as_the_authors_compute_and_is_exported(
    tmp_path: Path, width: int, layers: int, rnn: bool
) -> None:
    config, tensors = redrafter(width, layers, rnn)
    network = read(put(tmp_path / "in", config, tensors))
    torch.testing.assert_close(predicted(network), transcribed(tensors, layers, rnn), atol=1e-5, rtol=1e-5)
    export(network, VERIFIER, "redrafter", tmp_path / "out")
    again = read(tmp_path / "out")
    assert again.config.model_dump(exclude={"target"}) == network.config.model_dump(exclude={"target"})
    assert torch.equal(predicted(again), predicted(network))


@pytest.mark.parametrize(("plural", "prefix"), [("lm_heads.", ""), ("0.", ""), ("lm_head.", "drafter.")])
def test_names_that_tensorrt_llm_knows_are_read(tmp_path: Path, plural: str, prefix: str) -> None:
    config, tensors = redrafter(D)
    named = {
        prefix + n.replace("lm_head.", plural).replace("input_proj.", "input_projs."): t for n, t in tensors.items()
    }
    network = read(put(tmp_path, config, named))
    torch.testing.assert_close(predicted(network), transcribed(tensors, 2, True), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("inner", [D, 5])
def test_one_that_was_trained_here_is_exported(tmp_path: Path, inner: int) -> None:
    """A narrower state is filled with zeros, the target's scale of embeddings goes into a matrix, and tokens outside
    the draft vocabulary get the target's rows.
    """
    lent = EmbeddingAndHead(embedding_and_head().embedding, embedding_and_head().head, embedding_scale=2.0)
    config = ReDrafterConfig(target=CARD, draft_vocab=len(KEPT), inner=inner, layers=1, stages=4)
    network = random(ReDrafter(config, lent))
    export(network, VERIFIER, "redrafter", tmp_path / "out")
    again = read(tmp_path / "out", lent)
    assert again.stages == 4 and not again.config.own_head
    torch.testing.assert_close(predicted(again)[..., KEPT], predicted(network)[..., KEPT])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"hidden_size": 16}, "was trained for another model"),
        ({"exit_dim": 12}, "lm_head.2.weight has the shape"),
        ({"num_draft_layers": 3}, "lacks lm_head.3.weight"),
        ({"num_draft_layers": 1}, "lm_head.1.weight"),
        ({"rnn": False}, "it holds rnn_"),
    ],
)
def test_what_does_not_fit_is_one_sentence(changed: dict[str, Any], words: str, tmp_path: Path) -> None:
    config, tensors = redrafter()
    with pytest.raises(ValueError, match=words) as error:
        read(put(tmp_path, config | changed, tensors))
    assert "\n" not in str(error.value)


def test_a_wider_state_than_the_targets_has_no_place(tmp_path: Path) -> None:
    network = ReDrafter(ReDrafterConfig(target=CARD, inner=D + 1), embedding_and_head())
    with pytest.raises(ValueError, match=f"train one with --set inner={D} to export it"):
        export(network, VERIFIER, "redrafter", tmp_path / "out")
