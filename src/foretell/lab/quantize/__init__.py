"""Quantises models to few bits per weight: methods, storage types, calibration, and files."""

from collections.abc import Callable, Mapping

from foretell.lab.quantize.awq import AWQ
from foretell.lab.quantize.base import Quantizer
from foretell.lab.quantize.gptq import GPTQ
from foretell.lab.quantize.hqq import HQQ
from foretell.lab.quantize.rtn import RTN

METHODS: Mapping[str, Callable[[], Quantizer]] = {"rtn": RTN, "gptq": GPTQ, "awq": AWQ, "hqq": HQQ}
"""Methods by name."""

__all__ = ["METHODS"]
