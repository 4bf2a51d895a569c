"""`foretell roofline view` and `export`: the analyzer as a page."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from foretell.cli.roofline_options import DeviceFile, ExtraModels
from foretell.roofline.analysis import AnalyzedModel
from foretell.roofline.hardware import known_hardware
from foretell.roofline.viewer.answers import Answers
from foretell.roofline.viewer.page import page, question_of_link, saved_answers
from foretell.roofline.viewer.server import serve
from foretell.roofline.viewer.settings import Known
from foretell.utils.paths import require_file_place


def view(
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes a free one.")] = 8712,
    model: ExtraModels = None,
    hardware_file: DeviceFile = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")] = True,
) -> None:
    """Show the analyzer as a local page."""
    answers = _answers(model, hardware_file)
    server = serve(answers, port)
    address = f"http://127.0.0.1:{server.server_address[1]}/"
    typer.echo(f"{address} (stop with Ctrl+C)")
    if browser:
        webbrowser.open(address)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        typer.echo("stopped")
    finally:
        server.server_close()


def export(
    out: Annotated[Path, typer.Argument(help="HTML file to write.")],
    model: ExtraModels = None,
    hardware_file: DeviceFile = None,
    link: Annotated[
        str, typer.Option(help="Setting whose figures are written: a link that the page copied, or what follows its #.")
    ] = "",
) -> None:
    """Write the page with the figures of one setting as an HTML file that opens from disk."""
    require_file_place(out)
    answers = _answers(model, hardware_file)
    text = page(answers, saved_answers(answers, question_of_link(link, answers)))
    out.write_text(text, "utf-8")
    typer.echo(f"{out}: {len(text.encode()) / 1e6:.1f} MB")


def _answers(model: list[str] | None, hardware_file: Path | None) -> Answers:
    extra = [AnalyzedModel.named(m) for m in model or ()]
    return Answers(Known(known_hardware(hardware_file), {m.name: m for m in extra}))
