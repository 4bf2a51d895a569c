"""Proof on your own model and machine that a decoding method changes nothing.

import foretell
from foretell.verify import verify

for report in verify(foretell.load("smollm2-135m"), ["suffix"]):
    print(report.method, report.passed)
"""

from foretell.verify.check import Report, Settings, Verifier, buildable, verify
from foretell.verify.company import Company
from foretell.verify.divergence import Divergence
from foretell.verify.identity import Identity
from foretell.verify.law import LawTest

__all__ = ["Company", "Divergence", "Identity", "LawTest", "Report", "Settings", "Verifier", "buildable", "verify"]
