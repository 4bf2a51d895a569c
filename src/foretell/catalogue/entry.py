"""An entry of the catalogue: the description of a method, its parts, and its options."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from foretell.accept import Acceptor
from foretell.catalogue.build_context import BuildContext, Input
from foretell.catalogue.config import SpeculativeConfig
from foretell.catalogue.options.base import MethodOptions, option_names
from foretell.catalogue.options.shared import FixedTreeOptions
from foretell.draft.base import Drafter, Retriever
from foretell.engine.method import AnyMethod
from foretell.shape import Shape, Trie

Family = Literal[
    "baseline",
    "retrieval",
    "draft model",
    "self-drafting",
    "heads",
    "feature level",
    "parallel decoding",
    "hybrid",
    "lossy",
]


@dataclass(frozen=True)
class Paper:
    """The publication of a method; `arxiv`: its arXiv number, if it has one."""

    title: str
    arxiv: str = ""

    def __str__(self) -> str:
        return f"arXiv {self.arxiv}" if self.arxiv else self.title


@dataclass(frozen=True)
class Option:
    """An option of a method."""

    name: str
    aliases: tuple[str, ...]
    type: str
    """Type and range, in words."""
    default: object
    description: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A method of the catalogue. Its properties are derived from the classes of its parts."""

    name: str
    family: Family
    description: str
    """What the method does, in one sentence."""
    when_to_use: str
    """When it is worth using, as the end of the sentence "Use it ..."."""
    papers: tuple[Paper, ...] = ()
    drafter: type[Drafter]
    shape: type[Shape[Any]]
    acceptor: type[Acceptor]
    """Class of each part of the method that `builder` makes with default options."""
    builder: Callable[[BuildContext, Any], AnyMethod]
    """Builds the method from the target and the options. Raises ValueError where something that it needs is missing."""
    reads: tuple[Input, ...] = ()
    """What the builder reads of that which a user names to draft with. The rest has no effect on the method, so that it
    is refused where no other method reads it; see `MethodOptions.unread`.
    """
    options: type[MethodOptions] = MethodOptions
    needs: str = ""
    """What the user has to provide: a draft model, references."""
    speculator: str = ""
    """Kind of the trained speculator that it drafts with."""
    drafts_with: str = ""
    """What drafts, where the label of the drafter's class is too general."""
    aliases: tuple[str, ...] = ()

    @property
    def draft(self) -> str:
        """Label of the drafter."""
        return self.drafts_with or self.drafter.label or self.drafter.__name__

    @property
    def tree(self) -> str:
        """Label of the shape."""
        if self.shape is Trie and issubclass(self.drafter, Retriever) and self.drafter.single:
            return "chain"
        return self.shape.label or self.shape.__name__

    @property
    def accept(self) -> str:
        """Label of the acceptance rule."""
        return self.acceptor.label or self.acceptor.__name__

    @property
    def lossless(self) -> bool:
        """Whether the output follows the target's distribution exactly."""
        return self.acceptor.lossless

    @property
    def same_seed(self) -> bool:
        """Whether the output equals that of plain decoding for equal seeds."""
        return self.acceptor.same_seed

    @property
    def training(self) -> str:
        """Whether something is trained for the method: required, optional (what else may draft), while serving, or
        none.
        """
        if self.drafter.learns:
            return "while serving"
        optional = not {"drafts", "speculators"}.isdisjoint(self.reads)
        return "required" if self.speculator else "optional" if optional else "none"

    def option_list(self) -> list[Option]:
        """The options of the method, those of fixed trees last."""
        schemas = self.options.model_json_schema(by_alias=False)["properties"] if self.options.model_fields else {}
        fields = sorted(self.options.model_fields.items(), key=lambda item: item[0] in FixedTreeOptions.model_fields)
        return [
            Option(
                name, tuple(option_names(name, f)[1:]), _describe_schema(schemas[name]), f.default, f.description or ""
            )
            for name, f in fields
        ]

    def parse_options(self, config: SpeculativeConfig | Mapping[str, object]) -> MethodOptions:
        """Validate option values.

        Raises:
            ValueError: an option that the method does not have, or an invalid value.
        """
        return self.options.from_values(self.name, config.options if isinstance(config, SpeculativeConfig) else config)

    def build(self, context: BuildContext, config: SpeculativeConfig | Mapping[str, object] | None = None) -> AnyMethod:
        """Build the method with its initial state.

        Raises:
            ValueError: an invalid option, or something that the method needs is missing or does not fit.
        """
        options = self.parse_options(config or {})
        method = self.builder(context, options)
        label = method.drafter_label or self.draft
        return replace(method, name=self.name, drafter_label=label, inputs=frozenset(self.reads) - options.unread)


def _describe_schema(schema: Mapping[str, Any]) -> str:
    """Type and range of a JSON schema, in words."""
    if "anyOf" in schema:
        return " or ".join(_describe_schema(s) for s in schema["anyOf"] if s.get("type") != "null")
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return " or ".join(schema["enum"])
    if schema["type"] == "array":
        return f"list of ({_describe_schema(schema['items'])})"
    if schema["type"] == "object":
        return f"table from integer to {_describe_schema(schema['additionalProperties'])}"
    low, above, high = (schema.get(key) for key in ("minimum", "exclusiveMinimum", "maximum"))
    lower = [f"at least {low}"] * (low is not None) + [f"above {above}"] * (above is not None)
    span = [f"{low} to {high}"] if None not in (low, high) else [*lower, *[f"at most {high}"] * (high is not None)]
    return ", ".join([schema["type"], *span])
