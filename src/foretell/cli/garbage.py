"""When Python's garbage collector runs: importing and loading make many objects that stay, and looking at them again
and again is a sixth of the time to the first token.
"""

import gc

_SELDOM = 50_000
"""New objects after which the collector runs, until a model is loaded."""
_USUAL = gc.get_threshold()


def collect_seldom() -> None:
    """Let the collector run seldom until `freeze_garbage_collector`."""
    gc.set_threshold(_SELDOM)


def freeze_garbage_collector() -> None:
    """Let the collector run as usual, and pass over the objects that are alive now, those of modules and models, which
    stay: it would visit all of them while tokens are decoded. Only the first call of a process does this.
    """
    if not gc.get_freeze_count():
        gc.collect(0)  # of loading; all generations would take 0.2 seconds
        gc.freeze()
        gc.set_threshold(*_USUAL)
