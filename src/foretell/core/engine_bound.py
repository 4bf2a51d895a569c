"""State that is indexed by the rows of an engine, and so belongs to one method of one engine at a time."""

import weakref
from typing import Protocol


class BindingEngine(Protocol):
    """What a part is bound to: an engine, as far as it runs one method."""

    @property
    def busy(self) -> bool:
        """Whether any request of the method is waiting or running."""

    def unbind(self) -> None:
        """Learn that a part serves something else from now on."""


class EngineBound:
    """A drafter or shape with state per row and per step: two engines, or two methods of one engine, would mix it
    up.
    """

    _engine: "weakref.ref[BindingEngine] | None" = None

    def bind(self, engine: BindingEngine) -> bool:
        """Bind this to `engine`; whether it was bound to another one before, whose rows must be released.

        Raises:
            ValueError: it is bound to another method or engine whose requests are not over.
        """
        known = self._engine
        before = None if known is None else known()
        if before is engine:
            return False
        if before is not None:
            if before.busy:
                raise ValueError(
                    "a drafter or shape of this method serves another engine or another method, which is busy: build "
                    "parts of its own for every method and engine that runs at the same time"
                )
            before.unbind()
        self._engine = weakref.ref(engine)
        return known is not None
