"""The batch-invariant product, on a GPU or in Triton's interpreter: torch is the oracle of its numbers."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from foretell.model.block import decoder, layer, linear
from foretell.model.block.linear import Linear
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.triton import products
from foretell.testing import TINY, tiny_decoder, tiny_gpt_oss
from helpers import chain_tree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
"""Triton's interpreter does not round to bfloat16 as GPUs do."""


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    launch, out = products.linear(x, weight, bias)
    launch.run()
    result: torch.Tensor = out
    return result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 5, 64), (3, 70, 200), (130, 33, 129), (65, 96, 512)])
def test_products_are_those_of_torch(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x, weight, bias = (
        random(rows, inputs, dtype=dtype),
        random(outputs, inputs, dtype=dtype),
        random(outputs, dtype=dtype),
    )
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    rounding = torch.finfo(dtype).eps * exact.abs() + 1e-6 * inputs**0.5 * 4
    assert ((product(x, weight, bias).double() - exact).abs() <= rounding).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    x, weight = random(150, 300, dtype=dtype), random(40, 300, dtype=dtype)
    together = product(x, weight, None)
    for first, last in ((0, 1), (63, 65), (100, 150), (7, 90)):
        assert torch.equal(product(x[first:last], weight, None), together[first:last])


@pytest.fixture
def invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The switch, and the kernels also in the interpreter."""
    monkeypatch.setenv("FORETELL_ATTENTION", "triton")
    for module in (linear, decoder):
        monkeypatch.setattr(module, "batch_invariant", lambda: True)
    for module in (linear, layer):
        monkeypatch.setattr(module, "runs_kernels", lambda x: not torch.is_grad_enabled())
    monkeypatch.setattr(decoder, "has_triton", lambda device: True)


@pytest.mark.exhaustive
def test_logits_have_the_same_bits_in_every_pass(invariant: None) -> None:
    """Of tokens read at once, in parts, and one by one; the model says so, and one with experts does not."""
    network, tokens = tiny_decoder(replace(TINY, vocab=23), dtype=torch.float32, device=DEVICE), list(range(1, 12))
    assert network.backend.batch_invariant and any(isinstance(m, Linear) for m in network.modules())
    assert not tiny_decoder(tiny_gpt_oss(), dtype=torch.float32, device=DEVICE).backend.batch_invariant
    logits = list[torch.Tensor]()
    for size in (len(tokens), 4, 1):
        runner = DecoderRunner(network)
        parts = [tokens[first : first + size] for first in range(0, len(tokens), size)]
        passes = list[torch.Tensor]()
        for part in parts:
            passes.append(runner.forward([0], chain_tree(part)).logits)
            runner.commit(0, range(len(part)))
        logits.append(torch.cat(passes))
    assert torch.equal(logits[1], logits[0]) and torch.equal(logits[2], logits[0])
