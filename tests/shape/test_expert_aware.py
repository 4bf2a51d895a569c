"""Trees that share experts: what is predicted, which nodes are kept, and what a mixture of experts then decodes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from jaxtyping import Int

from foretell.accept import Match
from foretell.catalogue import build
from foretell.catalogue.build_context import BuildContext
from foretell.core.context import ModelOutput, StepResult
from foretell.core.expert_forecast import ExpertForecast
from foretell.core.sampling import SamplingParams
from foretell.core.tree import TokenTree, tree_from_lists
from foretell.draft import DraftModel, NoDrafter
from foretell.draft.base import Predictor
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod, Method
from foretell.engine.request import Completion, Request
from foretell.model.block.decoder import Decoder
from foretell.model.config.model import MoEConfig
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import DynamicTree, ExpertAwareTree, ExpertSizes, RootOnly, Shape
from foretell.testing import TINY, tiny_decoder
from helpers import VOCAB, context_of, random_tokens

SIZES = ExpertSizes(count=8, active=2, layers=3, expert=100, fixed=300)


class Given(Shape[Predictor]):
    """Gives one tree again and again."""

    drafter_type = Predictor

    def __init__(self, tree: TokenTree) -> None:
        self._tree = tree

    def grow(self, draft: Predictor, context: object) -> TokenTree:
        """The tree."""
        return self._tree


def routes(*experts: tuple[int, int]) -> Int[np.ndarray, "l t k"]:
    """Routes of tokens that have the same experts in every layer."""
    return np.tile(np.array(experts, np.int32), (SIZES.layers, 1, 1))


def kept(tree: TokenTree, known: dict[int, tuple[int, int]]) -> list[int]:
    """The nodes that are kept where the experts of some tokens are known for certain."""
    shape = ExpertAwareTree(Given(tree), SIZES)
    for _ in range(400):
        shape.forecast.observe(np.array(list(known)), routes(*known.values()))
    assert shape.forecast.hit_share > 0.98
    found = shape.grow(DraftModel(DecoderRunner(tiny_decoder())), context_of([1, 2]))
    return [int(i) for i in np.flatnonzero(found.valid[0])]


def test_a_forecast_is_the_last_experts_of_a_token_or_those_that_are_used_most() -> None:
    forecast = ExpertForecast(SIZES.layers, SIZES.count, SIZES.active)
    assert forecast.probabilities(5).sum(1) == pytest.approx(2.0)
    for _ in range(200):
        forecast.observe(np.array([5, 6]), routes((0, 1), (2, 3)))
    assert forecast.hit_share > 0.95
    assert forecast.probabilities(5)[:, :2].min() > 0.95 > 0.1 > forecast.probabilities(5)[:, 2:].max()
    unknown = forecast.probabilities(7)
    assert unknown[:, :4].min() > 0.4 and unknown[:, 4:].max() < 0.1 and unknown.sum(1) == pytest.approx(2.0)


def test_a_forecast_that_does_not_come_true_is_not_believed() -> None:
    forecast, random = ExpertForecast(SIZES.layers, SIZES.count, SIZES.active), np.random.default_rng(0)
    for _ in range(300):
        forecast.observe(np.array([5]), routes(tuple(random.choice(8, 2, replace=False))))
    assert 0.1 < forecast.hit_share < 0.45  # chance is 2 of 8


def five_nodes(*scores: float) -> TokenTree:
    """Tokens 2 and 3 below the root, token 1, and again below the second of them."""
    return tree_from_lists([[1, 2, 3, 2, 3]], [[-1, 0, 0, 2, 2]], [[1.0, *scores]])


def test_nodes_whose_experts_are_there_are_kept_before_better_ones() -> None:
    """Two experts that no other node has cost as much as two thirds of a token, as plain decoding does."""
    tree = five_nodes(0.3, 0.25, 0.1, 0.1)
    assert kept(tree, {1: (0, 1), 2: (4, 5), 3: (0, 1)}) == [0, 2, 4]
    assert kept(tree, {1: (0, 1), 2: (0, 1), 3: (4, 5)}) == [0, 1]
    assert kept(tree, {1: (0, 1), 2: (0, 1), 3: (0, 1)}) == [0, 1, 2, 3, 4]


def test_several_nodes_pay_together_for_experts_that_one_alone_does_not() -> None:
    known = {1: (0, 1), 2: (0, 1), 3: (4, 5)}
    assert kept(five_nodes(0.5, 0.45, 0.3, 0.3), known) == [0, 1, 2, 3, 4]
    assert kept(five_nodes(0.5, 0.45, 0.01, 0.01), known) == [0, 1]


def test_trees_without_scores_are_verified_whole() -> None:
    tree = replace(tree_from_lists([[1, 2, 3]], [[-1, 0, 0]]), score=None)
    shape = ExpertAwareTree(Given(tree), SIZES)
    assert shape.grow(DraftModel(DecoderRunner(tiny_decoder())), context_of([1, 2])).valid.all()


def test_tokens_per_weight_are_learned_from_passes_that_decode() -> None:
    tree = tree_from_lists([[1, 2]], [[-1, 0]], [[1.0, 0.9]])
    shape, context = ExpertAwareTree(Given(tree), SIZES), context_of([1, 2])
    index = np.array([[0, 1]])
    for experts, wanted in (((4, 5), 2), ((0, 1), 1)):
        output = ModelOutput(
            torch.zeros(0, 1), index, (), index, (len({0, 1, *experts}),) * 3,
            routes=tuple(routes((0, 1), experts)),
        )  # fmt: skip
        for _ in range(300):
            shape.observe(StepResult(context, tree, output, ((0, 1),), ((5,) * wanted,), (1,)))
        weights = 300 + 100 * 3 * (4 if experts == (4, 5) else 2)
        assert shape.rate == pytest.approx(wanted / weights, rel=0.01)


def mixture(noise: float = 0.0) -> Decoder:
    """A mixture of experts, or a draft model of it with other noise on all weights."""
    config = replace(
        TINY, architecture="mixtral", vocab=VOCAB, hidden=32, head_dim=8,
        experts=MoEConfig(16, 2, 24, layers=(0, 1)),
    )  # fmt: skip
    made = tiny_decoder(config)
    generator = torch.Generator().manual_seed(1)
    for weight in made.parameters():
        weight.data += noise * weight.data.std() * torch.randn(weight.shape, generator=generator) if noise else 0
    return made


def decoded(method: AnyMethod, params: SamplingParams) -> list[Completion]:
    requests = [Request(random_tokens(9, seed=i), replace(params, seed=i), max_new_tokens=30) for i in range(3)]
    return Engine(DecoderRunner(mixture()), method, rows=2).complete(requests)


@pytest.mark.exhaustive_types
@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0), pytest.param(SamplingParams(temperature=0.8), marks=pytest.mark.exhaustive)],
    ids=str,
)
def test_answers_of_a_mixture_are_those_of_plain_decoding_from_fewer_experts(params: SamplingParams) -> None:
    def speculative(shape: Shape[Predictor]) -> list[Completion]:
        return decoded(Method(DraftModel(DecoderRunner(mixture(0.1))), shape, Match()), params)

    tree, sizes = DynamicTree(4, 4, 12), ExpertSizes(16, 2, 2, 1000, 2000)
    plain = decoded(Method(NoDrafter(), RootOnly(), Match()), params)
    whole, shared = speculative(tree), speculative(ExpertAwareTree(tree, sizes))
    for found in (whole, shared):
        assert [c.tokens for c in found] == [c.tokens for c in plain]

    def weights_per_token(found: list[Completion]) -> float:
        passes = sum(c.statistics.target_passes for c in found)
        read = sum(c.statistics.experts_read for c in found)
        return (passes * sizes.fixed + read * sizes.expert) / sum(len(c.tokens) for c in found)

    assert sum(c.statistics.experts_per_pass for c in shared) < sum(c.statistics.experts_per_pass for c in whole)
    assert weights_per_token(shared) < weights_per_token(whole)


def test_the_option_is_for_mixtures_of_experts() -> None:
    draft = (DecoderRunner(mixture(0.1)),)
    made = build("dynamic_tree", BuildContext(VOCAB, mixture(), drafts=draft), {"expert_aware": True})
    assert isinstance(made.tree, ExpertAwareTree)
    # A layer reads 2 of 16 experts of 3 matrices of 24 x 32 beside its attention; 4 heads of 8, of which 2 have keys.
    assert made.tree.sizes == ExpertSizes(16, 2, 2, 3 * 24 * 32, 2 * 32 * (2 * 4 + 2 * 2) * 8 + VOCAB * 32)
    dense = BuildContext(VOCAB, tiny_decoder(replace(TINY, vocab=VOCAB)), drafts=draft)
    with pytest.raises(ValueError, match="expert_aware is for mixtures of experts, and this target"):
        build("dynamic_tree", dense, {"expert_aware": True})
    assert isinstance(build("dynamic_tree", dense, {}).tree, DynamicTree)
