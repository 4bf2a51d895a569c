"""The files in deploy/ name paths, extras and options that there are, and times that fit each other."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from command import run_foretell
from foretell.serve.run import CLOSE_SECONDS
from foretell.serve.settings import Timeouts

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text("utf-8")
UNIT = ROOT / "deploy" / "foretell.service"
OPTION = re.compile(r"--[a-z][a-z-]+")


def help_options() -> set[str]:
    return set(OPTION.findall(run_foretell("serve", "--help").stdout))


def unit() -> configparser.ConfigParser:
    found = configparser.ConfigParser(strict=False, interpolation=None)
    found.optionxform = str  # type: ignore[assignment, method-assign]
    found.read(UNIT)
    return found


def test_the_image_copies_what_there_is_and_starts_what_there_is() -> None:
    copied = [
        line.split()[1:-1] for line in DOCKERFILE.splitlines() if line.startswith("COPY") and "--from" not in line
    ]
    assert copied and all((ROOT / name).exists() for names in copied for name in names)
    extras = re.findall(r"foretell\[([a-z,]+)\]", DOCKERFILE)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert extras and all(extra in known for names in extras for extra in names.split(","))
    started = next(line for line in DOCKERFILE.splitlines() if line.startswith("CMD "))
    assert set(OPTION.findall(started)) <= help_options() and "--host" in started
    assert "STOPSIGNAL SIGTERM" in DOCKERFILE and "USER foretell" in DOCKERFILE and "/health" in DOCKERFILE


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions with their arguments, comments left out and continued lines joined."""
    lines = "\n".join(line for line in DOCKERFILE.splitlines() if not line.startswith("#")).replace("\\\n", " ")
    return [
        (word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in lines.splitlines() if line)
    ]


def test_the_image_follows_the_rules_of_hadolint() -> None:
    found = instructions()
    known = "ARG FROM RUN WORKDIR COPY ENV USER VOLUME EXPOSE STOPSIGNAL HEALTHCHECK ENTRYPOINT CMD"
    assert {word for word, _ in found} == set(known.split())  # no ADD, MAINTAINER or misspelt word
    images = [rest.split()[0] for word, rest in found if word == "FROM"]
    assert len(images) == 2 and all(":" in image and not image.endswith(":latest") for image in images)
    for command in (rest for word, rest in found if word == "RUN"):
        if "apt-get install" in command:
            assert "apt-get update &&" in command and "rm -rf /var/lib/apt/lists/*" in command
            assert "install -y --no-install-recommends" in command
        assert command.count("pip install") == command.count("--no-cache-dir")
        assert not re.search(r"\b(sudo|cd|apt) ", command) and "||" not in command
        assert subprocess.run(["sh", "-n", "-c", command], capture_output=True).returncode == 0
    last = [word for word, _ in found if word in ("FROM", "CMD", "ENTRYPOINT", "HEALTHCHECK", "USER")]
    assert [last.count(word) for word in ("CMD", "ENTRYPOINT", "HEALTHCHECK", "USER")] == [1, 1, 1, 1]
    assert all(isinstance(json.loads(rest), list) for word, rest in found if word in ("CMD", "ENTRYPOINT"))
    assert all(rest.startswith("/") for word, rest in found if word in ("WORKDIR", "VOLUME"))
    started = next(rest for word, rest in found if word == "HEALTHCHECK").partition("CMD ")[2]
    program, option, script = json.loads(started)
    assert (program, option) == ("python", "-c")
    compile(script, "HEALTHCHECK", "exec")
    stages = {rest.split()[2] for word, rest in found if word == "FROM" and " AS " in rest}
    assert set(re.findall(r"--from=(\w+)", DOCKERFILE)) <= stages


def test_the_unit_stops_after_the_answers_and_names_options_that_there_are() -> None:
    service = unit()["Service"]
    program, command, *rest = shlex.split(service["ExecStart"])
    assert program.endswith("/foretell") and command == "serve" and rest == ["$FORETELL_OPTIONS"]
    examples = " ".join(line for line in UNIT.read_text("utf-8").splitlines() if line.startswith("#"))
    assert set(OPTION.findall(examples)) <= help_options()
    assert int(service["TimeoutStopSec"]) > Timeouts().shutdown + CLOSE_SECONDS
    assert int(service["LimitNOFILE"]) > 2 * 4096 and service["Restart"] == "on-failure"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text("utf-8").replace("/opt/foretell/bin/foretell", "/bin/true"))
    found = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, timeout=60)
    assert UNIT.name not in found.stderr, found.stderr
