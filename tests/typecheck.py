"""The run-time type checker of the tests: beartype that lets an int pass for a float, as PEP 484 does."""

from collections.abc import Callable
from typing import TypeVar

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep673Exception, BeartypeDecorHintPep3119Exception

F = TypeVar("F", bound=Callable[..., object])

_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function: F) -> F:
    """Check arguments and result at every call, unless a structural protocol or `Self` among them cannot be checked at
    run time.
    """
    try:
        return _beartype(function)
    except (BeartypeDecorHintPep3119Exception, BeartypeDecorHintPep673Exception):
        return function
