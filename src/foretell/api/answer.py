"""What a model answers, and what generated it."""

from dataclasses import dataclass
from typing import Any

from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod
from foretell.engine.request import Completion, describe_error
from foretell.model.block.backend import Backend
from foretell.plan import PlanReport


@dataclass(frozen=True, kw_only=True)
class Answer(Completion):
    """A generated text with its tokens and statistics, and what generated it.

    `plan`: how the answer of a plan came about; its `tokens` are those of all requests of the plan.
    """

    method: str
    drafter: str
    """What drafted, in a few words."""
    lossless: bool
    """Whether the method keeps the target's distribution; a plan does not."""
    backend: Backend
    """Implementation and precision of the target's passes."""
    error: str = ""  # type: ignore[assignment]
    """The error message, where `finish_reason` is `error`."""
    plan: PlanReport | None = None

    @staticmethod
    def from_completion(
        completion: Completion, engine: Engine, method: AnyMethod | None = None, plan: PlanReport | None = None
    ) -> "Answer":
        """The answer of a request that an engine has completed; `method`: the request's own, if it named one; `plan`:
        the report of the plan that wrote it.
        """
        method = method or engine.method
        own: dict[str, Any] = {
            "method": method.name,
            "drafter": method.drafter_label or method.draft.label,
            "lossless": method.lossless and plan is None and not engine.runner.backend.lossy,
            "backend": engine.runner.backend,
            "error": "" if completion.error is None else describe_error(completion.error),
            "plan": plan,
        }
        return Answer(**vars(completion) | own)

    @property
    def exact(self) -> bool:
        """Whether the output is bit for bit the same without drafts, in any batch and with any prompt chunks.

        False for a lossless method where a pass over several tokens rounds differently from a pass over one: the
        distribution is then equal up to rounding, and a tie between two tokens may be decided differently.
        """
        return self.lossless and self.backend.batch_invariant
