"""State that serves one engine at a time."""

import weakref
from typing import Protocol


class Owner(Protocol):
    """An engine."""

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""


class Exclusive:
    """State indexed by an engine's rows, so that two engines at once would confuse it."""

    _owner: "weakref.ref[Owner] | None" = None

    def claim(self, owner: Owner) -> bool:
        """Serve this engine from now on; whether another one was served before, whose rows must be cleared.

        Raises:
            ValueError: another engine is busy with it.
        """
        known = self._owner
        before = None if known is None else known()
        if before is owner:
            return False
        if before is not None and before.busy:
            raise ValueError(
                "this method serves another engine, which is busy: build a method for every engine that runs at the "
                "same time"
            )
        self._owner = weakref.ref(owner)
        return known is not None
