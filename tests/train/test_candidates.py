"""Sampled softmax: the choice of candidates, and that the sum over the vocabulary is unbiased."""

import pytest
import torch

from foretell.train.objective.candidates import sample_candidates


def test_the_likeliest_and_the_certain_are_among_them_and_the_count_is_kept() -> None:
    distribution = torch.softmax(3 * torch.randn(6, 40), -1)
    certain = torch.tensor([31, 7])
    found = sample_candidates(distribution.log(), 16, certain)
    assert found is not None
    columns = found.columns.tolist()
    assert columns == sorted(set(columns)) and len(columns) == 16
    assert {31, 7} <= set(columns)
    mass = distribution.sum(0)
    mass[certain] = torch.inf
    assert set(mass.argsort(descending=True)[:12].tolist()) <= set(columns)
    assert (found.logit_offset > 0).sum() == 4
    assert found.logit_offset.max().exp().item() == pytest.approx(28 / 4)


@pytest.mark.parametrize("count", [0, 40, 50])
def test_none_are_chosen_where_nothing_would_be_left_out(count: int) -> None:
    assert sample_candidates(torch.zeros(2, 40), count) is None


def test_the_sum_over_the_vocabulary_is_right_on_average() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 60)
    whole = logits.exp().sum(-1)
    sums = []
    for _ in range(4000):
        some = sample_candidates(logits, 20)
        assert some is not None
        sums.append((logits[:, some.columns] + some.logit_offset).exp().sum(-1))
    torch.testing.assert_close(torch.stack(sums).mean(0), whole, rtol=0.02, atol=0)
