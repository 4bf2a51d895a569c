"""What blocks give up (OWL): against the published formula and counting."""

import pytest
import torch

from foretell.lab.compress.allocation import outlier_share, shares_by_outliers
from foretell.lab.quantize.base import InputStatistics, Role, linears
from foretell.model.block.layer import DecoderBlock
from foretell.testing import TINY, tiny_decoder


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def moment(seed: int, inputs: int) -> torch.Tensor:
    x = torch.randn(200, inputs, generator=generator(seed)) * torch.linspace(0.1, 3, inputs)
    return x.T @ x / len(x)


def first_block() -> DecoderBlock:
    block = tiny_decoder(TINY, dtype=torch.float32).blocks[0]
    assert isinstance(block, DecoderBlock)
    return block


@pytest.mark.parametrize("share", [0.05, 0.5, 0.7, 0.97])
def test_owl_shares_follow_the_published_formula_and_keep_their_mean(share: float) -> None:
    outliers = (torch.rand(30, generator=generator()) * 0.02).tolist()
    shares = torch.tensor(shares_by_outliers(outliers, share), dtype=torch.float64)
    assert float(shares.mean()) == pytest.approx(share, abs=1e-12)
    assert shares.min() >= 0 and shares.max() <= 1
    assert shares.argsort().tolist() == torch.tensor(outliers).argsort(descending=True).tolist()
    if 0.16 < share < 0.84:
        ratio = torch.tensor(outliers, dtype=torch.float64)
        ratio = (ratio - ratio.min()) * (1 / (ratio.max() - ratio.min()) * 0.08 * 2)
        kept = ratio - ratio.mean() + (1 - share)
        torch.testing.assert_close(1 - kept, shares)


def test_owl_shares_of_equal_blocks_are_equal() -> None:
    assert shares_by_outliers([0.01] * 4, 0.6) == [0.6] * 4


def test_outliers_are_counted_over_the_whole_block() -> None:
    block = first_block()
    inputs, scores = dict[Role, InputStatistics](), list[float]()
    for k, (role, linear) in enumerate(linears(block).items()):
        linear.weight.data[0, 0] = 40
        second = moment(k, linear.weight.shape[1])
        inputs[role] = InputStatistics(second, second.diagonal())
        scores += [abs(float(w)) * float(second[j, j]) ** 0.5 for row in linear.weight for j, w in enumerate(row)]
    limit = 5 * sum(scores) / len(scores)
    counted = sum(score > limit for score in scores)
    assert counted and outlier_share(block, inputs) == pytest.approx(counted / len(scores), rel=1e-5)
