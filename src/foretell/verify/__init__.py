"""Proof on your own model and machine that a decoding method changes nothing.

import foretell
from foretell.verify import verify

for report in verify(foretell.load("smollm2-135m"), ["suffix"]):
    print(report.method, report.passed)
"""

from foretell.verify.batch_invariance import Company
from foretell.verify.verifier import Report, Settings, Verifier, buildable, verify
from foretell.verify.classifier import Divergence
from foretell.verify.distribution import LawTest
from foretell.verify.greedy_equality import Identity

__all__ = ["Company", "Divergence", "Identity", "LawTest", "Report", "Settings", "Verifier", "buildable", "verify"]
