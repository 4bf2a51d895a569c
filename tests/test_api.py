"""The Python interface: prompts, conversations, stop strings and special tokens."""

import subprocess
import sys
from pathlib import Path

import pytest

import foretell
from command import tiny_target
from foretell.api import Model
from foretell.model import kernels


@pytest.fixture(scope="module")
def model() -> Model:
    return foretell.load(str(tiny_target()), dtype="float32")


def test_the_configuration_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read, paths = Path.read_bytes, list[str]()

    def noted(path: Path) -> bytes:
        paths.append(path.name)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", noted)
    foretell.load(str(tiny_target()), dtype="float32")
    assert paths.count("config.json") == 1


_THREADS = """
import os, sys, threading, time
import torch
import foretell
from foretell.model import kernels

torch.set_num_threads(2)
kernels.available()
native = lambda: len(os.listdir("/proc/self/task")) - threading.active_count()
before = native()
model = foretell.load(sys.argv[1])
deadline = time.monotonic() + 20
while native() > before and time.monotonic() < deadline:
    time.sleep(0.01)
print(native() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
@pytest.mark.skipif(not kernels.available(), reason=kernels.unavailable_reason())
def test_loading_leaves_no_threads_of_openmp_behind() -> None:
    """Else they keep those of an engine in another thread from spinning between kernels, a tenth of its time."""
    done = subprocess.run([sys.executable, "-c", _THREADS, "smollm2-135m"], check=True, capture_output=True)
    assert int(done.stdout) == 0


def test_stop_may_be_one_string(model: Model) -> None:
    full = model.generate("hello", max_new_tokens=24)[0].text
    stop = full[5:8]
    alone = model.generate("hello", max_new_tokens=24, stop=stop)[0]
    assert alone.text == model.generate("hello", max_new_tokens=24, stop=[stop])[0].text == full[: full.index(stop)]
    assert "".join(u.text for u in model.stream("hello", max_new_tokens=24, stop=stop)) == alone.text
    assert model.request("hello", stop="Paris").stop == ("Paris",)
    assert model.request("hello").stop == ()


def test_an_invalid_prompt_is_one_sentence(model: Model) -> None:
    with pytest.raises(ValueError, match="message 1 has no 'content'"):
        model.request([{"role": "user"}])
    with pytest.raises(ValueError, match=r"U\+D800, which is no character"):
        model.generate("\ud800")
    with pytest.raises(ValueError, match="the prompt is empty"):
        model.request([])


def test_special_tokens_in_a_prompt_are_text_unless_allowed(model: Model) -> None:
    end = model.codec.encode("<end>")
    assert len(end) == 1
    conversation = [{"role": "user", "content": "a<end>b"}]
    assert end[0] not in model.tokens(conversation) and model.tokens(conversation) == model.tokens("a<end>b")
    assert end[0] in model.tokens(conversation, allow_special_tokens=True)
    assert end[0] in model.request("a<end>b", allow_special_tokens=True).prompt
    assert end[0] in model.tokens("a<end>b", raw=True)
