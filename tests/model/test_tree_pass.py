"""A pass over token trees in one kernel call against the parts of the network, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from foretell.core.tree import tree_from_lists
from foretell.model import kernels as native
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.kernels.structures import Precision
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.testing import TINY, tiny_decoder

pytestmark = pytest.mark.skipif(not native.available(), reason=native.unavailable_reason())
CONFIG = replace(TINY, vocab=50, hidden=64, head_dim=16, ffn=96)


def runners(precision: Precision, softcap: float = 0.0) -> tuple[DecoderRunner, DecoderRunner]:
    """The one-call pass, and a runner that calls embedding, blocks, norm and head one by one."""
    config = replace(CONFIG, logit_softcap=softcap)
    network = NativeDecoder(tiny_decoder(config, dtype=torch.float32), precision)
    whole, parts = DecoderRunner(network), DecoderRunner(network)
    parts._tree_network = None
    return whole, parts


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("hidden_layers", [(), (0, 1), (1, 2), (2, 3)])
def test_one_call_gives_the_numbers_of_the_parts(precision: Precision, hidden_layers: tuple[int, ...]) -> None:
    prompts = tree_from_lists([list(range(1, 9)), list(range(20, 25))], [list(range(-1, 7)), list(range(-1, 4))])
    tree = tree_from_lists([[9, 10, 11, 12, 13, 14], [25, 26, 27]], [[-1, 0, 0, 1, 2, 4], [-1, 0, 1]])
    scored = tree.active.copy()
    scored[0, 2] = False
    outputs = []
    for runner in runners(precision):
        runner.forward([0, 2], prompts)
        runner.commit(0, range(8))
        runner.commit(2, range(5))
        first = runner.forward([0, 2], tree, scored=scored, hidden_layers=hidden_layers)
        runner.commit(0, [0, 2, 4])
        second = runner.forward([0], tree_from_lists([[15, 16]], [[-1, 0]]))
        outputs.append((first, second))
    for one, other in zip(*outputs, strict=True):
        assert torch.equal(one.logits, other.logits)
        assert (one.logit_index == other.logit_index).all() and (one.hidden_index == other.hidden_index).all()
        assert all(torch.equal(a, b) for a, b in zip(one.hidden_states, other.hidden_states, strict=True))
        assert one.argmax is not None and (one.argmax == one.logits.argmax(-1).numpy()).all()


def test_logits_are_capped() -> None:
    one, other = (runner.forward([0], tree_from_lists([[1, 2]], [[-1, 0]])) for runner in runners("float32", 5.0))
    assert torch.equal(one.logits, other.logits) and float(one.logits.abs().max()) < 5
    assert one.argmax is None


def test_nothing_may_be_scored() -> None:
    runner, _ = runners("float32")
    tree = tree_from_lists([[1, 2, 3]], [[-1, 0, 1]])
    output = runner.forward([0], tree, scored=np.zeros_like(tree.valid), hidden_layers=(2,))
    assert output.logits.shape == (0, 50) and output.hidden_states[0].shape == (3, 64)
