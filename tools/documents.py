"""Checks that the documents say what is so: runs their blocks of code that are marked with `<!-- run: … -->` and the
notebooks in `examples/`, and compares the generated parts with the catalogue.

    python tools/documents.py            check everything, some minutes
    python tools/documents.py tour.md    run the blocks of single documents
    python tools/documents.py --write    update the generated parts
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from foretell.catalogue import BUILT_IN, catalogue, find
from foretell.cli.methods import FILE, markdown_section, markdown_table, record_of, with_packages

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
METHODS = ROOT / "docs" / "methods.md"
NOTEBOOKS = sorted(p for p in (ROOT / "examples").glob("*.py") if "# %%" in p.read_text(encoding="utf-8"))
GENERATED = re.compile(r"(<!-- (table|method): (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
BLOCK = re.compile(r"<!-- run: (\w+) -->\n```\w*\n(.*?)```", re.DOTALL)
START_SECONDS = 180
"""How long a server may load."""
CORES = os.cpu_count() or 1
AT_ONCE = min(CORES, 4)
"""Documents that run side by side. Much of the time of a command is Python that starts, on one core."""
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": str(CORES // AT_ONCE)}


def main() -> None:
    """Check everything, or the documents that are named; exit with 1 and a sentence where something is wrong."""
    names = [a for a in sys.argv[1:] if a != "--write"]
    if "--write" in sys.argv:
        FILE.write_text(methods_file(), encoding="utf-8")
        for path in (README, METHODS):
            path.write_text(generate(path.read_text(encoding="utf-8")), encoding="utf-8")
        return
    for path in (README, METHODS):
        text = path.read_text(encoding="utf-8")
        if generate(text) != text:
            sys.exit(f"{path.name}: differs from the catalogue; run: python tools/documents.py --write")
    if FILE.read_text(encoding="utf-8") != methods_file():
        sys.exit(f"{FILE.name}: differs from the catalogue; run: python tools/documents.py --write")
    chosen = [path for path in documents() if not names or path.name in names]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        runs = [threads.submit(run_document, path) for path in chosen]
        try:
            for each in runs:
                each.result()
        finally:
            threads.shutdown(cancel_futures=True)


def documents() -> list[Path]:
    """The README, the pages of `docs/` with blocks to run (translations have the same blocks), and the notebooks; first
    those with the most blocks.
    """
    pages = [p for p in (README, *sorted((ROOT / "docs").rglob("*.md"))) if not p.stem.endswith(".zh")]
    blocks = {p: len(BLOCK.findall(p.read_text(encoding="utf-8"))) for p in pages}
    return sorted((p for p in pages if blocks[p]), key=lambda p: -blocks[p]) + NOTEBOOKS


def methods_file() -> str:
    """What `foretell methods` reads instead of the catalogue, a method a line."""
    lines = (json.dumps(vars(record_of(entry)), ensure_ascii=False, default=vars) for entry in BUILT_IN)
    return "[" + ",\n".join(lines) + "]\n"


def generate(text: str) -> str:
    """A document with its generated parts updated: the table of methods, and the sections of single methods."""

    def replacement(m: re.Match[str]) -> str:
        entries = catalogue().values() if m[2] == "table" else [find(m[3])]
        records = [with_packages(record_of(entry)) for entry in entries]
        lines = markdown_table(records) if m[2] == "table" else markdown_section(records[0])
        return m[1] + "\n" + "\n".join(lines) + "\n\n" + m[4]

    return GENERATED.sub(replacement, text)


def run_document(path: Path) -> None:
    """Run a notebook, or the blocks of a page in their order. A page has a folder of its own, with CONTRIBUTING.md as
    a text to read.
    """
    print(f"-- {path.relative_to(ROOT)}\n", end="", flush=True)
    servers: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "CONTRIBUTING.md").write_bytes((ROOT / "CONTRIBUTING.md").read_bytes())
        try:
            if path.suffix == ".py":
                run(path, [sys.executable, str(path)], folder)
            else:
                for kind, body in BLOCK.findall(path.read_text(encoding="utf-8")):
                    run_block(path, kind, body, folder, servers)
        finally:
            for server in servers:
                server.terminate()
                server.wait()


def run_block(path: Path, kind: str, body: str, folder: str, servers: list[subprocess.Popen[bytes]]) -> None:
    """Run a block of `python`, of `shell`, or the command of a `server`, which runs until the end of the page."""
    if kind == "python":
        run(path, [sys.executable, "-c", body], folder)
        return
    for line in body.splitlines():
        print(f"{path.name} $ {line}\n", end="", flush=True)
        if kind == "server":
            servers.append(start_server(path, line, folder))
        else:
            command = re.sub("^foretell ", f"{sys.executable} -m foretell ", line).replace("curl -s ", "curl -sf ")
            run(path, ["bash", "-o", "pipefail", "-c", command], folder)


def start_server(path: Path, line: str, folder: str) -> "subprocess.Popen[bytes]":
    """A server that answers; its command is `foretell serve` with options."""
    words = shlex.split(line)
    port = words[words.index("--port") + 1] if "--port" in words else "8000"
    server = subprocess.Popen([sys.executable, "-m", *words], cwd=folder, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return server
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    server.kill()
    sys.exit(f"{path.name}: {line}: no answer on port {port}")


def run(path: Path, command: list[str], folder: str) -> None:
    """Run a command, which must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=ENVIRONMENT, check=False)
    if done.returncode:
        sys.exit(f"{path.name}: {' '.join(command)} failed with {done.returncode}:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
