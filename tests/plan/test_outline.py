"""Reading skeletons."""

import pytest

from foretell.plan.outline import read_skeleton


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("1. Keep regular hours\n2. Avoid late coffee", ("Keep regular hours", "Avoid late coffee")),
        ("1.Dark\n 2) **Quiet:**\n3. Cool.", ("Quiet", "Cool")),
        ("Here is one:\n\n1. One\nmore\n\n2. Two\nEnd", ("One", "Two")),
        ("1. One\n1. Another\n3. Three", ("One", "Three")),
        ("1. One\n2. \n3. " + "word " * 16 + "\n4. Four", ("One", "Four")),
        ("- One\n- Two", ()),
        ("", ()),
        ("1. One\n2. Two\n3. Three\n4. Four\n5. Five", ("One", "Two", "Three", "Four")),
    ],
)
def test_points_of_a_list(text: str, points: tuple[str, ...]) -> None:
    found = read_skeleton(text, 4, finished=True)
    assert found.points == points and found.is_complete


def test_the_last_line_counts_once_it_is_finished() -> None:
    text = "1. One\n2. Two"
    assert read_skeleton(text, 4, finished=False).points == ("One",)
    assert not read_skeleton(text + "\n", 4, finished=False).is_complete
    assert read_skeleton(text + "\n", 2, finished=False).is_complete


def test_a_repeated_point_ends_the_skeleton() -> None:
    text = "1. Use soil\n2. Use water\n3. use  SOIL.\n4. Use light\n"
    for finished in (False, True):
        found = read_skeleton(text, 8, finished)
        assert found.points == ("Use soil", "Use water") and found.is_complete
