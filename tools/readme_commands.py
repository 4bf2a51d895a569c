"""Keeps the README true: runs its commands, and holds its table of methods against the catalogue (`--write` renews the table)."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
TABLE = re.compile(r"(<!-- table: methods -->\n).*?(<!-- end -->)", re.DOTALL)
BLOCK = re.compile(r"<!-- run: (\w+) -->\n```\w*\n(.*?)```", re.DOTALL)


def main() -> None:
    """Check everything; exit 1 with a sentence where something does not hold."""
    text = README.read_text(encoding="utf-8")
    table = run([sys.executable, "-m", "foretell", "methods", "--markdown"])
    renewed = TABLE.sub(lambda m: m[1] + "\n" + table.strip() + "\n\n" + m[2], text)
    if "--write" in sys.argv:
        README.write_text(renewed, encoding="utf-8")
        return
    if renewed != text:
        sys.exit("README.md: the table of methods is not the catalogue's; run: python tools/readme_commands.py --write")
    for kind, body in BLOCK.findall(text):
        if kind == "python":
            run([sys.executable, "-c", body])
        else:
            for line in body.splitlines():
                print("$", line, flush=True)
                command = line.replace("foretell ", f"{sys.executable} -m foretell ", 1)
                run(["bash", "-o", "pipefail", "-c", command])


def run(command: list[str]) -> str:
    """Standard output of a command, which must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=README.parent, check=False)
    if done.returncode:
        sys.exit(f"README.md: {' '.join(command)} failed with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
