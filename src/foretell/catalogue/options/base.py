"""What the options of all methods have in common: names, aliases, validation."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Self

from pydantic import AliasChoices, BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from foretell.utils.validation import explain


class MethodOptions(BaseModel):
    """The options of a method; this class has none."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    @classmethod
    def from_values(cls, method: str, values: Mapping[str, object]) -> Self:
        """Validate option values by name for the method of this name.

        Raises:
            ValueError: an option that the method does not have (the message lists those it has), one option under two
                names, or an invalid value.
        """
        seen: dict[str, str] = {}
        for key in values:
            option = next((name for name, field in cls.model_fields.items() if key in option_names(name, field)), None)
            if option is None:
                raise cls._unknown_option(method, key)
            if option in seen:
                raise ValueError(f"method {method}: {seen[option]} and {key} are one option; give one of them")
            seen[option] = key
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            separator = ", " if error.errors()[0]["loc"] else ": "
            raise ValueError(f"method {method}{separator}{explain(error)}") from error

    @classmethod
    def _unknown_option(cls, method: str, key: str) -> ValueError:
        if not cls.model_fields:
            return ValueError(f"method {method} does not read {key!r}: it has no options")
        known = [s for name, field in cls.model_fields.items() for s in option_names(name, field)]
        near = get_close_matches(key, known, n=1, cutoff=0.6)
        hint = f": did you mean {near[0]!r}? It" if near else "; it"
        return ValueError(f"method {method} does not read {key!r}{hint} reads: {', '.join(cls.model_fields)}")

    @property
    def unread(self) -> frozenset[str]:
        """What an entry declares to read (`Entry.reads`) and does not read with these options."""
        return frozenset()

    def is_set(self, name: str) -> bool:
        """Whether the user has set this option."""
        return name in self.model_fields_set


def option_names(name: str, field: FieldInfo) -> list[str]:
    """The name of an option, then its aliases."""
    alias = field.validation_alias
    return [str(c) for c in alias.choices] if isinstance(alias, AliasChoices) else [name]
