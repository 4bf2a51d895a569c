"""tools/measure_sparsity.py and tools/measure_division.py: what they compare is what they say."""

import runpy
import sys
import time
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from command import run_foretell
from foretell.lab.sparsify.predictors import PredictorSettings, fit_predictor, head_sizes, largest, neuron_sizes
from foretell.model.block.layer import FeedForward
from foretell.model.block.linear import Linear
from foretell.model.block.sparsity import GateThreshold, SparseFeedForward, sparse_decoder
from foretell.roofline.neurons import Side, Sides
from foretell.testing import TINY, tiny_decoder
from helpers import all_logits, random_tokens

TOOLS = Path(__file__).parents[3] / "tools"


def tool(name: str) -> SimpleNamespace:
    sys.path.insert(0, str(TOOLS))
    try:
        return SimpleNamespace(**runpy.run_path(str(TOOLS / name)))
    finally:
        sys.path.remove(str(TOOLS))


def sparse_networks(decoder: torch.nn.Module) -> list[SparseFeedForward]:
    return [m for m in decoder.modules() if isinstance(m, SparseFeedForward)]


def test_what_a_token_needs_by_hand() -> None:
    inner, down = torch.tensor([[0.0, -3.0, 2.0, 0.0], [1.0, 0.0, 0.0, 0.0]]), torch.tensor([[9.0, 1.0, 2.0, 9.0]])
    sizes = neuron_sizes(inner, down)
    assert sizes.tolist() == [[0, 3, 4, 0], [9, 0, 0, 0]]
    assert largest(sizes, 0.75).tolist() == [[False, False, True, False], [True, False, False, False]]
    # Half of the neurons may be read; of the second token only one is not zero.
    assert largest(sizes, 0.5).tolist() == [[False, True, True, False], [True, False, False, False]]
    mixed, output = torch.tensor([[1.0, 2.0, 0.0, 5.0]]), torch.tensor([[3.0, 0.0, 9.0, 0.0], [0.0, 2.0, 9.0, 1.0]])
    assert head_sizes(mixed, output, 2).tolist() == [[5.0, 5.0]]


def test_a_predictor_of_other_tokens_finds_what_a_constant_set_finds() -> None:
    """Recall comes from the token: without it nothing is left but how often units are needed."""
    measure = tool("measure_sparsity.py")
    torch.manual_seed(0)
    x, gate = torch.randn(6000, 24), torch.randn(64, 24)
    needed = largest((x @ gate.T + torch.linspace(-6, 6, 64)).relu(), 0.8)
    settings = PredictorSettings(sparsity=0.8, rank=12, steps=200)
    fixed, own, other = measure.constant_set(needed[:5000], 24, 0.2), measure.Choice(), measure.Choice()
    assert set(fixed.bias.nonzero().flatten().tolist()) == set(needed[:5000].sum(0).topk(13).indices.tolist())
    shuffled = x[torch.randperm(len(x))]
    for choice, read in ((own, x), (other, shuffled)):
        predictor, _ = fit_predictor(read[:5000], needed[:5000], settings)
        choice.add(predictor, read[5000:], needed[5000:])
    constant = float((fixed.choose(x[5000:]) & needed[5000:]).sum() / needed[5000:].sum())
    assert own.read / own.units == pytest.approx(0.2, abs=0.02) == other.read / other.units
    assert own.hits / own.needed > constant + 0.1 and abs(other.hits / other.needed - constant) < 0.03


def test_the_oracle_reads_the_largest_parts_of_every_token() -> None:
    measure = tool("measure_sparsity.py")
    mlp = tiny_decoder(dtype=torch.float64).block(0).mlp
    assert isinstance(mlp, FeedForward)
    x = torch.randn(5, TINY.hidden, dtype=torch.float64)
    torch.testing.assert_close(measure.NeededNeurons(mlp, 1.0)(x), mlp(x))
    gate, up = mlp.gate_up(x).chunk(2, -1)
    parts = (torch.nn.functional.silu(gate) * up)[..., None] * mlp.down.weight.T
    for row, found in zip(parts, measure.NeededNeurons(mlp, 0.25)(x), strict=True):
        kept = sorted(row, key=lambda part: -float(part.norm()))[: TINY.ffn // 4]
        torch.testing.assert_close(found, torch.stack(kept).sum(0))
    output = Linear(torch.randn(6, 8, dtype=torch.float64))
    mixed = torch.randn(4, 8, dtype=torch.float64)
    of_heads = torch.stack([m @ w.T for m, w in zip(mixed.chunk(2, -1), output.weight.chunk(2, -1), strict=True)], 1)
    best = of_heads[torch.arange(4), of_heads.norm(dim=-1).argmax(1)]
    torch.testing.assert_close(measure.NeededHeads(output, 2, 0.5)(mixed), best)


def test_every_division_computes_what_the_undivided_model_computes() -> None:
    divisions = tool("measure_division.py")
    decoder, rules, tokens = tiny_decoder(), [GateThreshold(0.05)] * TINY.layers, random_tokens(9, TINY.vocab)
    undivided = sparse_decoder(decoder, rules)
    counts = torch.randint(0, 100, (TINY.layers, TINY.ffn), generator=torch.Generator().manual_seed(1))
    sparse, dense = all_logits(undivided, tokens), all_logits(decoder, tokens)
    assert not np.allclose(sparse, dense, atol=1e-6)
    for name, arrangement in divisions.arrangements(counts, 0.5, 0).items():
        assert arrangement.order.sort(1).values.tolist() == [list(range(TINY.ffn))] * TINY.layers
        assert name.startswith("all on") or sum(arrangement.hot) == counts.numel() // 2
        divided, networks = divisions.divide(
            decoder, rules, arrangement, [divisions.EmulatedDevice(float("inf")) for _ in range(2)]
        )
        expected = dense if arrangement.dense else sparse
        np.testing.assert_allclose(all_logits(divided, tokens), expected, atol=1e-12)
        assert not networks[0].reads, "a prompt is not timed"
        one = all_logits(divided, tokens[:1])
        np.testing.assert_allclose(one, expected[:1], atol=1e-12)
        with torch.inference_mode():
            read = [n.choose(undivided_input(undivided, i, tokens[:1])).sum() for i, n in enumerate(networks)]
        wanted = [TINY.ffn] * TINY.layers if arrangement.dense else [int(n) for n in read]
        assert [sum(n.reads[0]) for n in networks] == wanted
        if name == "all on the fast side":
            assert [n.reads[0][1] for n in networks] == [0] * TINY.layers


def undivided_input(decoder: torch.nn.Module, layer: int, tokens: list[int]) -> torch.Tensor:
    """What a sparse network reads in a pass."""
    seen = list[torch.Tensor]()
    hook = sparse_networks(decoder)[layer].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    all_logits(decoder, tokens)  # type: ignore[arg-type]
    hook.remove()
    return seen[0]


def test_two_sides_work_at_once_and_no_faster_than_their_memory() -> None:
    divisions = tool("measure_division.py")
    devices, both = [divisions.EmulatedDevice(1e4) for _ in range(2)], Barrier(2, timeout=60)

    def work() -> torch.Tensor:
        both.wait()
        return torch.ones(1)

    start = time.perf_counter()
    futures = [device.submit(work, 1000) for device in devices]
    assert sum(future.result() for future in futures) == 2 and time.perf_counter() - start >= 0.1


def test_simulated_and_forecast_times_by_hand() -> None:
    divisions = tool("measure_division.py")
    sides = Sides(Side("fast", 100.0), Side("slow", 10.0))
    reads = np.array([[[4, 1], [2, 0]], [[0, 2], [0, 2]]])  # layers, tokens, sides
    run = divisions.Run([], reads, np.zeros(2))
    # Neurons of 5 bytes: 0.5 s and 0.1 s in the first layer, 1 s twice in the second.
    assert run.simulated(sides, 5) == pytest.approx((0.5 + 0.1) / 2 + 1.0) and run.fast_share() == 6 / 11
    order = torch.tensor([[2, 0, 1], [0, 1, 2]])
    frequency = torch.tensor([[0.5, 0.25, 1.0], [0.5, 0.5, 0.5]])
    # 2 of 3 hot: 7.5 bytes at 100 against 1.25 at 10; none hot: 7.5 at 10.
    arrangement = divisions.Arrangement(order, (2, 0))
    assert arrangement.forecast(frequency, sides, 5) == pytest.approx(0.125 + 0.75)
    assert divisions.Arrangement(order, (3, 0), True).forecast(frequency, sides, 5) == pytest.approx(0.15 + 1.5)


def printed(capsys: pytest.CaptureFixture[str], name: str, *arguments: str | Path) -> list[list[str]]:
    """The cells of the table that a tool prints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        tool(name).main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.exhaustive
def test_both_tools_measure_a_model_of_relu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "relu"
    text.write_text("\n\n".join(f"def f{i}(x): return x + {i}" for i in range(300)), "utf-8")
    sizes = "--layers", "2", "--hidden", "64", "--ffn", "128", "--vocab", "300", "--sequence", "32"
    few = "--steps", "40", "--batch-tokens", "128", "--activation", "relu", "--text", text
    made = run_foretell("train", "decoder", *sizes, *few, "--out", out)
    assert made.exit_code == 0, (made.output, made.exception)
    shares = "--shares", "0.2", "1", "--head-shares", "0.5"
    part, whole, heads = printed(
        capsys, "measure_sparsity.py", out, "--fit-tokens", "4096", "--held-tokens", "1024", "--rank", "16", *shares
    )
    assert float(part[1][:-1]) > float(part[2][:-1]) and "of the heads" in heads[0]
    assert whole[1] == whole[2] == "100.0%" and whole[3] == whole[4] == whole[5], "all neurons are the dense model"
    tokens = "--prompts", "2", "--tokens", "4", "--timed-tokens", "2", "--count-tokens", "512", "--share", "0.5"
    rows = printed(capsys, "measure_division.py", out, *tokens, "--bandwidths", "4000", "400")
    assert len(rows) == 7 and all(row[-1] == "2 of 2" for row in rows)
    assert [row[2] for row in rows if row[1] == "all on the fast side"] == ["100.0%"]
