"""The run-time type checker of the tests: beartype that lets an int pass for a float, as PEP 484 does."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
