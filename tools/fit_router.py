"""Fits the router of skeletons, `src/foretell/plan/router.json`: a linear function of a question's words.

    python tools/fit_router.py

Questions are made of `tools/route_questions.toml`, with a seed. The least squares of `foretell train exits` give the
weights. Reports how often the router is right on questions whose wording it has not seen (ten folds of the wordings),
and on `tools/plan_questions.jsonl`, which it never sees.
"""

import argparse
import json
import random
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from foretell.plan.router import WEIGHTS, TrainedRouter, word_features
from foretell.train.exits.least_squares import LeastSquares

_HERE = Path(__file__).parent
RIDGE = 1.0
"""The best of 0.1, 0.3, 1 and 3 on the folds."""
_PER_WORDING, _FOLDS, _LEAST_WORDINGS = 6, 10, 2
Question = tuple[str, bool]


def read_wordings() -> tuple[list[Question], list[str]]:
    """Wordings with whether their answers have independent points, and subjects."""
    tables = tomllib.loads((_HERE / "route_questions.toml").read_text("utf-8"))
    return [(w, kind == "points") for kind in ("points", "steps", "none") for w in tables[kind]], tables["subjects"]


def fit(wordings: Sequence[Question], subjects: Sequence[str], seed: int, ridge: float) -> TrainedRouter:
    """The router of questions made of the wordings. What occurs in one wording alone, or in none but by its subject, is
    no feature. Both answers weigh the same.
    """
    rng = random.Random(seed)
    counts = Counter(f for wording, _ in wordings for f in word_features(wording.replace("{0}", "").replace("{1}", "")))
    names = sorted(f for f, n in counts.items() if n >= _LEAST_WORDINGS)
    index = {name: i for i, name in enumerate(names)}
    solver = LeastSquares(len(names) + 1, 1, ridge)
    share = sum(points for _, points in wordings) / len(wordings)
    for wording, points in wordings:
        rows = torch.zeros(_PER_WORDING, len(names) + 1)
        for row in rows:
            for feature in word_features(wording.format(*rng.sample(subjects, 2))):
                if feature in index:
                    row[index[feature]] = 1
            row[-1] = 1
        weight = (2 * (share if not points else 1 - share)) ** 0.5
        solver.add(rows * weight, torch.full((len(rows), 1), 1.0 if points else -1.0) * weight)
    weights = [round(w, 3) for w in solver.solve()[0].tolist()]
    return TrainedRouter({n: w for n, w in zip(names, weights, strict=False) if w}, weights[-1])


def report(name: str, router: TrainedRouter, questions: Sequence[Question]) -> None:
    """How many questions with and without points get a skeleton."""
    for wanted in (True, False):
        taken = [router.takes_skeleton(q) for q, points in questions if points is wanted]
        print(f"{name}, {'with' if wanted else 'without'} points: {sum(taken)} of {len(taken)} get a skeleton")


def main() -> None:
    """Fit, report, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ridge", type=float, default=RIDGE)
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    args = parser.parse_args()
    wordings, subjects = read_wordings()
    shuffled = random.Random(args.seed).sample(wordings, len(wordings))
    right = Counter[bool]()
    for i in range(_FOLDS):
        router = fit([w for j, w in enumerate(shuffled) if j % _FOLDS != i], subjects, args.seed, args.ridge)
        for wording, points in shuffled[i::_FOLDS]:
            right[points] += router.takes_skeleton(wording.format(*subjects[:2])) is points
    for points in (True, False):
        print(f"unseen wordings, {points}: {right[points]} of {sum(p is points for _, p in wordings)} right")
    router = fit(wordings, subjects, args.seed, args.ridge)
    rows = [json.loads(line) for line in (_HERE / "plan_questions.jsonl").read_text("utf-8").splitlines()]
    report("plan_questions.jsonl", router, [(r["prompt"], r["list"]) for r in rows])
    args.out.write_text(json.dumps({"bias": router.bias, "weights": router.weights}) + "\n", "utf-8")


if __name__ == "__main__":
    main()
