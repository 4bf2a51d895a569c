"""Files of results: `results.json`, the reports and the charts."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from foretell.bench.charts import draw_charts
from foretell.bench.html_report import render_html
from foretell.bench.report import render_markdown
from foretell.bench.schema import BenchResults
from foretell.utils.paths import replace_file
from foretell.utils.validation import validate_json

_RESULTS = "results.json"


def write_results(folder: Path, results: BenchResults) -> list[Path]:
    """Write `results.json`, `report.md`, `report.html` and, where matplotlib is installed, charts.

    Each file is replaced in one step, so that an interruption leaves no partial file.
    """
    charts = draw_charts(results) if find_spec("matplotlib") is not None else {}
    files = {
        _RESULTS: results.model_dump_json(indent=1).encode(),
        "report.md": render_markdown(results).encode(),
        "report.html": render_html(results, charts).encode(),
        **{f"{name}.png": png for name, png in charts.items()},
    }
    return write_files(folder, files)


def write_files(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Write files by name, each in one step."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        replace_file(folder / name, content)
    return [folder / name for name in files]


def read_results(path: Path) -> BenchResults:
    """Read `results.json`; `path` is the file or its folder.

    Raises:
        ValueError: there is none, or the file is damaged or of another format.
    """
    file = path / _RESULTS if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"{path}: no results here; give a results.json that `foretell bench run` or `replay` wrote, or its folder"
        )
    return validate_json(BenchResults, file.read_bytes(), f"{file}: not results of `foretell bench`")
