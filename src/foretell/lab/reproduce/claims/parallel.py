"""Claims about the target's own guesses of later positions."""

import math

from foretell.lab.reproduce.claim import Claim, Finding, Series, rises
from foretell.lab.reproduce.lab import Lab


def _log_linear(lab: Lab) -> Finding:
    windows = (2, 4, 8, 15)
    runs = [
        (w, lab.run("lookahead", {"max_window_size": w, "max_ngram_size": 4, "max_verification_set_size": w}))
        for w in windows
    ]
    points = [(math.log2(w), r.tokens_per_pass) for w, r in runs]
    values = [y for _, y in points]
    return Finding(
        rises(values, 0.0) and values[-1] - values[0] >= 0.1,
        f"from {values[0]:.2f} tokens per pass with a window of 2 to {values[-1]:.2f} with 15",
        (Series.of("lookahead", points),),
        "binary logarithm of the window",
    )


def _few_fixed_points(lab: Lab) -> Finding:
    points = [(w, lab.run("jacobi", {"max_window_size": w}).tokens_per_pass) for w in (2, 4, 8)]
    values = [y for _, y in points]
    return Finding(
        1.0 <= values[-1] <= 1.5 and rises(values, 0.01),
        f"{values[-1]:.2f} tokens per pass with a window of 8: the iteration never needs more passes than plain "
        f"decoding, "
        "and seldom fewer",
        (Series.of("jacobi", points),),
        "window, tokens",
    )


def _blocks_of_jacobi(lab: Lab) -> Finding:
    points = [(w, lab.run("gauss_seidel_jacobi", {"max_window_size": w}).tokens_per_pass) for w in (2, 3, 6)]
    values = [y for _, y in points]
    return Finding(
        min(values) >= 1.0,
        f"{', '.join(f'{v:.2f}' for v in values)} tokens per pass with blocks of 2, 3 and 6",
        (Series.of("gauss_seidel_jacobi", points),),
        "block, tokens",
    )


CLAIMS = (
    Claim(
        "lookahead",
        "Tokens per pass grow about linearly with the logarithm of the window.",
        "never falling over windows of 2, 4, 8 and 15, and rising by 0.1 at least",
        _log_linear,
    ),
    Claim(
        "jacobi",
        "Jacobi iteration gives the greedy text in at most as many passes as plain decoding; alone it saves little.",
        "between 1 and 1.5 tokens per pass; larger windows do not lower them by more than 1 %",
        _few_fixed_points,
    ),
    Claim(
        "gauss_seidel_jacobi",
        "Blocks that are iterated one after the other need at most as many passes as plain decoding.",
        "at least 1 token per pass for every block size",
        _blocks_of_jacobi,
    ),
)
