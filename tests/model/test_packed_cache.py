"""The cache of packed weights: what it gives is what packing gives, bit for bit, and it never stands in the way."""

import errno
import json
import logging
import os
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jaxtyping import Float

from command import expect_error, run_foretell
from foretell.bench.random_file import random_model_file
from foretell.model import kernels as native
from foretell.model.kernels import packed_file
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.kernels.structures import PRECISIONS, Precision
from foretell.model.load import native as native_loader
from foretell.model.load import packed_cache
from foretell.model.load.build import build_decoder
from foretell.model.load.native import finish_writing, weight_dtype
from foretell.model.load.network import build_network, build_streamed_network
from foretell.model.load.packed_cache import PackedWeightsFile, cache_entries, cache_folder, cache_limit
from foretell.model.load.rounding import RoundedWeights
from foretell.model.matrices.stored import StoredMatrix
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.testing import TINY, RandomWeights
from helpers import VOCAB, chain_tree, random_tokens

CPU = torch.device("cpu")
CONFIG = replace(
    TINY, vocab=VOCAB, hidden=64, layers=3, heads=4, kv_heads=2, head_dim=16, ffn=80, qkv_bias=True, qk_norm=True
)
pytestmark = pytest.mark.skipif(not native.available(), reason=native.unavailable_reason())


class FileWeights(RandomWeights):
    """Random weights that claim to come from a file."""

    def __init__(self, file: Path, seed: int = 0) -> None:
        super().__init__(seed)
        self.files = [file]
        self.reads = list[str]()

    def require(self, name: str, *shape: int) -> Float[torch.Tensor, "*shape"]:
        """A random tensor."""
        self.reads.append(name)
        return super().require(name, *shape)


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FileWeights:
    """Weights with a cache of their own."""
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_cache, "WORTH_CACHING", 0)
    return FileWeights(model_file(tmp_path))


def model_file(folder: Path, name: str = "model.gguf") -> Path:
    file = folder / name
    file.write_bytes(b"a model")
    return file


class BlocksWithHead(RoundedWeights):
    """Weights in blocks, with a head of their own."""

    def head_matrix(self, vocab: int, hidden: int) -> StoredMatrix:
        """A random matrix."""
        return self.matrix("lm_head.weight", vocab, hidden)


def load(weights: RandomWeights, precision: Precision = "bfloat16", limit: int | None = None) -> Network:
    if limit is None:
        network = build_network(CONFIG, weights, precision, CPU)
        finish_writing()
        return network
    return build_streamed_network(CONFIG, weights, precision, CPU, limit)


def scores(network: Network) -> torch.Tensor:
    logits: torch.Tensor = DecoderRunner(network).forward([0], chain_tree(random_tokens(20))).logits
    return logits


def cached_file() -> Path:
    (path,) = cache_folder().glob("*.packed")
    return path


@pytest.mark.parametrize("precision", PRECISIONS)
def test_cached_weights_are_the_packed_ones(precision: Precision, weights: FileWeights) -> None:
    fresh, expected = load(weights, precision), scores(load(RandomWeights(), precision))
    assert torch.equal(scores(fresh), expected)
    weights.reads.clear()
    cached = load(weights, precision)
    assert torch.equal(scores(cached), expected)
    assert {name for name in weights.reads if "proj" in name} == set(), "nothing is read or packed again"
    assert cached.backend == fresh.backend
    torch_decoder = build_decoder(CONFIG, RandomWeights(), weight_dtype(precision), CPU)
    assert float((scores(torch_decoder) - expected).norm() / expected.norm()) < 0.05


@pytest.mark.parametrize("limit", [200_000, 10**9])
def test_a_memory_limit_reads_blocks_from_the_cache(limit: int, weights: FileWeights) -> None:
    expected = scores(load(RandomWeights()))
    assert torch.equal(scores(load(weights, limit=limit)), expected)
    weights.reads.clear()
    assert torch.equal(scores(load(weights, limit=limit)), expected)
    assert {name for name in weights.reads if "proj" in name} == set()


def test_rounded_weights_have_a_place_of_their_own(weights: FileWeights) -> None:
    rounded = RoundedWeights(weights)
    first = scores(load(rounded, "int8-activations"))  # type: ignore[arg-type]
    load(weights, "int8-activations")
    assert sorted(entry.dtype for entry in cache_entries()) == ["int4", "int8-activations"]
    weights.reads.clear()
    assert torch.equal(scores(load(rounded, "int8-activations")), first)  # type: ignore[arg-type]
    assert {name for name in weights.reads if "proj" in name} == set()


@pytest.mark.parametrize("damage", ["truncated", "header", "data", "empty", "other version"])
def test_a_damaged_file_is_made_anew(damage: str, weights: FileWeights, caplog: pytest.LogCaptureFixture) -> None:
    expected = scores(load(weights))
    path = cached_file()
    raw = bytearray(path.read_bytes())
    if damage == "truncated":
        raw = raw[: len(raw) // 2]
    elif damage == "empty":
        raw = bytearray()
    else:
        raw[{"header": len(raw) - 20, "data": 4096 + 77, "other version": 8}[damage]] ^= 1
    path.write_bytes(raw)
    caplog.clear()
    assert torch.equal(scores(load(weights)), expected)
    assert [r.levelno for r in caplog.records] == [logging.WARNING] and str(path) in caplog.text
    caplog.clear()
    assert torch.equal(scores(load(weights)), expected) and not caplog.records


def test_a_folder_that_cannot_be_written_is_reported_once(
    weights: FileWeights, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(weights.files[0] / "folder"))
    assert torch.equal(scores(load(weights)), scores(load(RandomWeights())))
    assert len(caplog.records) == 1 and "not kept" in caplog.text


def test_a_full_disk_is_reported_once(
    weights: FileWeights, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writes = []

    def fail(part: object) -> None:
        writes.append(part)
        if len(writes) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(packed_file.PackedWriter, "add", lambda self, part: fail(part))
    assert torch.equal(scores(load(weights)), scores(load(RandomWeights())))
    assert len(caplog.records) == 1 and "No space left" in caplog.text
    assert list(cache_folder().iterdir()) == []


def test_another_file_is_another_key(weights: FileWeights) -> None:
    load(weights)
    weights.files[0].write_bytes(b"b model")
    load(weights)
    assert len(cache_entries()) == 2


def test_two_processes_may_make_the_same_file(weights: FileWeights) -> None:
    load(weights)
    place = PackedWeightsFile(weights.files, "bfloat16", ["x"])
    files = [place.create(100), place.create(100)]
    for file in files:
        assert file is not None
        file.writer.add(packed_file.PackedPart((), [torch.arange(7)]))
    for file in files:
        assert file is not None
        file.finish()
    with place.open() or pytest.fail("no file") as found:
        assert torch.equal(found.read(0).tensors[0].view(torch.int64), torch.arange(7))
    assert not list(cache_folder().glob("*.tmp"))


def test_the_least_recently_used_leaves_first(
    weights: FileWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load(weights)
    size = cached_file().stat().st_size
    monkeypatch.setenv("FORETELL_CACHE_LIMIT", str(int(2.5 * size)))
    others = [FileWeights(model_file(tmp_path, f"{i}.gguf")) for i in (1, 2)]
    load(others[0])
    for entry, age in zip(cache_entries(), (20, 10), strict=True):
        os.utime(entry.path, (entry.used - age, entry.used - age))
    os.utime(next(e.path for e in cache_entries() if e.model.endswith("model.gguf")))
    load(others[1])
    assert {Path(e.model).name for e in cache_entries()} == {"model.gguf", "2.gguf"}
    monkeypatch.setenv("FORETELL_CACHE_LIMIT", "1K")
    load(others[0])
    assert "FORETELL_CACHE_LIMIT" in caplog.text and len(cache_entries()) == 2


@pytest.mark.parametrize(("text", "size"), [("0", 0), ("7", 7), ("3k", 3072), ("1.5G", 3 << 29), ("2MiB", 2 << 20)])
def test_limits_have_units(text: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_CACHE_LIMIT", text)
    assert cache_limit(tmp_path) == size
    monkeypatch.setenv("FORETELL_CACHE_LIMIT", "much")
    with pytest.raises(ValueError, match="20G"):
        cache_limit(tmp_path)


_PEAK = """
import importlib, resource, sys
from pathlib import Path
load = importlib.import_module("foretell.load")
native = importlib.import_module("foretell.model.load.native")
kernels = importlib.import_module("foretell.model.kernels")
config, weights, *_ = load.open_checkpoint(Path(sys.argv[1]))
kernels.available()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
print(peak() - before, native.load_native(config, weights, "int8").packed_bytes, peak() - before)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts in kilobytes")
def test_the_peak_is_little_more_than_the_packed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(TINY, hidden=2048, layers=1, heads=16, kv_heads=4, head_dim=128, ffn=8192, context=64, tied=True)
    monkeypatch.setattr("foretell.bench.random_file.find_model", lambda shape: (shape, config))
    file = random_model_file("wide", "Q8_0", tmp_path)
    environment = {**os.environ, "FORETELL_CACHE_LIMIT": "0"}
    done = subprocess.run([sys.executable, "-c", _PEAK, file], check=True, capture_output=True, env=environment)
    _, packed, peak = map(int, done.stdout.split())
    assert packed > 100e6 and peak < 1.1 * packed + 80e6, (packed, peak)


_HEAD_PEAK = """
import resource, sys
from pathlib import Path
from foretell.model import kernels
from foretell.model.kernels.linear import NativeLinear
from foretell.model.load.weights import SafetensorsWeights
kernels.available()
matrix = SafetensorsWeights(Path(sys.argv[1])).matrix("lm_head.weight", 32768, 2048)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
print(NativeLinear(matrix, None, "bfloat16").nbytes, peak() - before)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts in kilobytes")
def test_pages_of_a_matrix_are_released_while_it_is_packed(tmp_path: Path) -> None:
    size = 32768 * 2048 * 2
    place = {"dtype": "BF16", "shape": [32768, 2048], "data_offsets": [0, size]}
    header = json.dumps({"lm_head.weight": place}).encode().ljust(96)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    done = subprocess.run([sys.executable, "-c", _HEAD_PEAK, tmp_path], check=True, capture_output=True)
    packed, peak = map(int, done.stdout.split())
    assert packed == size and peak < 1.1 * packed + 100e6, (packed, peak)


def test_interrupted_work_is_removed(weights: FileWeights) -> None:
    folder = cache_folder()
    folder.mkdir()
    old, names = (
        time.time() - 7200,
        ("tmp-999999999-old12345.tmp", "tmp1x", f"tmp-{os.getpid()}-old12345.tmp", "tmp-999999999-new12345.tmp"),
    )
    for name in names:
        (folder / name).mkdir() if name == "tmp1x" else (folder / name).write_bytes(b"")
        if "new" not in name:
            os.utime(folder / name, (old, old))
    load(weights)
    assert {path.name for path in folder.iterdir()} == {*names[1:], cached_file().name}


def test_files_of_others_are_not_of_the_cache(weights: FileWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither listed, nor cleared, nor removed where room is needed."""
    folder = cache_folder()
    folder.mkdir()
    for name in ("thesis.packed", "thesis-0123.packed"):
        (folder / name).write_bytes(b"precious")
    load(weights)
    (entry,) = cache_entries()
    assert entry.model.endswith("model.gguf")
    monkeypatch.setenv("FORETELL_CACHE_LIMIT", str(entry.bytes + 1000))
    load(weights, "float32")
    run_foretell("cache", "clear", "model")
    assert {path.name for path in folder.iterdir()} == {"thesis.packed", "thesis-0123.packed"}


def test_the_command_lists_and_clears(weights: FileWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "foretell").mkdir()
    (tmp_path / "foretell" / f"kernels-{'0a' * 10}.so").write_bytes(b"12")
    (tmp_path / "foretell" / "kernels-mine.so").write_bytes(b"precious")
    assert json.loads(run_foretell("cache", "clear", "kernels", "--json").stdout)["bytes"] == 2
    assert "0 files" in run_foretell("cache").stdout
    load(weights), load(weights, "float32")
    listed = json.loads(run_foretell("cache", "--json").stdout)
    assert {entry["dtype"] for entry in listed["entries"]} == {"bfloat16", "float32"}
    assert "model.gguf" in run_foretell("cache").stdout
    assert "unknown file of the cache" in expect_error("cache", "clear", "nothing")
    assert "--all" in expect_error("cache", "clear")
    assert "removed 1 files" in run_foretell("cache", "clear", listed["entries"][0]["name"]).stdout
    assert json.loads(run_foretell("cache", "clear", "model", "--json").stdout)["removed"]
    assert cache_entries() == []


def test_blocks_that_are_packed_as_floats_give_the_same_bits(
    weights: FileWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_loader, "_widens_slowly", lambda: True)
    config, rounded, networks = replace(CONFIG, tied=False), BlocksWithHead(weights), []
    for memory in (0, 1 << 40, 1 << 40):  # the last from the cache
        monkeypatch.setattr(native_loader, "available_memory", lambda memory=memory: memory)
        networks.append(build_network(config, rounded, "bfloat16", CPU))
        finish_writing()
    blocks, floats, restored = networks
    assert isinstance(blocks, NativeDecoder)
    for network in (floats, restored):
        assert isinstance(network, NativeDecoder) and network.head.nbytes > blocks.head.nbytes
        assert network.stack.blocks[0].nbytes > blocks.stack.blocks[0].nbytes
    assert torch.equal(scores(blocks), scores(floats)) and torch.equal(scores(floats), scores(restored))
    assert not torch.equal(scores(blocks), scores(build_network(config, weights, "bfloat16", CPU)))
