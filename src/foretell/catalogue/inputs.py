"""What a user names for methods to draft with: draft models, speculators and references, and which methods use it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_USERS = {
    "drafts": "a method that drafts with a language model, such as draft_model",
    "speculators": "the method that it was trained for",
    "references": "a method that drafts from documents, such as ngram",
}
_WORDS = {"drafts": "draft model", "speculators": "speculator", "references": "reference"}


@dataclass(frozen=True)
class NamedInputs:
    """The names of what a user gave, by the fields of `BuildContext`."""

    drafts: Sequence[str] = ()
    speculators: Sequence[str] = ()
    references: Sequence[str] = ()

    def require_used(self, inputs: Mapping[str, frozenset[str]]) -> None:
        """Check that one of the methods uses each of them. `inputs`: `Method.inputs` by the name of the method.

        Raises:
            ValueError: something has no effect on any of the methods.
        """
        for kind, names in vars(self).items():
            if names and not any(kind in used for used in inputs.values()):
                methods, pronoun = ", ".join(inputs), "it" if len(names) == 1 else "them"
                why = f"{methods} does" if len(inputs) == 1 else f"{methods} do"
                raise ValueError(
                    f"{_title(kind, names)} would have no effect: {why} not draft with {pronoun}; leave {pronoun} out, "
                    f"or name {_USERS[kind]}"
                )

    def use(self, inputs: Mapping[str, frozenset[str]]) -> list[str]:
        """A sentence each on the draft models and the speculators, where some of the methods do not use them.

        Raises:
            ValueError: as `require_used`.
        """
        self.require_used(inputs)
        return [
            f"{_title(kind, names)}: used by {', '.join(m for m, used in inputs.items() if kind in used)}; not used by "
            f"{', '.join(m for m, used in inputs.items() if kind not in used)}"
            for kind, names in {"drafts": self.drafts, "speculators": self.speculators}.items()
            if names and not all(kind in used for used in inputs.values())
        ]


def _title(kind: str, names: Sequence[str]) -> str:
    return f"the {_WORDS[kind]}{'s' * (len(names) > 1)} {', '.join(names)}"
