"""`foretell inspect`: what will be read of a model, without its weights."""

import json
from typing import Annotated

import typer

from foretell.cli import options

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(metavar="REF", help=options.REFERENCE)],
    as_json: options.Json = False,
) -> None:
    """Print what will be read of a model: architecture, tokenizer, template, ends, tensors, memory; and what will not.

    No weights are read.
    """
    from foretell.cli.description import Description, as_record, describe
    from foretell.model.load.memory import available_memory
    from foretell.model.load.reference import resolve_reference

    said: Description = describe(resolve_reference(model))
    if as_json:
        typer.echo(json.dumps(as_record(said), indent=1, ensure_ascii=False))
        return
    free, c = available_memory(), said.config
    lines = {
        "file": str(said.path),
        "architecture": f"{said.architecture}{f' ({said.name})' if said.name else ''}",
        "runs": f"no: {said.refusal}" if said.refusal else f"on the {said.runs_on}",
    }
    if c is not None:
        windows = f", a window of {c.window:,} tokens in {len(c.window_layers)} of them" if c.window_layers else ""
        experts = f", {c.experts.active} of {c.experts.count} experts" if c.experts else ""
        lines["layers"] = f"{c.layers} of width {c.hidden:,}, {c.heads} heads, {c.kv_heads} of keys{windows}{experts}"
        lines["context"] = f"{c.context:,} tokens"
    ends = ", ".join(f"{text!r} ({i})" for i, text in said.ends.items())
    lines |= {"tokenizer": said.tokenizer or "none", "template": said.template or "none", "ends": ends or "none"}
    size = f"{said.weights / 1e9:.2f} billion in " if said.weights else ""
    bits = f", {said.bits:.2f} bits each" if said.bits else ""
    lines["weights"] = f"{size}{said.bytes / 1e9:.2f} GB{bits}"
    for kind in said.kinds:
        lines[f"  {kind.kind}"] = f"{kind.tensors:,} tensors, {kind.bytes / 1e9:.2f} GB" + (
            f", read as {kind.read_as}" if kind.read_as else ""
        )
    there = "" if free is None else f"; {free / 1e9:.1f} GB are available"
    cache = f" and {1000 * said.cache_bytes / 1e6:.1f} MB per 1,000 tokens" if c is not None else ""
    lines["memory"] = f"{sum(kind.memory or kind.bytes for kind in said.kinds) / 1e9:.2f} GB{cache}{there}"
    lines["not read"] = ", ".join(said.unread) or "nothing is left out"
    for name, text in lines.items():
        typer.echo(f"{name + ':':14}{text}")
