"""Command-line options that several commands share."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperGroup
from typer.models import OptionInfo

from foretell.core.parameters import PARAMETERS, Parameter
from foretell.core.target_options import PLAIN_TARGET, TargetOptions
from foretell.utils.options import Option

DEFAULT_MODEL = "smollm2-135m"

REFERENCE = (
    "Model: smollm2-135m, a directory (config.json, safetensors), a .gguf file, a hub id, of GGUF with a tag "
    "(org/name:Q4_K_M), or ollama:NAME."
)
Model = Annotated[str, typer.Option(metavar="REF", help=REFERENCE)]
SourceModel = Annotated[
    str, typer.Argument(metavar="MODEL", help="smollm2-135m, a directory, a .gguf file, or a hub id.")
]
Method = Annotated[
    str | None, typer.Option(metavar="NAME", help="Decoding method; see `foretell methods`. Default: auto.")
]
DraftModel = Annotated[
    list[str] | None,
    typer.Option(metavar="REF", help="Draft model, or a trained speculator, by REF; repeatable."),
]
Reference = Annotated[
    list[Path] | None, typer.Option(metavar="FILE", help="Reference document to draft from; repeatable.")
]
SpeculativeJson = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        metavar="JSON",
        help='Method and options (`foretell methods NAME` lists them), for example \'{"method": "ngram"}\'.',
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="auto, float32, bfloat16, int8, int8-activations (quantised files) or int4 (rounds files of floats).",
    ),
]
Device = Annotated[str, typer.Option(metavar="NAME", help="cpu or cuda.")]


def _option(parameter: Parameter) -> OptionInfo:
    """Its option, which raises ValueError where the value is wrong."""

    def check(value: Any) -> Any:
        if value is not None:
            parameter.read(value, parameter.option_name)
        return value

    made: OptionInfo = typer.Option(
        parameter.option_name, metavar=parameter.metavar, help=parameter.help, callback=check
    )
    return made


MaxNewTokens = Annotated[int, _option(PARAMETERS["max_new_tokens"])]
Temperature = Annotated[float, _option(PARAMETERS["temperature"])]
Seed = Annotated[int, _option(PARAMETERS["seed"])]
JsonSchema = Annotated[Path | None, typer.Option(metavar="FILE", help="Answer with JSON that fits this schema.")]
JsonObject = Annotated[bool, typer.Option("--json-object", help="Answer with a JSON object.")]
Regex = Annotated[str | None, typer.Option(metavar="RE", help="Answer with text that this expression matches.")]
Choice = Annotated[list[str] | None, typer.Option(metavar="S", help="Answer with one of these texts; repeatable.")]
Grammar = Annotated[Path | None, typer.Option(metavar="FILE", help="Answer by this grammar: Lark, or GBNF.")]
AnyWhitespace = Annotated[
    bool, typer.Option("--any-whitespace", help="Allow blanks and line ends in JSON; otherwise it is compact.")
]
Plan = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|JSON",
        help="Lossy: write the answer's parts side by side, for example skeleton, or "
        '\'{"type": "skeleton", "max_points": 5}\'.',
    ),
]
TopLogprobs = Annotated[
    int | None,
    typer.Option(metavar="N", min=0, help="The same with the N most probable tokens in each place (with --json)."),
]
PromptLogprobs = Annotated[
    int | None, typer.Option(metavar="N", min=0, help="The same for the tokens of the prompt (with --json).")
]
System = Annotated[str | None, typer.Option(metavar="S", help="System message.")]
AllowSpecialTokens = Annotated[
    bool,
    typer.Option("--allow-special-tokens", help="Encode the text of a special token in a message as that token."),
]
SaveMinutes = Annotated[float, typer.Option(metavar="M", min=0, help="Minutes between checkpoints.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AnswersSet = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="SET",
        help="Data set of `foretell data generate` with the model's answers. Default: it writes one.",
    ),
]
MemoryLimit = Annotated[
    int | None,
    typer.Option(
        metavar="MIB",
        min=1,
        help="Most memory for the target's weights; the rest is read from disk in every pass (see docs/offload.md).",
    ),
]

Parameters = Mapping[str, Any]
"""The generation parameters of a command line by their names; see `with_parameters`."""
NO_PARAMETERS: Parameters = {}
Target = Mapping[str, Any]
"""Fields of `TargetOptions`; see `with_target`."""
NO_TARGET: Target = {}
Settings = Mapping[str, Any]
"""Fields of settings by their names; see `with_settings`."""
NO_SETTINGS: Settings = {}


def group(text: str, cls: type[TyperGroup] | None = None) -> typer.Typer:
    """The application of a command that has commands of its own; `text`: what its help says."""
    app = typer.Typer(cls=cls, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=text)
    app.callback()(lambda: None)
    return app


_Decorator = Callable[[Callable[..., None]], Callable[..., None]]
_LOSSY_TARGET = ("kv_cache_policy", "sparsity")


def with_parameters(in_chat: bool = False, **defaults: Any) -> _Decorator:
    """Give a command the options of the table of generation parameters, in the place of its argument `parameters`,
    which gets their values. `in_chat`: those of a chat only. `defaults`: where the command has another default.
    """
    chosen = [p for p in PARAMETERS.values() if p.help and (p.in_chat or not in_chat)]
    options = [_signature(p, defaults.get(p.name, p.default)) for p in chosen]
    return _in_place_of("parameters", options, lambda name, value: _value(PARAMETERS[name], value))


def with_target(lossy: bool = False) -> _Decorator:
    """Give a command the options of its target, in the place of its argument `target`, which gets the fields of
    `TargetOptions`. `lossy`: also those that make the target lossy.
    """
    names = [f.name for f in fields(TargetOptions) if lossy or f.name not in _LOSSY_TARGET]
    return with_settings(PLAIN_TARGET, "target", names)


def with_settings(defaults: Any, argument: str = "settings", only: Collection[str] = ()) -> _Decorator:
    """Give a command the options of the fields of `defaults` that are annotated with `Option`, in the place of an
    argument, which gets their values by the names of the fields. A field of a sequence is an option that is repeated.
    `only`: of these fields, where it is not empty.
    """
    hints = get_type_hints(type(defaults), include_extras=True)
    shown = {
        name: part for name in hints for part in getattr(hints[name], "__metadata__", ()) if isinstance(part, Option)
    }
    chosen = {name: option for name, option in shown.items() if not only or name in only}
    kinds = {name: get_args(hints[name])[0] for name in chosen}
    options = [_of_field(name, kinds[name], option, getattr(defaults, name)) for name, option in chosen.items()]
    return _in_place_of(
        argument, options, lambda name, value: tuple(value or ()) if get_origin(kinds[name]) is Sequence else value
    )


def _of_field(name: str, kind: Any, shown: Option, default: Any) -> inspect.Parameter:
    """The option of a field of settings as an argument of a command."""
    if get_origin(kind) is Sequence:
        kind, default = list[get_args(kind)[0]] | None, None  # type: ignore[misc]
    elif shown.metavar and get_origin(kind) is Literal:
        kind = str  # The settings say what is wrong with a name.
    spelling = (shown.name or "--" + name.replace("_", "-")).split()
    option = typer.Option(*spelling, metavar=shown.metavar, help=shown.help, min=shown.least, max=shown.most)
    return _argument(name, default, Annotated[kind, option])


def _argument(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _in_place_of(
    argument: str, options: Sequence[inspect.Parameter], value_of: Callable[[str, Any], Any]
) -> _Decorator:
    """Put options in the place of an argument of a command, which gets their values by `value_of`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            values = {option.name: value_of(option.name, given.pop(option.name)) for option in options}
            command(**given, **{argument: values})

        own = inspect.signature(command, eval_str=True).parameters.values()
        places = [options if parameter.name == argument else [parameter] for parameter in own]
        signature = inspect.Signature([parameter for place in places for parameter in place])
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
        return run

    return decorate


def _signature(parameter: Parameter, default: Any) -> inspect.Parameter:
    """The option of a parameter as an argument of a command; a switch is off unless it is given."""
    kind: Any = list[parameter.kind] | None if parameter.many else parameter.kind
    default = None if parameter.many else False if parameter.kind is bool else default
    return _argument(parameter.name, default, Annotated[kind, _option(parameter)])


def _value(parameter: Parameter, given: Any) -> Any:
    """The value of an option: a switch, where it is given, changes the default."""
    if parameter.kind is bool:
        return parameter.default != given
    return parameter.default if given is None else parameter.read(given)


def split_commas(text: str) -> list[str]:
    """Parts of a comma-separated option."""
    return [w.strip() for w in text.split(",") if w.strip()]
