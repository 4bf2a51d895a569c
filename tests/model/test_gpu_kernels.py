"""The GPU kernels compile without a GPU for every target, and spill no registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TOOL = Path(__file__).parents[2] / "tools" / "gpu_kernels.py"
TARGETS = "cuda:80", "cuda:90", "cuda:100", "hip:gfx942"


def compiled(folder: Path, *arguments: str) -> list[dict[str, object]]:
    """The table of the tool, which needs a process without the interpreter."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, TOOL, "--json", *arguments],
        env=variables | {"TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
    )
    assert result.stdout, result.stderr[-2000:]
    rows: list[dict[str, object]] = json.loads(result.stdout)
    return rows


def check(rows: list[dict[str, object]]) -> None:
    for row in rows:
        assert row["stack"] == 0, f"a kernel spills registers: {row}"
        assert float(str(row["occupancy"])) >= 0.125, f"fewer than an eighth of the warps of a multiprocessor: {row}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["cuda:90", "hip:gfx942"])
def test_the_kernels_of_a_common_model_compile_without_spills(target: str, tmp_path: Path) -> None:
    numbers = "int8" if target == "cuda:90" else "auto"
    rows = compiled(tmp_path, "--targets", target, "--heads", "128", "--numbers", numbers, "--variants", "full")
    check(rows)
    attention = {"write_pages", "attend", "attend and joins", "combine"}
    sampling = {"largest_kernel", "weigh_kernel", "select_kernel", "finish_kernel", "reject_kernel"}
    between = {"rms_norm_kernel", "gated_silu_kernel", "linear_kernel"}
    assert {row["kernel"] for row in rows} == attention | sampling | between


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("target", "heads"),
    [(t, heads) for t in TARGETS for heads in ("64", "80", "128", "256") if (t, heads) != ("hip:gfx942", "256")],
)
def test_all_kernels_compile_without_spills(target: str, heads: str, tmp_path: Path) -> None:
    check(compiled(tmp_path, "--targets", target, "--heads", heads))
