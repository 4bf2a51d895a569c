"""The datastore: every look-up equals brute force, matches end with their document, and damage is one sentence."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.retrieval.datastore import (
    Datastore,
    join_documents,
    open_datastore,
    read_manifest,
    tokenizer_fingerprint,
    write_datastore,
)
from foretell.retrieval.suffix_array import SEPARATOR, build_suffix_array
from word_codec import word_codec

END = int(SEPARATOR)
documents = st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=6)


def run_of(texts: Sequence[Sequence[int]]) -> list[int]:
    return [t for d in texts if d for t in (*d, END)]


def arrays(*texts: Sequence[int]) -> list[np.ndarray]:
    return [np.array(t, np.uint32) for t in texts]


@settings(max_examples=150, deadline=None)
@given(documents, st.integers(1, 9), st.sampled_from([0, 1 << 7, 1 << 15, (1 << 31) - 8]))
def test_suffixes_are_sorted_to_the_depth(texts: list[list[int]], depth: int, offset: int) -> None:
    """Compared up to the first separator: no pattern contains one.

    The offset varies how many tokens fit a key.
    """
    run = run_of([[t + offset for t in d] for d in texts])
    order = build_suffix_array(np.array(run, np.uint32), depth)
    assert sorted(order.tolist()) == list(range(len(run)))

    def beginning(at: int) -> list[int]:
        part = run[at : at + depth]
        return part[: part.index(END) + 1] if END in part else part

    sorted_ = [beginning(at) for at in order.tolist()]
    assert sorted_ == sorted(sorted_)


def test_long_repeats_are_sorted() -> None:
    page = np.random.default_rng(0).integers(0, 50, 300).astype(np.uint32)
    run = join_documents([page, page, page[:150], np.concatenate([page[:200], page[:200]])])
    order = build_suffix_array(run, 64)
    beginnings = [run[at : at + 64].tolist() for at in order.tolist()]
    cut = [b[: b.index(END) + 1] if END in b else b for b in beginnings]
    assert cut == sorted(cut)


@settings(max_examples=150, deadline=None)
@given(documents, st.lists(st.integers(0, 2), min_size=1, max_size=8), st.integers(1, 3))
def test_lookups_equal_brute_force(texts: list[list[int]], text: list[int], least: int) -> None:
    run, store = run_of(texts), Datastore.from_documents(texts, depth=6)

    def occurrences(pattern: list[int]) -> list[int]:
        return [at for at in range(len(run)) if run[at : at + len(pattern)] == pattern]

    for size in range(1, min(len(text), 6) + 1):
        first, last = store.find(text[-size:])
        assert sorted(store._suffixes[first:last].tolist()) == occurrences(text[-size:])
    fitting = [s for s in range(1, min(len(text), 5) + 1) if len(occurrences(text[-s:])) >= least]
    size, first, last = store.longest_suffix(text, 5, 1, least)
    assert size == max(fitting, default=0)
    if not size:
        assert (first, last) == (0, 0)
        return
    wanted = []
    for at in occurrences(text[-size:]):
        rest = run[at + size :]
        wanted.append(([*rest[: rest.index(END)], -1, -1, -1, -1])[:4])
    assert sorted(store.continuations(first, last, size, 4, 100).tolist()) == sorted(wanted)


def test_of_many_occurrences_as_many_as_wanted_are_taken() -> None:
    store = Datastore.from_documents([[1, n % 7] for n in range(100)])
    assert store.continuations(*store.find([1]), 1, 2, 10).shape == (10, 2)


def test_no_match_and_no_continuation_crosses_documents() -> None:
    store = Datastore.from_documents([[1, 2, 3], [4, 5], [2, 3, 4]])
    assert store.find([3, 4]) != (0, 0) and store.longest_suffix([3, 4], 2, 2) == (2, *store.find([3, 4]))
    assert store.longest_suffix([2, 3, 4, 5], 4, 3)[0] == 0
    assert store.continuations(*store.find([2, 3]), 2, 3, 10).tolist() in (
        [[-1, -1, -1], [4, -1, -1]],
        [[4, -1, -1], [-1, -1, -1]],
    )


def test_a_written_datastore_reads_as_the_one_in_memory(tmp_path: Path) -> None:
    codec, texts = word_codec("a", "b", "c"), arrays([1, 2, 3, 1, 2], [], [70000, 2, 1])
    manifest = write_datastore(tmp_path / "new" / "store", texts, codec, "the model", depth=4)
    assert (manifest.tokens, manifest.documents) == (10, 2) and read_manifest(tmp_path / "new" / "store") == manifest
    store = open_datastore(tmp_path / "new" / "store", codec)
    assert (
        len(store) == 10 and store.depth == 4 and isinstance(np.load(tmp_path / "new/store/tokens.npy", "r"), np.memmap)
    )
    assert store.longest_suffix([1, 2], 4, 1) == Datastore.from_documents(
        [t.tolist() for t in texts], 4
    ).longest_suffix([1, 2], 4, 1)
    assert [f.name for f in (tmp_path / "new").iterdir()] == ["store"]


def test_the_fingerprint_depends_on_the_tokens_only() -> None:
    assert tokenizer_fingerprint(word_codec("a", "b")) == tokenizer_fingerprint(word_codec("a", "b"))
    assert tokenizer_fingerprint(word_codec("a", "b")) != tokenizer_fingerprint(word_codec("b", "a"))


def damage(name: str, content: Callable[[bytes], bytes | None]) -> Callable[[Path], None]:
    def act(store: Path) -> None:
        new = content((store / name).read_bytes())
        (store / name).unlink()
        if new is not None:
            (store / name).write_bytes(new)

    return act


def changed(**values: object) -> Callable[[bytes], bytes]:
    return lambda old: json.dumps(json.loads(old) | values).encode()


DAMAGES = {
    "no manifest": (damage("manifest.json", lambda old: None), "no datastore here"),
    "broken manifest": (damage("manifest.json", lambda old: old[:30]), "manifest.json: not valid JSON"),
    "other manifest": (damage("manifest.json", lambda old: b"{}"), "manifest.json: format: field required"),
    "listed manifest": (damage("manifest.json", lambda old: b"[1]"), "manifest.json: input should be an object"),
    "text for a number": (damage("manifest.json", changed(tokens="many")), "tokens: input should be a valid integer"),
    "nested": (damage("manifest.json", lambda old: b"[" * 10**5), "not valid JSON"),
    "later format": (damage("manifest.json", changed(format="foretell datastore 9")), "build the datastore again"),
    "empty": (damage("manifest.json", changed(tokens=0)), "is empty"),
    "other length": (damage("manifest.json", changed(tokens=9)), "9 tokens of 32 bits were expected"),
    "no tokens": (damage("tokens.npy", lambda old: None), "missing or damaged"),
    "cut tokens": (damage("tokens.npy", lambda old: old[:-3]), "missing or damaged"),
    "cut suffixes": (damage("suffixes.npy", lambda old: old[:50]), "missing or damaged"),
    "emptied suffixes": (damage("suffixes.npy", lambda old: b""), "missing or damaged"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_one_sentence(name: str, tmp_path: Path) -> None:
    act, message = DAMAGES[name]
    write_datastore(tmp_path / "store", arrays([1, 2, 3]), word_codec("a"), "m")
    act(tmp_path / "store")
    with pytest.raises(ValueError, match=message) as caught:
        open_datastore(tmp_path / "store")
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    write_datastore(tmp_path / "store", arrays([1, 2, 3]), word_codec("a"), "small-model")
    with pytest.raises(ValueError, match="built with the tokenizer of small-model"):
        open_datastore(tmp_path / "store", word_codec("b"))


def test_a_failed_write_leaves_no_files(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").touch()
    with pytest.raises(ValueError, match="there is something already"):
        write_datastore(tmp_path / "there", arrays([1]), word_codec("a"), "m")
    with pytest.raises(ValueError, match="nothing to index"):
        write_datastore(tmp_path / "store", arrays([], []), word_codec("a"), "m")
    with pytest.raises((TypeError, ValueError)):
        write_datastore(tmp_path / "store", arrays([1]), word_codec("a"), object(), 4)  # type: ignore[arg-type]
    assert [f.name for f in tmp_path.iterdir()] == ["there"]
