"""A pass over token trees in one kernel call against the parts of the network, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from foretell.core.sampling import CounterRNG, SamplingParams
from foretell.core.tree import tree_from_lists
from foretell.distributions.sampler import sample, sampling_struct
from foretell.model import kernels as native
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.kernels.structures import Precision, Sampling
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


@pytest.mark.parametrize(
    "params",
    [SamplingParams(1.0), SamplingParams(0.7, top_p=0.9), SamplingParams(2.0, top_k=5), SamplingParams(1.0, min_p=0.1)],
    ids=["all", "top_p", "top_k", "min_p"],
)
def test_a_pass_samples_as_far_as_its_drafts_are_right(params: SamplingParams) -> None:
    """What torch samples from the same logits, with the noise of seed and position; elsewhere nothing."""
    runner, _ = runners("float32")
    rng, sequence = CounterRNG(11), 8
    runner.forward([0, 1], tree_from_lists([list(range(1, sequence))] * 2, [list(range(-1, sequence - 2))] * 2))
    for row in (0, 1):
        runner.commit(row, range(sequence - 1))
    token, parent, path = [9], [-1], [0]
    for _ in range(4):
        runner.sample_next([sampling_struct(params, rng.seed_key), Sampling()])
        output = runner.forward([0, 1], tree_from_lists([token] * 2, [parent] * 2))
        drawn = int(output.sampled[0, path[-1]]) if output.sampled is not None else -1
        token += [(drawn + 1) % CONFIG.vocab, drawn]
        parent += [path[-1]] * 2
        path.append(len(token) - 1)
    assert output.sampled is not None and (output.sampled[1] == -2).all()
    keys = [rng.key(sequence + depth) for depth in range(len(path) - 1)]
    rows = [int(output.logit_index[0, node]) for node in path[:-1]]
    drawn_by_torch = sample(output.logits.double(), rows, [params] * len(rows), keys)
    expected = dict(zip(path[:-1], drawn_by_torch, strict=True))
    assert output.sampled[0].tolist() == [expected.get(node, -2) for node in range(output.sampled.shape[1])]
    assert runner.forward([0, 1], tree_from_lists([[9]] * 2, [[-1]] * 2)).sampled is None
