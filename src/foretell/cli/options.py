"""Command-line options that several commands share."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from foretell.core.parameters import PARAMETERS, Parameter
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
    typer.Option("--draft-model", metavar="REF", help="Draft model, or a trained speculator, by REF; repeatable."),
]
Reference = Annotated[
    list[Path] | None, typer.Option("--reference", metavar="FILE", help="Reference document to draft from; repeatable.")
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
JsonSchema = Annotated[
    Path | None, typer.Option("--json-schema", metavar="FILE", help="Answer with JSON that fits this schema.")
]
JsonObject = Annotated[bool, typer.Option("--json-object", help="Answer with a JSON object.")]
Regex = Annotated[str | None, typer.Option(metavar="RE", help="Answer with text that this expression matches.")]
Choice = Annotated[
    list[str] | None, typer.Option("--choice", metavar="S", help="Answer with one of these texts; repeatable.")
]
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
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
MemoryLimit = Annotated[
    int | None,
    typer.Option(
        metavar="MIB",
        min=1,
        help="Most memory for the target's weights; the rest is read from disk in every pass (see docs/offload.md).",
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        metavar="N",
        min=1,
        help="Tokens of prompt and answer that the model is opened for. Default: its trained context.",
    ),
]
RopeScaling = Annotated[
    str | None,
    typer.Option(
        "--rope-scaling",
        metavar="JSON",
        help='Scaling of rotary positions for longer texts, for example \'{"rope_type": "yarn", "factor": 4.0}\'.',
    ),
]
PreTokenizer = Annotated[
    str | None,
    typer.Option(
        "--pre-tokenizer",
        metavar="NAME",
        help="Cut texts as llama.cpp's pre-tokenizer of this name does, in place of the one that a GGUF file names.",
    ),
]
Lora = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        metavar="[NAME=]PATH",
        help="A LoRA adapter that is merged into the model: a directory of PEFT, or an adapter's .gguf file. With "
        "NAME= `foretell serve` keeps it beside the model, for the requests that name it. Repeatable.",
    ),
]
ChatTemplateDate = Annotated[
    str | None,
    typer.Option(
        "--chat-template-date",
        metavar="DATE",
        help="The date that chat templates write, as 2026-03-04. Default: that of the day.",
    ),
]
KvCachePolicy = Annotated[
    str | None,
    typer.Option(
        "--kv-cache-policy",
        metavar="NAME@BUDGET",
        help=(
            "Lossy: evict keys and values beyond a budget (streaming_llm, snapkv, tova or h2o), or let every token "
            "read so many (quest)."
        ),
    ),
]
Sparsity = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Lossy: tokens read a part of the neurons, as DIR of `foretell calibrate sparsity` or `foretell train "
        "sparsity` says.",
    ),
]
KvCacheDtype = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype",
        metavar="NAME",
        help="Cached keys and values: auto (as the model computes), int8 (half the bytes of bfloat16), int8-halves "
        "(int8, whose upper halves drafts may read), fp8 (8-bit floats, on GPUs), int4 (a quarter), or int4-kivi and "
        "int2-kivi (4 and 2 bits in groups of 32 tokens, the last 128 tokens whole).",
    ),
]
TensorParallel = Annotated[
    int,
    typer.Option(
        "--tensor-parallel",
        metavar="N",
        min=1,
        help="Share every layer among N processes that torchrun started with this command (see "
        "docs/howto/scale-out.md).",
    ),
]
PipelineParallel = Annotated[
    int,
    typer.Option(
        "--pipeline-parallel", metavar="N", min=1, help="The same with N parts of the list of layers, for memory."
    ),
]

Parameters = Mapping[str, Any]
"""The generation parameters of a command line by their names; see `with_parameters`."""
NO_PARAMETERS: Parameters = {}
Target = Mapping[str, Any]
"""Fields of `foretell.load.TargetOptions`; see `with_target`."""
NO_TARGET: Target = {}
Settings = Mapping[str, Any]
"""Fields of settings by their names; see `with_settings`."""
NO_SETTINGS: Settings = {}


_Decorator = Callable[[Callable[..., None]], Callable[..., None]]
_TARGET: Mapping[str, tuple[Any, Any]] = {
    "max_model_len": (MaxModelLen, None),
    "rope_scaling": (RopeScaling, None),
    "lora": (Lora, None),
    "pre_tokenizer": (PreTokenizer, None),
    "chat_template_date": (ChatTemplateDate, None),
    "kv_cache_dtype": (KvCacheDtype, "auto"),
    "kv_cache_policy": (KvCachePolicy, None),
    "sparsity": (Sparsity, None),
    "tensor_parallel": (TensorParallel, 1),
    "pipeline_parallel": (PipelineParallel, 1),
}
"""Type and default of the options that are fields of `foretell.load.TargetOptions`, by their names."""
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
    `foretell.load.TargetOptions`. `lossy`: also those that make the target lossy.
    """
    chosen = {name: option for name, option in _TARGET.items() if lossy or name not in _LOSSY_TARGET}
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    options = [inspect.Parameter(name, kind, default=d, annotation=a) for name, (a, d) in chosen.items()]
    return _in_place_of("target", options, lambda name, value: tuple(value or ()) if name == "lora" else value)


def with_settings(defaults: Any, argument: str = "settings", only: Collection[str] = ()) -> _Decorator:
    """Give a command the options of the fields of `defaults` that are annotated with `Option`, in the place of an
    argument, which gets their values by the names of the fields. `only`: of these fields, where it is not empty.
    """
    options = []
    for name, hint in get_type_hints(type(defaults), include_extras=True).items():
        own = next((part for part in getattr(hint, "__metadata__", ()) if isinstance(part, Option)), None)
        if own is not None and (not only or name in only):
            spelling, kind = own.name or "--" + name.replace("_", "-"), get_args(hint)[0]
            # The settings say what is wrong with a name.
            kind = str if own.metavar and get_origin(kind) is Literal else kind
            option = typer.Option(*spelling.split(), metavar=own.metavar, help=own.help, min=own.least, max=own.most)
            place, default = inspect.Parameter.POSITIONAL_OR_KEYWORD, getattr(defaults, name)
            options.append(inspect.Parameter(name, place, default=default, annotation=Annotated[kind, option]))
    return _in_place_of(argument, options, lambda _, value: value)


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
    annotation = Annotated[kind, _option(parameter)]
    return inspect.Parameter(
        parameter.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation
    )


def _value(parameter: Parameter, given: Any) -> Any:
    """The value of an option: a switch, where it is given, changes the default."""
    if parameter.kind is bool:
        return parameter.default != given
    return parameter.default if given is None else parameter.read(given)


def split_commas(text: str) -> list[str]:
    """Parts of a comma-separated option."""
    return [w.strip() for w in text.split(",") if w.strip()]
