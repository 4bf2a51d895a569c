"""`foretell roofline view` and `export`: the analyzer as a page."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from foretell.cli.roofline_options import DeviceFile, ExtraModels
from foretell.roofline.analysis import AnalyzedModel
from foretell.roofline.hardware import known_hardware
from foretell.roofline.model_configs import find_model
from foretell.roofline.viewer.page import page
from foretell.roofline.viewer.server import serve
from foretell.utils.paths import require_file_place


def view(
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes a free one.")] = 8712,
    model: ExtraModels = None,
    hardware_file: DeviceFile = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")] = True,
) -> None:
    """Show the analyzer as a local page."""
    known, extra = known_hardware(hardware_file), [AnalyzedModel(*find_model(m)) for m in model or ()]
    server = serve(lambda: page(known, extra), port)
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
) -> None:
    """Write the analyzer as one HTML file that opens from disk."""
    require_file_place(out)
    text = page(known_hardware(hardware_file), [AnalyzedModel(*find_model(m)) for m in model or ()])
    out.write_text(text, "utf-8")
    typer.echo(f"{out}: {len(text.encode()) / 1e6:.1f} MB")
