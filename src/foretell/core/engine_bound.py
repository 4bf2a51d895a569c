"""State that serves one engine at a time."""

import weakref
from typing import Protocol


class BindingEngine(Protocol):
    """An engine."""

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""


class EngineBound:
    """State indexed by an engine's rows, so that two engines at once would confuse it."""

    _engine: "weakref.ref[BindingEngine] | None" = None

    def bind(self, engine: BindingEngine) -> bool:
        """Serve this engine from now on; whether another one was served before, whose rows must be cleared.

        Raises:
            ValueError: another engine is busy with it.
        """
        known = self._engine
        before = None if known is None else known()
        if before is engine:
            return False
        if before is not None and before.busy:
            raise ValueError(
                "this method serves another engine, which is busy: build a method for every engine that runs at the "
                "same time"
            )
        self._engine = weakref.ref(engine)
        return known is not None
