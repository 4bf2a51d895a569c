"""Checks what a user installs: the metadata of the wheels in `dist/`, and the installation lines of the README.

    python tools/check_install.py            both; some minutes and 2 GB, which are freed
    python tools/check_install.py uv         metadata, and the lines of one tool: pip, uv or pipx

A block of the README that is marked `<!-- install: cpu -->` holds one line for each way; each runs in a virtual
environment of its own, then the line of `<!-- install: model -->` of the same tool. There a prompt is answered without
a compiler on the path, and what is no checkout gives the first token soon (on an idle machine with two cores). The
lines of `<!-- install: cuda -->` are resolved only. What would come from the registry comes from `dist/`. Where the
index of torch's CPU builds cannot be reached, torch is that of $TORCH, from the usual registry.
"""

import email
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
FOLDER = ROOT / "build" / "install"
BLOCK = re.compile(r"<!-- install: (\w+) -->\n```\n(.*?)```", re.DOTALL)
SIZE = re.compile(r"CPU[^\n]*?\b(\d+\.\d) GB")
TOOLS = ("pip", "uv", "pipx")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
INDEX_OPTIONS = re.compile(rf" --pip-args=\S+| --extra-index-url {TORCH_INDEX}| --torch-backend cpu")
TOLERANCE = 0.15
"""Of the size that the README states, as a share."""
FIRST_TOKEN_SECONDS = {"empty": 4.0, "warm": 2.8}
"""Most seconds from the start of `foretell generate` to the first token of the answer, by the state of the cache."""
LINK = re.compile(r"\]\(([^)\s]*)")


def main() -> None:
    """Check everything, or the lines of the tools that are named."""
    for path in sorted(DIST.glob("*.whl")):
        check_metadata(path)
    text = (ROOT / "README.md").read_text("utf-8")
    lines = {name: body.splitlines() for name, body in BLOCK.findall(text)}
    chosen = sys.argv[1:] or TOOLS
    unreachable = not is_reachable(f"{TORCH_INDEX}/torch/")
    if unreachable:
        print(f"{TORCH_INDEX} cannot be reached; the lines run without it")
    shutil.rmtree(FOLDER, ignore_errors=True)
    model = {tool_of(line): line for line in lines["model"]}
    sizes = []
    for line in (each for each in lines["cpu"] if tool_of(each) in chosen):
        print(f"-- {line}", flush=True)
        sizes.append(check_line(INDEX_OPTIONS.sub("", line) if unreachable else line, model[tool_of(line)]))
        print(f"   {sizes[-1]:.2f} GB", flush=True)
    stated = float(SIZE.search(text)[1])  # type: ignore[index]
    if any(abs(size / stated - 1) > TOLERANCE for size in sizes):
        sys.exit(f"README.md: the CPU installation takes {max(sizes):.2f} GB, not {stated} GB")
    for line in (each for each in lines["cuda"] if tool_of(each) in chosen):
        check_resolution(line)


def check_metadata(path: Path) -> None:
    """Check a wheel's licence and notice files, its project addresses and the links of its description; exit with a
    sentence where something is wrong.
    """
    with ZipFile(path) as wheel:
        names = wheel.namelist()
        folder = next(n for n in names if n.endswith(".dist-info/METADATA")).removesuffix("METADATA")
        metadata: Message = email.message_from_bytes(wheel.read(f"{folder}METADATA"))
        licences = metadata.get_all("License-File", [])
        missing = [n for n in licences if f"{folder}licenses/{n}" not in names]
        if missing or "LICENSE" not in licences:
            sys.exit(f"{path.name}: no licence in it")
        if any(n.endswith(".safetensors") for n in names) and "NOTICE" not in licences:
            sys.exit(f"{path.name}: weights without a NOTICE that says where they are from")
    addresses = dict(a.split(", ", 1) for a in metadata.get_all("Project-URL", []))
    if "Repository" not in addresses:
        sys.exit(f"{path.name}: no project addresses; build it with FORETELL_REPOSITORY=https://…")
    tree = re.compile(re.escape(addresses["Repository"]) + r"/(?:blob|raw)/v[^/]+/([^#]*)")
    prose = re.sub(r"^```.*?^```$", "", str(metadata.get_payload()), flags=re.DOTALL | re.MULTILINE)
    for target in LINK.findall(prose):
        inside = tree.match(target)
        if inside is None and not target.startswith(("https://", "#")):
            sys.exit(f"{path.name}: the description's link {target} is relative")
        if inside is not None and not (ROOT / inside[1]).is_file():
            sys.exit(f"{path.name}: the description's link {target} leads to no file of the repository")
    print(f"{path.name}: {metadata['License-Expression']}, {', '.join(licences)}; {addresses['Repository']}")


def is_reachable(address: str) -> bool:
    """Whether a page answers."""
    try:
        return bool(urllib.request.urlopen(address, timeout=20))
    except (urllib.error.URLError, OSError):
        return False


def tool_of(line: str) -> str:
    """The first word: pip, uv or pipx."""
    return line.split()[0]


def check_line(line: str, model_line: str) -> float:
    """Install in an empty environment, answer a prompt there; returns the size in GB."""
    tool = tool_of(line)
    subprocess.run([sys.executable, "-m", "venv", FOLDER / "tools"], check=True)
    if tool != "pip":
        run([f"{FOLDER}/tools/bin/pip", "install", "--quiet", tool], dict(os.environ))
    environment = clean_environment(tool)
    target = Path(environment["VIRTUAL_ENV"])
    if tool != "pipx":
        subprocess.run([FOLDER / "tools/bin/python", "-m", "venv", target], check=True)
    run(shlex.split(line), environment)
    if tool != "uv":
        # Before the model: its package names a runtime that is left out.
        run([str(target / "bin" / "python"), "-m", "pip", "check"], environment)
    else:
        run(["uv", "pip", "check"], environment)
    run(shlex.split(model_line.split("#")[0]), environment)
    foretell = str(target / "bin" / "foretell")
    without_compiler = environment | {"PATH": str(target / "bin"), "CXX": "/nowhere"}
    answer = run([foretell, "generate", "Name a colour.", "--max-new-tokens", "8", "--json"], without_compiler)
    if json.loads(answer)["drafter"] == "none" or json.loads(answer)["new_tokens"] < 1:
        sys.exit(f"{line}: a prompt was answered without a drafter:\n{answer}")
    if " -e " not in line:
        check_first_token(line, foretell, without_compiler)
    run([foretell, "serve", "--help"], without_compiler)
    if list(target.rglob("nvidia")):
        sys.exit(f"{line}: CUDA libraries were installed")
    size = sum(p.lstat().st_size for p in target.rglob("*") if not p.is_dir()) / 1e9
    shutil.rmtree(FOLDER)
    return size


def check_first_token(line: str, foretell: str, environment: dict[str, str]) -> None:
    """Check how long the first token takes, by the median of three runs."""
    for cache, limit in FIRST_TOKEN_SECONDS.items():
        times = []
        for _ in range(3):
            if cache == "empty":
                shutil.rmtree(Path(environment["HOME"], ".cache", "foretell"), ignore_errors=True)
            start = time.perf_counter()
            command = [foretell, "generate", "Name a colour.", "--max-new-tokens", "8"]
            with subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            ) as process:
                assert process.stdout is not None
                process.stdout.read(1)
                times.append(time.perf_counter() - start)
        print(f"   first token with {cache} cache: {', '.join(f'{t:.1f}' for t in sorted(times))} s")
        if sorted(times)[1] > limit:
            sys.exit(f"{line}: the first token comes after {sorted(times)[1]:.1f} s with {cache} cache, not {limit} s")


def clean_environment(tool: str) -> dict[str, str]:
    """Variables for a line: a home and caches of its own, the wheels of `dist/` beside the registry."""
    home = FOLDER / "home"
    home.mkdir(parents=True, exist_ok=True)
    kept = {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "UV_", "SSL_", "HTTP", "NO_PROXY", "LANG"))}
    target = home / "venvs" / "foretell" if tool == "pipx" else FOLDER / "venv"
    torch = FOLDER / "torch.txt"
    torch.write_text(os.environ.get("TORCH", "torch==2.13.0") + "\n", "utf-8")
    wheels = " ".join([str(DIST), *os.environ.get("PIP_FIND_LINKS", "").split()])
    return kept | {
        "HOME": str(home),
        "PIPX_HOME": str(home),
        "VIRTUAL_ENV": str(target),
        "PATH": f"{target}/bin:{FOLDER}/tools/bin:/usr/bin:/bin",
        "PIP_FIND_LINKS": wheels,
        "UV_FIND_LINKS": wheels.replace(" ", ","),
        "PIP_CONSTRAINT": str(torch),
        "UV_CONSTRAINT": str(torch),
        "PIP_CACHE_DIR": subprocess.check_output([sys.executable, "-m", "pip", "cache", "dir"], text=True).strip(),
    }


def check_resolution(line: str) -> None:
    """Resolve what a line would install, which must hold CUDA libraries; nothing is installed."""
    tool = tool_of(line)
    if tool == "pipx":
        return
    subprocess.run([sys.executable, "-m", "venv", FOLDER / "tools"], check=True)
    if tool == "uv":
        run([f"{FOLDER}/tools/bin/pip", "install", "--quiet", tool], dict(os.environ))
    environment = clean_environment(tool) | {"VIRTUAL_ENV": str(FOLDER / "tools"), "PATH": f"{FOLDER}/tools/bin"}
    # The pinned torch may be a CPU build here; any release has to resolve.
    resolved = run([*shlex.split(line), "--dry-run"], environment | {"PIP_CONSTRAINT": "", "UV_CONSTRAINT": ""})
    if "nvidia" not in resolved or "foretell" not in resolved:
        sys.exit(f"{line}: resolves without CUDA libraries:\n{resolved}")
    print(f"-- {line}\n   resolves", flush=True)
    shutil.rmtree(FOLDER)


def run(command: list[str], environment: dict[str, str]) -> str:
    """Run a command, which must succeed, in the repository; returns what it printed."""
    # The directory of the executable is looked up in the new path.
    command[0] = shutil.which(command[0], path=environment["PATH"]) or command[0]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{shlex.join(command)} failed with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout + (done.stderr if "--dry-run" in command else "")


if __name__ == "__main__":
    main()
