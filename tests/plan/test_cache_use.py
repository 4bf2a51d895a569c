"""tools/measure_plan.py: cached and attended tokens of an answer with forks, against what a list of every pass says."""

import runpy
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "measure_plan.py"
FORK, CHILD = 90, 91


def counted(streams: list[tuple[list[int], list[int]]]) -> tuple[int, int]:
    """Cached at most and attended to, from the sequences that every stream has read, pass by pass."""
    begin = list[int]()
    for prompt, _ in streams:
        if not begin:
            begin.append(0)
            continue
        # The pass in which its parent wrote the fork: the place of its last fork in that parent's sequence.
        (parent,) = (j for j, (p, t) in enumerate(streams[: len(begin)]) if [*p, *t][: len(prompt) - 1] == prompt[:-1])
        begin.append(begin[parent] + len(prompt) - 1 - len(streams[parent][0]))
    most = attended = 0
    for step in range(100):
        prefixes = set()
        for b, (prompt, tokens) in zip(begin, streams, strict=True):
            if b <= step < b + len(tokens):
                read = [*prompt, *tokens[: step - b]]
                attended += len(read)
                prefixes |= {tuple(read[: i + 1]) for i in range(len(read))}
        most = max(most, len(prefixes))
    return most, attended


@pytest.mark.parametrize("rest", [1, 6, 20])
def test_shared_tokens_are_cached_once(rest: int) -> None:
    prompt, root = [1, 2, 3, 4], [5, 6, FORK, 7, FORK, *range(10, 10 + rest), 80]
    first, second = [*prompt, 5, 6, FORK, CHILD], [*prompt, *root[:5], CHILD]
    details = [30, 31, 32, FORK, 33, 34, 35, 36, 81], [40, 41, 42, 82]
    inner = [*first, *details[0][:4], CHILD]
    streams = [(prompt, root), (first, details[0]), (second, details[1]), (inner, [50, 51, 52, 53, 54, 55, 56, 83])]
    use = runpy.run_path(str(TOOL))["cache_use"]([(p, len(t)) for p, t in streams])
    assert (use.cached, use.attended) == counted(streams)
    plain = sum(len([t for t in tokens if t < 80]) for _, tokens in streams) + 1
    assert use.plain_cached == 4 + plain - 1
    assert use.plain_attended == sum(4 + i for i in range(plain))
