"""Quantises models to few bits per weight: methods, storage types, calibration, and files."""

from collections.abc import Callable, Mapping

from foretell.quantize.awq import AWQ
from foretell.quantize.base import Quantizer
from foretell.quantize.gptq import GPTQ
from foretell.quantize.hqq import HQQ
from foretell.quantize.rtn import RTN

METHODS: Mapping[str, Callable[[], Quantizer]] = {"rtn": RTN, "gptq": GPTQ, "awq": AWQ, "hqq": HQQ}
"""Methods by name."""

__all__ = ["METHODS"]
