"""State that is indexed by the rows of an engine, and so belongs to one engine at a time."""

import weakref
from typing import Protocol


class BindingEngine(Protocol):
    """The engine that a part is bound to."""

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""


class EngineBound:
    """A drafter or shape with state per row: two engines at once would mix up their rows."""

    _engine: "weakref.ref[BindingEngine] | None" = None

    def bind(self, engine: BindingEngine) -> bool:
        """Bind this to `engine`; whether it was bound to another one before, whose rows must be released.

        Raises:
            ValueError: it is bound to another engine that is busy.
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
