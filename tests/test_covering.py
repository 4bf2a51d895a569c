"""The choice of cases: complete, deterministic and small; the shares of the exhaustive tests are a partition."""

from itertools import chain, combinations, product

import pytest

from covering import Share, covering_cases, read_share


@pytest.mark.parametrize("strength", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(2, 2, 2), (5, 3, 4, 2), (7, 1), (3,) * 5])
def test_every_combination_of_settings_is_in_a_chosen_case(sizes: tuple[int, ...], strength: int) -> None:
    allowed = [case for case in product(*map(range, sizes)) if sum(case) % 5 != 4]
    chosen = [allowed[number] for number in covering_cases([[*map(str, case)] for case in allowed], strength)]
    for some in combinations(range(len(sizes)), min(strength, len(sizes))):
        assert {tuple(case[i] for i in some) for case in chosen} == {tuple(case[i] for i in some) for case in allowed}
    assert len(chosen) < len(allowed) or strength >= sum(size > 1 for size in sizes)


def test_pairs_need_few_cases() -> None:
    cases = list(product("abc", repeat=5))
    assert len(covering_cases(cases, 2)) < 20 < len(cases) == 243
    assert covering_cases(cases, 2) == covering_cases(cases, 2)


def test_values_are_used_equally_often() -> None:
    cases = list(product("abcdef", "xy"))
    assert sorted(cases[number][1] for number in covering_cases(cases, 1)) == [*"xxxyyy"]


def test_no_settings() -> None:
    assert covering_cases([()], 2) == [0]
    assert covering_cases([], 1) == []


def test_the_shares_are_a_partition() -> None:
    names = [f"tests/test_a.py::test_b[{i}]" for i in range(300)]
    shares = [[n for n in names if n in read_share(f"{k}/3")] for k in (1, 2, 3)]
    assert sorted(chain(*shares)) == sorted(names)
    assert all(len(share) > 60 for share in shares)
    assert all(n in read_share("all") and n not in read_share("none") for n in names)


@pytest.mark.parametrize("text", ["", "some", "4/3", "1/0", "-1/3", "1/2/3"])
def test_other_shares_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_share(text)
    assert read_share("2/3") == Share(2, 3)
