"""`foretell generate`: one answer that streams, or a file of prompts answered together."""

import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli import options
from foretell.cli.answer_output import OutputFormat, print_answer
from foretell.cli.errors import print_error
from foretell.cli.given import refuse_unused

if TYPE_CHECKING:
    from foretell.api import Answer, Model
    from foretell.cli.prompts import LineError, PromptDefaults, PromptSpec
    from foretell.cli.setup import ModelSetup
    from foretell.plan import Plan
    from foretell.structured.outputs import StructuredOutputs

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
@options.with_target(lossy=True)
@options.with_parameters()
def generate(
    ctx: typer.Context,
    prompt: Annotated[
        str | None, typer.Argument(help="Prompt; - reads it from standard input.", metavar="PROMPT | -")
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    method: options.Method = None,
    parameters: options.Parameters = options.NO_PARAMETERS,
    json_schema: options.JsonSchema = None,
    json_object: options.JsonObject = False,
    regex: options.Regex = None,
    choice: options.Choice = None,
    grammar: options.Grammar = None,
    any_whitespace: options.AnyWhitespace = False,
    prediction: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A text that the answer is expected to resemble, to draft from."),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Image before the prompt, for vision-language models; repeatable."),
    ] = None,
    system: options.System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    allow_special_tokens: options.AllowSpecialTokens = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "cpu",
    draft_model: options.DraftModel = None,
    reference: options.Reference = None,
    target: options.Target = options.NO_TARGET,
    target_memory_limit: options.MemoryLimit = None,
    speculative_config: options.SpeculativeJson = None,
    plan: options.Plan = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help='Answer a file: lines with "prompt", "messages" or "turns", and their own parameters and "method".',
        ),
    ] = None,
    rows: Annotated[int, typer.Option(metavar="N", help="Most requests that are decoded together.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per prompt.")] = False,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Answer by plain decoding too: both texts side by side, seconds and gain."),
    ] = False,
    no_stream: Annotated[bool, typer.Option("--no-stream", help="Print the answer when it is complete.")] = False,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Log-probability of every token (with --json).")] = False,
    top_logprobs: options.TopLogprobs = None,
    prompt_logprobs: options.PromptLogprobs = None,
) -> None:
    """Answer a prompt, or a file of prompts, with any decoding method.

    On a terminal, the text of accepted draft tokens is green.
    The answer goes to standard output, everything else to standard error.

        foretell generate "List the planets of the solar system." --compare

        foretell generate - --method llma --reference notes.txt < question.txt

        foretell generate --prompts prompts.jsonl --temperature 0.7 --json > answers.jsonl

        foretell generate "Describe a person." --json-schema person.json --method ngram

        foretell generate "What are the benefits of regular sleep?" --plan skeleton
    """
    gc.disable()  # The collector would visit the objects of torch again and again while it is imported.
    from foretell.cli.prompts import PromptDefaults
    from foretell.cli.setup import load_models, parse_method, read_text
    from foretell.core.target_options import TargetOptions
    from foretell.plan import parse_plan

    gc.enable()
    _refuse_unused(ctx, one_prompt=prompts is None)
    if rows < 1:
        raise ValueError(f"--rows must be at least 1, found {rows}")
    chosen_plan = None if plan is None else parse_plan(plan, "--plan")
    selection = parse_method(method, speculative_config, draft_model)
    defaults = PromptDefaults(
        parameters,
        raw,
        system,
        allow_special_tokens,
        _structured_outputs(json_schema, json_object, regex, choice, grammar, any_whitespace),
        None if prediction is None else read_text(prediction),
    )
    specs, bad = _read_prompt(prompt, defaults) if prompts is None else _read_prompts_file(prompt, prompts, defaults)
    target_options = TargetOptions(**target)
    setup = load_models(model, dtype, device, selection, reference, target_memory_limit, target_options)
    if image:
        setup = replace(setup, model=_behind_images(setup.model, image, specs, prompts, system, raw))
    if compare:
        from foretell.cli.comparison import compare as compare_methods

        raise typer.Exit(compare_methods(setup, selection.name, specs[0][1]))
    number = 0 if logprobs and top_logprobs is None else top_logprobs
    stream, is_batch = prompts is None and not as_json and not no_stream, prompts is not None
    output = OutputFormat(as_json, stream, number, is_batch, prompt_logprobs)
    status = run(setup, selection.name, specs, rows, output, chosen_plan)
    if status or bad:
        raise typer.Exit(status or 1)


def _refuse_unused(ctx: typer.Context, one_prompt: bool) -> None:
    """Refuse options that have no effect beside the others.

    Raises:
        ValueError: one was given.
    """
    given, as_json = ctx.params, ctx.params["as_json"]
    probabilities = "logprobs", "top_logprobs", "prompt_logprobs"
    refuse_unused(ctx, probabilities, "log-probabilities are printed with --json", not as_json)
    why = "--json prints an answer when it is complete" if as_json else "--prompts prints an answer when it is complete"
    refuse_unused(ctx, ("no_stream",), why, as_json or not one_prompt)
    refuse_unused(ctx, ("rows",), "there is one prompt", one_prompt and given["plan"] is None)
    raw = one_prompt and given["raw"]
    refuse_unused(ctx, ("allow_special_tokens",), "--raw encodes special tokens as such", raw)
    if given["compare"]:
        whole = "--compare prints the answers of one prompt as texts"
        refuse_unused(ctx, ("prompts", "plan", "as_json", "no_stream"), whole)
    free = given["json_schema"] is None and not given["json_object"]
    refuse_unused(ctx, ("any_whitespace",), "it is for --json-schema and --json-object", free)


def _behind_images(
    model: "Model",
    images: list[Path],
    specs: "Sequence[tuple[int, PromptSpec]]",
    prompts: Path | None,
    system: str | None,
    raw: bool,
) -> "Model":
    """The model behind the images and the one prompt of the command line."""
    if prompts is not None or system is not None:
        raise ValueError("--image goes with one prompt on the command line: leave out --prompts and --system")
    asked = specs[0][1].prompt
    return model.with_images(images, asked if isinstance(asked, str) else asked[-1]["content"], raw)


def _structured_outputs(
    json_schema: Path | None,
    json_object: bool,
    regex: str | None,
    choice: list[str] | None,
    grammar: Path | None,
    any_whitespace: bool,
) -> "StructuredOutputs | None":
    """What the options ask for; None: free text."""
    from foretell.cli.setup import read_text
    from foretell.structured.outputs import StructuredOutputs

    if not (json_schema or json_object or regex is not None or choice or grammar):
        return None
    return StructuredOutputs(
        json=None if json_schema is None else read_text(json_schema),
        json_object=json_object,
        regex=regex,
        choice=tuple(choice) if choice else None,
        grammar=None if grammar is None else read_text(grammar),
        any_whitespace=any_whitespace,
    )


def _read_prompt(
    prompt: str | None, defaults: "PromptDefaults"
) -> "tuple[list[tuple[int, PromptSpec]], list[LineError]]":
    """The prompt of the command line as line 1, and no errors."""
    from foretell.cli.prompts import PromptLine, apply_defaults

    if prompt is None:
        raise ValueError("no prompt: write one, - for standard input, or --prompts FILE.jsonl")
    return [(1, apply_defaults(PromptLine(prompt=sys.stdin.read() if prompt == "-" else prompt), defaults))], []


def _read_prompts_file(
    prompt: str | None, path: Path, defaults: "PromptDefaults"
) -> "tuple[list[tuple[int, PromptSpec]], list[LineError]]":
    """The prompts of a file, and its invalid lines, which are reported here."""
    from foretell.cli.prompts import LineError, read_prompts

    if prompt is not None:
        raise ValueError("a prompt and --prompts were given; leave out one of them")
    lines = list(read_prompts(path, defaults))
    bad = [line for _, line in lines if isinstance(line, LineError)]
    for line in bad:
        print_error(f"{path}, line {line.number}: {line.reason}")
    good = [(number, line) for number, line in lines if not isinstance(line, LineError)]
    if not good:
        raise ValueError(f"{path}: no prompt in it can be answered")
    return good, bad


def run(
    setup: "ModelSetup",
    method: str,
    specs: "Sequence[tuple[int, PromptSpec]]",
    rows: int,
    output: OutputFormat,
    plan: "Plan | None" = None,
) -> int:
    """Answer the prompts and print the answers; returns the exit status. `plan`: how each answer is put together."""
    from foretell.cli.batch import Batch
    from foretell.cli.drafter_check import checked
    from foretell.cli.interrupt import Interrupt
    from foretell.cli.show import AnswerWriter, DraftHighlighter, print_status, summary_line

    rows = rows if plan is not None else min(rows, len(specs))
    # A method decodes a single request with its own estimates.
    decoder = checked(setup, setup.shared_method(method))
    engine = setup.model.engine(decoder, rows, plan is not None, every_method=True)
    writer = AnswerWriter(DraftHighlighter(setup.model.codec.detokenizer())) if output.stream else None
    batch = Batch(setup, engine, output.logprobs, writer, output.prompt_logprobs, plan)
    setup.inputs.require_used(batch.inputs(prompt for _, prompt in specs))
    answers = list["Answer"]()
    started = time.perf_counter()
    with Interrupt() as interrupt:
        for answered in batch.run(specs, interrupt):
            answers.append(answered.answer)
            print_answer(answered, output, setup.model.expert_reads)
    setup.model.pass_times.close()
    if writer is not None and answers:
        writer.finish()
    for line in batch.errors:
        print_error(f"line {line.number}: {line.reason}" if output.is_batch else line.reason)
    if answers and not output.as_json:
        print_status(summary_line(answers, time.perf_counter() - started, setup.model.expert_reads))
    if interrupt.requested:
        print_error("interrupted; what was generated until then is above")
        return 130
    return 1 if batch.errors else 0
