"""Numbers of papers, measured here as the same quantity, with an interval and a verdict that can be "no"."""

from foretell.lab.reproduce.claim import Claim, Finding, Interval, Run, Verdict
from foretell.lab.reproduce.claims import CLAIMS, claim_of
from foretell.lab.reproduce.lab import Lab, LabRun, LabSettings, mixed_prompts
from foretell.lab.reproduce.preparation.preparation import Preparation
from foretell.lab.reproduce.preparation.training import PreparationSettings
from foretell.lab.reproduce.reproduce import ClaimResult, reproduce, write_report

__all__ = [
    "CLAIMS",
    "Claim",
    "ClaimResult",
    "Finding",
    "Interval",
    "Lab",
    "LabRun",
    "LabSettings",
    "Preparation",
    "PreparationSettings",
    "Run",
    "Verdict",
    "claim_of",
    "mixed_prompts",
    "reproduce",
    "write_report",
]
