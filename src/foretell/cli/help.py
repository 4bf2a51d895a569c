"""`foretell help TOPIC`: what several commands share, on one screen each; `foretell help COMMAND` is its `--help`."""

from typing import Annotated

import typer

app = typer.Typer(pretty_exceptions_enable=False)

_DTYPE = """\
--dtype names the arithmetic of the target. Methods are lossless with respect to the model in it.

  auto               int8-activations for a quantised file on the CPU kernels, float32 for a
                     float32 file, else bfloat16
  float32, bfloat16  the numbers of the file; quantised weights stay packed in memory
  int8-activations   weights as the file has them, inputs of products in int8: the fastest for
                     quantised files, with a distribution of its own
  int8               weights and inputs rounded to int8, rotated
  int4               a checkpoint of floats, rounded to 16 levels per 32 inputs while it loads

The line below an answer says what was taken; `foretell evaluate` measures what rounding costs.
More: docs/models.md, "Arithmetic".
"""

_METHODS = """\
Without --method, `auto` takes what is there. To choose yourself:

  a speculator trained for the model      hybrid_model: copied text and the speculator's drafts
  a smaller model with its tokenizer      draft_model, or dynamic_tree; --draft-model REF
  nothing but the model                   sam_recycling, or ngram: drafts copied from the text
  answers that quote documents            ngram with --reference FILE, or rest with a datastore
  sampling at temperature 0.7 and above   block_verification with a draft model or a speculator
  another text is acceptable              methods whose names end in _lossy; each reports what
                                          it changed

`foretell methods` lists all, `foretell methods NAME` explains one and its options,
`foretell generate "..." --compare` shows the gain, and `foretell bench run` measures it.
More: docs/choose-a-method.md.
"""


def _sampling() -> str:
    from foretell.core.parameters import PARAMETERS

    shown = [p for p in PARAMETERS.values() if p.help]
    names = [f"{p.option_name} {p.metavar or ''}".rstrip() for p in shown]
    width = max(map(len, names))
    rows = [f"  {name:{width}}  {p.help}" for name, p in zip(names, shown, strict=True)]
    head = "How a token is chosen, and where an answer ends; a server's requests have fields of these names."
    return "\n".join([head, "", *rows, "", "A lossless method keeps the distribution under all of them.", ""])


TOPICS = {"dtype": lambda: _DTYPE, "methods": lambda: _METHODS, "sampling": _sampling}


@app.command(name="help")
def show_help(
    topic: Annotated[
        str | None, typer.Argument(metavar="TOPIC", help="dtype, methods, sampling, or a command.")
    ] = None,
) -> None:
    """Explain a topic that several commands share: dtype, methods, sampling."""
    from foretell.cli.app import app as root
    from foretell.cli.commands import commands
    from foretell.utils.names import unknown

    if topic is None:
        topics = ", ".join(TOPICS)
        typer.echo(f"foretell help TOPIC explains one of: {topics}.\nforetell COMMAND --help explains a command.")
        return
    if topic in TOPICS:
        typer.echo(TOPICS[topic](), nl=False)
        return
    names = [c.name for c in commands() if not c.is_of_group]
    if topic not in names:
        raise unknown("topic", topic, {*TOPICS, *names})
    root(args=[topic, "--help"], prog_name="foretell")
