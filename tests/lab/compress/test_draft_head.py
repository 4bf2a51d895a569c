"""Draft heads in two stages: the kernel, the factors, and drafting with them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from command import expect_error, run_foretell, save_tiny_model
from foretell.engine.request import Request
from foretell.lab.compress.draft_head import draft_head_network, fit_draft_head, head_factors, weights_read
from foretell.load import load
from foretell.model import kernels as native
from foretell.model.kernels.structures import Precision
from foretell.model.kernels.two_stage_head import TwoStageHead
from foretell.speculator.checkpoint import load_own, save
from foretell.speculator.network.eagle import HEAD_FACTORS
from foretell.train.data.dataset import Dataset

needs_kernels = pytest.mark.skipif(not native.available(), reason="the CPU kernels are not available")


@needs_kernels
@pytest.mark.parametrize(("precision", "near"), [("float32", 1e-4), ("bfloat16", 0.15), ("int8-activations", 0.3)])
@pytest.mark.parametrize(("outputs", "count"), [(999, 40), (999, 999), (40, 5), (5000, 16)])
def test_the_best_outputs_are_scored_exactly(precision: Precision, near: float, outputs: int, count: int) -> None:
    torch.manual_seed(0)
    exact, inner, x = torch.randn(outputs, 70), torch.randn(32, 70) / 8, torch.randn(5, 70)
    outer = exact @ torch.linalg.pinv(inner)
    head = TwoStageHead(outer, inner, exact, count, precision)
    whole = TwoStageHead(outer, inner, exact, outputs, precision)
    nothing = TwoStageHead(outer, inner, torch.zeros_like(exact), 1, precision)
    scores, wanted, rough = head(x), whole(x), nothing(x)
    torch.testing.assert_close(wanted, x @ exact.T, atol=near, rtol=0)
    for i in range(5):
        again = scores[i] == wanted[i]
        assert torch.equal(scores[i][~again], rough[i][~again])
        assert count <= again.sum() <= max(2 * count, count + 40)
        assert again[rough[i].masked_fill(rough[i] == 0, torch.inf).topk(count).indices].all()
    probabilities, index = head.topk_softmax(x, 5)
    torch.testing.assert_close(index, scores.topk(5).indices)
    torch.testing.assert_close(probabilities, scores.softmax(-1).topk(5).values, atol=1e-5, rtol=1e-3)


def test_factors_have_the_least_error_on_the_states() -> None:
    head, states = torch.randn(50, 12), torch.randn(300, 12) * torch.logspace(0, -2, 12)
    wide = states.double()
    outputs = wide @ head.double().T
    tail = torch.linalg.svdvals(outputs)[5:].square().sum()
    outer, inner = head_factors(head, states, 5)
    assert outer.shape == (12, 5) and inner.shape == (5, 12)
    error = (outputs - wide @ (head @ outer @ inner).double().T).square().sum()
    torch.testing.assert_close(error, tail, rtol=1e-3, atol=0)
    flat = torch.randn(3, 5) @ torch.randn(5, 12)
    outer, inner = head_factors(head, flat, 5)
    torch.testing.assert_close(flat @ (head @ outer @ inner).T, flat @ head.T, atol=1e-3, rtol=1e-3)


TRAINED = ("--draft-vocab", "200", "--batch-tokens", "64", "--sequence", "64", "--measure-every", "0", "--warmup", "1")
MEASURED = ("--measure-prompts", "1", "--measure-tokens", "4", "--steps", "2")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A target of width 64, a data set of its answers, and an EAGLE-3 for 200 of its tokens."""
    folder = tmp_path_factory.mktemp("head")
    target, data, out = save_tiny_model(folder / "target", hidden=64, ffn=64), folder / "answers", folder / "eagle"
    sizes = ("--self", "--tokens", "600", "--max-answer", "40")
    written = run_foretell("data", "generate", "--model", target, *sizes, "--out", data)
    assert written.exit_code == 0, written.output
    trained = run_foretell("train", "eagle3", "--model", target, "--data", data, *TRAINED, *MEASURED, "--out", out)
    assert trained.exit_code == 0, trained.output
    return target, data, out


@needs_kernels
def test_a_fitted_head_drafts_nearly_the_same_and_the_text_stays(made: tuple[Path, Path, Path], tmp_path: Path) -> None:
    target, data, folder = made
    model = load(str(target), "float32")
    network = draft_head_network(model.speculator(folder), 32, 8)
    found = fit_draft_head(model.network, network, list(Dataset.open(data)), 600, 32, 8)
    assert found.states > 200 and 0.8 < found.best <= 1 and 0.5 < found.best_few <= 1
    assert weights_read(network) == (32 * 264 + 8 * 64, 200 * 64)
    save(tmp_path / "new", network, network.config)
    read = load_own(tmp_path / "new", model.checkpoint.embedding_and_head())
    for name in HEAD_FACTORS:
        torch.testing.assert_close(read.get_buffer(name), network.get_buffer(name), rtol=0.01, atol=1e-3)
    prompt, texts = tuple(model.tokens("abc")), []
    for method in (model.method("autoregressive"), model.method("eagle3", drafts=[tmp_path / "new"])):
        engine = model.engine(method)
        engine.submit(Request(prompt, max_new_tokens=30))
        texts.append([t for update in engine.run() for t in update.tokens])
    assert texts[0] == texts[1]


def test_the_command_writes_a_speculator_from_which_training_may_start(
    made: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    target, data, folder = made
    out = tmp_path / "new"
    done = run_foretell("calibrate", "head", folder, "--model", target, "--data", data, "--rank", "32", "--out", out)
    assert done.exit_code == 0, done.output
    assert "weights of the head are read for a token" in done.output
    tensors = load_file(out / "model.safetensors")
    assert tensors["head_outer"].shape == (64, 32) and tensors["head_inner"].shape == (32, 64)
    more = ("--from", out, *TRAINED[2:], *MEASURED, "--out", tmp_path / "more")
    trained = run_foretell("train", "eagle3", "--model", target, "--data", data, *more)
    assert trained.exit_code == 0, trained.output
    assert not load_file(tmp_path / "more" / "model.safetensors").keys() & {"head_outer", "head_inner"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--rank", "33"), "--rank 33: a multiple of 32 below 64"),
        (("--rank", "64"), "--rank 64: a multiple of 32 below 64"),
        (("--rank", "32", "--candidates", "201"), "--candidates 201: 1 to 200 were expected"),
        (("--rank", "32", "--tokens", "4"), "too few tokens: "),
        (("--rank", "32", "--data", "nowhere"), "nowhere"),
    ],
)
def test_what_does_not_fit_is_refused(
    made: tuple[Path, Path, Path], tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    target, data, folder = made
    given = ("--model", target, "--data", data, "--out", tmp_path / "x")
    assert sentence in expect_error("calibrate", "head", folder, *given, *arguments)


def test_an_output_folder_in_use_and_other_kinds_are_refused(made: tuple[Path, Path, Path], tmp_path: Path) -> None:
    target, data, folder = made
    assert "there is something already" in expect_error("calibrate", "head", folder, "--model", target, "--out", folder)
    unknown = expect_error("calibrate", "head", "medusa", "--model", target, "--data", data, "--out", tmp_path / "x")
    assert "medusa" in unknown
