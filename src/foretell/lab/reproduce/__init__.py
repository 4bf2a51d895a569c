"""Claims of papers, restated so that they do not depend on the paper's hardware and models, and checked on a model
here.
"""

from foretell.lab.reproduce.claim import Claim, Finding, Series, Verdict
from foretell.lab.reproduce.claims import CLAIMS, claim_of
from foretell.lab.reproduce.lab import Lab, LabRun, LabSettings, mixed_prompts
from foretell.lab.reproduce.pages import write_report
from foretell.lab.reproduce.preparation.maker import PreparationSettings
from foretell.lab.reproduce.preparation.preparation import Preparation
from foretell.lab.reproduce.reproduce import ClaimResult, reproduce

__all__ = [
    "CLAIMS",
    "Claim",
    "ClaimResult",
    "Finding",
    "Lab",
    "LabRun",
    "LabSettings",
    "Preparation",
    "PreparationSettings",
    "Series",
    "Verdict",
    "claim_of",
    "mixed_prompts",
    "reproduce",
    "write_report",
]
