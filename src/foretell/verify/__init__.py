"""Check on your own model and machine that a decoding method keeps the target's output.

import foretell
from foretell.verify import verify

for report in verify(foretell.load("smollm2-135m"), ["suffix"]):
    print(report.method, report.passed)
"""

from foretell.verify.batch_invariance import BatchInvariance
from foretell.verify.classifier import TokenDivergence
from foretell.verify.distribution import DistributionTest
from foretell.verify.greedy_equality import GreedyEquality
from foretell.verify.verifier import Verifier, VerifyReport, VerifySettings, buildable_methods, verify

__all__ = [
    "BatchInvariance",
    "DistributionTest",
    "GreedyEquality",
    "TokenDivergence",
    "Verifier",
    "VerifyReport",
    "VerifySettings",
    "buildable_methods",
    "verify",
]
