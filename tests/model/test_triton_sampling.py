"""The sampling and acceptance kernels on a GPU or in Triton's interpreter, and compiled for four targets without a
device.
"""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from covering import covering_parameters
from exact import Chooser, RejectionByTests, distance, random_distribution, sequence_distribution, tree_of
from foretell.accept import Rejection
from foretell.core import draft_tests
from foretell.core.draft_tests import NodeDrafts, NodeTests
from foretell.core.sampling import CounterRNG, SamplingParams, Stream
from foretell.core.tree import TokenTree
from foretell.distributions import sampler
from foretell.distributions.sampler import draw, kept_tokens, sample
from helpers import p_value, process

pytest.importorskip("triton")
from foretell.model.triton import acceptance

CASES = list(
    product(
        ("1e-320", "0.3", "1.0", "1e6"),  # temperature
        ("0", "1", "12", "2000"),  # top-k
        ("1e-300", "0.5", "0.999", "1.0"),  # top-p
        ("0.0", "1e-9", "0.05", "1.0"),  # min-p
        ("1", "33", "1025", "6001"),  # vocabulary
        ("normal", "ties", "equal", "infinite", "nan", "none"),
    )
)
SAMPLE = [CASES[i] for i in np.random.default_rng(0).permutation(len(CASES))[:1500]]
COVERING = [pytest.param(SAMPLE[i], marks=marks) for i, marks in covering_parameters(SAMPLE, 2).items()]
SEEDS = range(3)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "has_triton", lambda device: True)


def random_logits(vocab: int, kind: str) -> torch.Tensor:
    x = 4 * torch.randn(len(SEEDS), vocab, generator=torch.Generator().manual_seed(vocab))
    if kind == "ties":
        x = x.round()
    if kind == "equal":
        x = torch.full_like(x, 2.5)
    if kind == "infinite":
        x[:, 1::3] = -torch.inf
        x[0, vocab // 2] = torch.inf
    if kind == "nan":
        x[:, 1::2] = torch.nan
    if kind == "none":
        x[1:3] = torch.tensor([[torch.nan], [-torch.inf]])
    return x.to(DEVICE)


@pytest.mark.parametrize("case", COVERING, ids=" ".join)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_the_kernel_keeps_and_draws_what_the_cpu_does(case: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    temperature, top_k, top_p, min_p, vocab, kind = case
    x = random_logits(int(vocab), kind)
    params = SamplingParams(float(temperature), int(top_k), float(top_p), float(min_p))
    keys = [CounterRNG(seed).key(seed) for seed in SEEDS]
    tokens, weights = draw(x, SEEDS, [params] * len(SEEDS), keys)
    possible = [row for row in SEEDS if tokens[row] >= 0]
    assert possible == [row for row in SEEDS if kind != "none" or row not in (1, 2)]
    host, weights = x.cpu(), weights.cpu()
    expected = sample(host, possible, [params] * len(possible), [keys[row] for row in possible])
    assert tokens[possible].tolist() == expected
    for row in possible:
        kept = kept_tokens(host[row], params)
        np.testing.assert_array_equal(weights[row].nonzero()[:, 0].numpy(), kept.token)
        np.testing.assert_array_equal(weights[row, kept.token].numpy(), kept.weight)
    monkeypatch.setattr(sampler, "has_triton", lambda device: False)
    assert draw(x, SEEDS, [params] * len(SEEDS), keys)[0].tolist() == tokens.tolist(), "torch on a device"


def test_rows_of_one_launch_have_settings_of_their_own() -> None:
    x = random_logits(5000, "normal")
    params = [SamplingParams(0.7, 3), SamplingParams(top_p=0.8), SamplingParams(2.0, 500, 0.9, 1e-3)]
    keys = [CounterRNG(seed).key(9) for seed in SEEDS]
    tokens, weights = draw(x, SEEDS, params, keys)
    for row in SEEDS:
        token, alone = draw(x, [row], [params[row]], [keys[row]])
        assert tokens[row] == token[0] and torch.equal(weights[row], alone[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "params",
    [SamplingParams(1.3), SamplingParams(0.8, top_k=5, top_p=0.9)],
    ids=["whole", "cut"],
)
def test_what_the_kernel_draws_follows_the_distribution(params: SamplingParams) -> None:
    x, count = torch.randn(1, 12, generator=torch.Generator().manual_seed(1)), 120
    keys = [CounterRNG(3).key(i) for i in range(count)]
    tokens = draw(x.to(DEVICE), [0] * count, [params] * count, keys)[0].cpu()
    assert p_value(np.bincount(tokens.numpy(), minlength=12), process(x[0].numpy(), [], 0, params)) > 1e-3


class Known:
    """A target with these weights and random numbers at every node."""

    def __init__(self, weights: torch.Tensor, uniform: np.ndarray) -> None:
        self._p, self._uniform = weights / weights.sum().double(), uniform

    def probabilities(self, row: int, node: int) -> torch.Tensor:
        return self._p

    def uniform(self, row: int, node: int, stream: Stream, number: int = 0) -> float:
        return float(self._uniform[-1 if stream == Stream.RESIDUAL else number])

    def tested(self, row: int, node: int) -> None:
        return None


def by_kernel(weights: torch.Tensor, place: torch.Tensor, q: torch.Tensor, drafts: NodeDrafts) -> NodeTests:
    on_device = NodeDrafts(*(part.to(DEVICE) for part in drafts))
    launch, tests = acceptance.test_drafts(weights.to(DEVICE), place.to(DEVICE), q.to(DEVICE), on_device)
    launch.run()
    return NodeTests(*(part.cpu() for part in tests))


@pytest.mark.covering(2)
@pytest.mark.parametrize("test", [draft_tests.test_drafts, by_kernel], ids=["torch", "kernel"])
@pytest.mark.parametrize("distinct", [False, True], ids=["independent", "distinct"])
@pytest.mark.parametrize("sources", [1, 2])
@pytest.mark.parametrize("vocab", [3, 40, 2100])
def test_the_tests_of_many_nodes_are_those_of_the_acceptor(
    test: object, distinct: bool, sources: int, vocab: int
) -> None:
    nodes, most = 12, 4
    generator = np.random.default_rng(vocab + sources)
    q = generator.dirichlet(np.full(vocab, 0.7), sources).astype(np.float32)
    weights = torch.from_numpy((generator.dirichlet(np.full(vocab, 0.7), nodes) * 2**40).astype(np.int64))
    count = generator.integers(1, most + 1, nodes)
    source, uniform = generator.integers(sources, size=(nodes, most)), generator.random((nodes, most + 1))
    draft, accepted = np.zeros((nodes, most), np.int64), list[tuple[int, int]]()
    for i in range(nodes):
        left = q.astype(np.float64)
        for t in range(count[i]):
            rest = left[source[i, t]]
            draft[i, t] = generator.choice(vocab, p=rest / rest.sum()) if rest.sum() else 0
            left[:, draft[i, t]] *= not distinct
        children = {t + 1: (0, int(draft[i, t]), int(source[i, t])) for t in range(count[i])}
        tree, numbers = tree_of(children, list(q), distinct), np.append(uniform[i, : count[i]], uniform[i, -1])
        child, token = Rejection()._accept_child(tree, 0, 0, [*children], Known(weights[i], numbers))  # type: ignore[arg-type]
        accepted.append((-1 if child is None else child - 1, token))
    arrays = draft.astype(np.int32), source.astype(np.int32), count.astype(np.int32), np.full(nodes, distinct), uniform
    place = torch.arange(nodes, dtype=torch.int32)
    results = test(weights, place, torch.from_numpy(q), NodeDrafts(*map(torch.from_numpy, arrays)))  # type: ignore[operator]
    assert list(zip(results.accepted.tolist(), results.token.tolist(), strict=True)) == accepted
    assert len(set(accepted)) > 2 and (vocab == 3 or any(number < 0 for number, _ in accepted))


@pytest.mark.exhaustive
def test_the_kernels_compile_for_four_targets_without_spills() -> None:
    tool = Path(__file__).parents[2] / "tools" / "gpu_kernels.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, tool, "--heads", ""], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("largest", "weigh", "select", "finish", "reject"):
        assert done.stdout.count(f"{name}_kernel") == 4


@pytest.mark.parametrize("distinct", [False, True], ids=["independent", "distinct"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_the_law_of_the_kernel_is_the_targets(seed: int, distinct: bool) -> None:
    p, q = random_distribution(3, seed), random_distribution(3, seed + 100)

    def grow(chooser: Chooser) -> TokenTree:
        left, tokens = q(()).copy(), list[int]()
        for _ in range(2):
            if left.sum():
                tokens.append(chooser.choose(left.tolist()))
                left[tokens[-1]] *= not distinct
        return tree_of({i + 1: (0, token, 0) for i, token in enumerate(tokens)}, [q(())], distinct)

    assert distance(sequence_distribution(RejectionByTests(by_kernel), grow, p, 2), p) < 1e-12
