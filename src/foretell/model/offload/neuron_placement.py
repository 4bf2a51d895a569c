"""Which neurons stay in memory: the placement of PowerInfer (arXiv 2312.12456), solved as an integer program."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

_MOST_GROUPS = 4096
"""Variables of the integer program; neurons are placed in groups where there are more."""
_SECONDS = 10.0
"""Longest time of the solver; after it the placement is greedy."""


@dataclass(frozen=True)
class Placement:
    """How many neurons of every layer are hot, those that tokens choose most often; `share`: that of all choices which
    falls on hot neurons; `solver`: what found it, in words.
    """

    hot: tuple[int, ...]
    share: float
    solver: str


def place_neurons(
    counts: Int[np.ndarray, "l f"], capacity: int, least: int = 0, seconds: float = _SECONDS
) -> Placement:
    """Choose the hot neurons: of all that fit, those that maximise how often a hot neuron is chosen. A layer has either
    none or at least `least`, below which a share in the fast memory is not worth what it costs to combine two sums.
    Where the solver finds no answer in time, neurons are taken by frequency, which `Placement.solver` says.

    `counts`: how often every neuron was chosen; `capacity`: neurons of all layers that fit.

    Raises:
        ValueError: a number is negative, or the layers have fewer neurons than `least`.
    """
    if capacity < 0 or not 0 <= least <= counts.shape[1]:
        raise ValueError(
            f"a placement needs a capacity of at least 0 and a least number of 0 to {counts.shape[1]} neurons per "
            f"layer, found {capacity} and {least}"
        )
    ranked = -np.sort(-counts.astype(np.float64), axis=1)
    greedy = by_frequency(ranked, capacity, least)
    size = -(-counts.size // _MOST_GROUPS)
    solution = _solve(ranked, capacity, least, size, seconds)
    if solution is None:
        words = f"greedy by frequency: the solver found nothing in {seconds:g} s"
        return Placement(tuple(map(int, greedy)), _share(ranked, greedy), words)
    # Groups leave a rest of the capacity, which single neurons take.
    solution = _fill(ranked, solution, capacity, least)
    best = solution if _mass(ranked, solution) >= _mass(ranked, greedy) else greedy
    return Placement(tuple(map(int, best)), _share(ranked, best), f"integer program, groups of {size}")


def by_frequency(ranked: Float[np.ndarray, "l f"], capacity: int, least: int = 0) -> Int[np.ndarray, " l"]:
    """Hot neurons per layer where the most frequent ones are taken and layers below `least` have none.

    `ranked`: the counts of every layer, falling.
    """
    allowed = np.ones(len(ranked), bool)
    while True:
        hot = _most_frequent(ranked * allowed[:, None] - ~allowed[:, None], capacity)
        short = (hot < least) & (hot > 0)
        if not short.any():
            return hot
        allowed[np.flatnonzero(short)[np.argmin(hot[short])]] = False


def _most_frequent(ranked: Float[np.ndarray, "l f"], capacity: int) -> Int[np.ndarray, " l"]:
    """Per layer, how many of the `capacity` largest numbers it has; negative numbers are not taken."""
    order = np.argsort(-ranked, axis=None, kind="stable")[:capacity]
    order = order[ranked.ravel()[order] >= 0]
    return np.bincount(order // ranked.shape[1], minlength=len(ranked))


def _solve(
    ranked: Float[np.ndarray, "l f"], capacity: int, least: int, size: int, seconds: float
) -> Int[np.ndarray, " l"] | None:
    """Variables: whether a group is hot, then whether a layer has hot neurons."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    layers, neurons = ranked.shape
    starts = np.arange(0, neurons, size)
    sizes = np.minimum(size, neurons - starts).astype(np.float64)
    value = np.add.reduceat(ranked, starts, axis=1)
    groups = layers * len(starts)
    in_layer = np.kron(np.eye(layers), sizes[None])
    rows = [
        np.concatenate([np.tile(sizes, layers), np.zeros(layers)])[None],
        np.hstack([in_layer, -least * np.eye(layers)]),
        np.hstack([in_layer, -neurons * np.eye(layers)]),
    ]
    lower = np.concatenate([[-np.inf], np.zeros(layers), np.full(layers, -np.inf)])
    upper = np.concatenate([[capacity], np.full(layers, np.inf), np.zeros(layers)])
    objective = np.concatenate([-value.ravel() / max(ranked.sum(), 1), np.zeros(layers)])
    # Of equal groups the earlier ones are taken, so that the hot neurons are the first ones.
    objective[:groups] += np.tile(1e-9 * np.arange(len(starts)) / neurons, layers)
    result = milp(
        objective,
        integrality=np.ones(groups + layers),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(csr_array(np.vstack(rows)), lower, upper),
        options={"time_limit": seconds, "mip_rel_gap": 0},
    )
    if result.x is None:
        return None
    return np.rint(result.x[:groups]).reshape(layers, -1).astype(np.int64) @ sizes.astype(np.int64)


def _fill(
    ranked: Float[np.ndarray, "l f"], hot: Int[np.ndarray, " l"], capacity: int, least: int
) -> Int[np.ndarray, " l"]:
    """Give what is left of the capacity to the most frequent neurons of layers that may have more."""
    rest = ranked.copy()
    for layer, count in enumerate(hot):
        rest[layer, :count] = -1
        if count < max(least, 0):
            rest[layer] = -1
    return hot + _most_frequent(rest, capacity - int(hot.sum()))


def _mass(ranked: Float[np.ndarray, "l f"], hot: Int[np.ndarray, " l"]) -> float:
    return float(sum(row[:count].sum() for row, count in zip(ranked, hot, strict=True)))


def _share(ranked: Float[np.ndarray, "l f"], hot: Int[np.ndarray, " l"]) -> float:
    return _mass(ranked, hot) / max(float(ranked.sum()), 1.0)
