"""Runs the commands of README.md, and compares its table of methods and the generated parts of docs/methods.md with the
catalogue. `--write` updates them instead.
"""

import re
import subprocess
import sys
from pathlib import Path

from foretell.catalogue import catalogue, find
from foretell.cli.methods import markdown_section, markdown_table

README = Path(__file__).parent.parent / "README.md"
METHODS = README.parent / "docs" / "methods.md"
GENERATED = re.compile(r"(<!-- (table|method): (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
BLOCK = re.compile(r"<!-- run: (\w+) -->\n```\w*\n(.*?)```", re.DOTALL)


def main() -> None:
    """Check everything; exit with 1 and a sentence where something differs or fails."""
    for path in (README, METHODS):
        text = path.read_text(encoding="utf-8")
        generated = generate(text)
        if "--write" in sys.argv:
            path.write_text(generated, encoding="utf-8")
        elif generated != text:
            sys.exit(f"{path.name}: differs from the catalogue; run: python tools/readme_commands.py --write")
    if "--write" in sys.argv:
        return
    text = README.read_text(encoding="utf-8")
    for kind, body in BLOCK.findall(text):
        if kind == "python":
            run([sys.executable, "-c", body])
        else:
            for line in body.splitlines():
                print("$", line, flush=True)
                command = line.replace("foretell ", f"{sys.executable} -m foretell ", 1)
                run(["bash", "-o", "pipefail", "-c", command])


def generate(text: str) -> str:
    """A document with its generated parts updated: the table of methods, and the sections of single methods."""

    def replacement(m: re.Match[str]) -> str:
        lines = markdown_table(catalogue().values()) if m[2] == "table" else markdown_section(find(m[3]))
        return m[1] + "\n" + "\n".join(lines) + "\n\n" + m[4]

    return GENERATED.sub(replacement, text)


def run(command: list[str]) -> str:
    """Standard output of a command, which must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=README.parent, check=False)
    if done.returncode:
        sys.exit(f"README.md: {' '.join(command)} failed with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
