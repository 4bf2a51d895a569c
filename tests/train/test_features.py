"""Hidden states for training: equal to those of a Runner, and valid on disk after any interruption."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from foretell.model.run.decoder_runner import DecoderRunner
from foretell.testing import TINY, tiny_decoder
from foretell.train.data.features import (
    CachedFeatures,
    DocumentChunk,
    FeatureSource,
    StreamedFeatures,
    compute_hidden_states,
    pad_sequences,
)
from foretell.train.data.hidden_state_cache import HiddenStateCache
from helpers import chain_tree, random_tokens

LAYERS = (0, 1, 2, 3)


def pieces(lengths: Sequence[int], seed: int = 0) -> list[DocumentChunk]:
    made = [np.array(random_tokens(n, 7, seed=seed + i), np.int32) for i, n in enumerate(lengths)]
    return [DocumentChunk(0, i, t, 0, len(t)) for i, t in enumerate(made)]


class Counting(StreamedFeatures):
    """Counts the texts that it reads."""

    texts = 0

    def compute(self, sequences: Sequence[np.ndarray], width: int) -> tuple[torch.Tensor, ...]:
        self.texts += len(sequences)
        return super().compute(sequences, width)


def streamed(hidden_layers: tuple[int, ...] = LAYERS) -> Counting:
    decoder = tiny_decoder(dtype=torch.bfloat16)
    return Counting(lambda: decoder, hidden_layers)


def cached(
    folder: Path, chosen: Sequence[DocumentChunk], hidden_layers: tuple[int, ...] = LAYERS, room: int = 1 << 20
) -> tuple[CachedFeatures, Counting]:
    source = streamed(hidden_layers)
    lengths = [len(p.tokens) for p in chosen]
    cache = HiddenStateCache(folder, "abc", hidden_layers, lengths, TINY.hidden, room)
    return CachedFeatures(source, [cache], TINY, torch.bfloat16), source


def same(a: FeatureSource, b: FeatureSource, chosen: Sequence[DocumentChunk], wide: int = 32) -> None:
    for ours, theirs in zip(a.get(chosen, wide), b.get(chosen, wide), strict=True):
        for i, chunk in enumerate(chosen):
            length = len(chunk)
            torch.testing.assert_close(ours[i, :length].float(), theirs[i, :length].float(), atol=0.03, rtol=0.03)


@pytest.mark.parametrize("hidden_layers", [(0,), (1, 3), (3, 0, 2), LAYERS])
def test_states_are_those_of_a_runner(hidden_layers: tuple[int, ...]) -> None:
    decoder, texts = tiny_decoder(), [random_tokens(9, 7), random_tokens(5, 7, seed=1)]
    found = compute_hidden_states(decoder, pad_sequences([np.array(t) for t in texts], 16), hidden_layers)
    for i, text in enumerate(texts):
        expected = DecoderRunner(decoder).forward([0], chain_tree(text), hidden_layers=hidden_layers).hidden_states
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours[i, : len(text)], theirs)


def test_a_document_is_read_once_and_then_looked_up(tmp_path: Path) -> None:
    chosen = pieces([9, 20, 14])
    store, source = cached(tmp_path, chosen)
    same(store, streamed(), chosen)
    same(store, streamed(), chosen[::-1])
    assert source.texts == 3
    again, source = cached(tmp_path, chosen, hidden_layers=(2, 3))
    same(again, streamed((2, 3)), chosen)
    assert source.texts == 0, "another training that taps less needs no pass"


def test_a_piece_has_the_states_of_its_document(tmp_path: Path) -> None:
    whole = pieces([20])[0]
    store, _ = cached(tmp_path, [whole])
    part = DocumentChunk(0, 0, whole.tokens, 6, 15)
    states, all_states = store.get([part], 16), streamed().get([whole], 32)
    for ours, theirs in zip(states, all_states, strict=True):
        torch.testing.assert_close(ours[0, :9].float(), theirs[0, 6:15].float(), atol=0.03, rtol=0.03)


def test_what_does_not_fit_is_read_every_time(tmp_path: Path) -> None:
    chosen = pieces([9, 20, 14])
    store, source = cached(tmp_path, chosen, room=30 * TINY.hidden * 2 * len(LAYERS))
    same(store, streamed(), chosen)
    same(store, streamed(), chosen)
    assert source.texts == 4
    assert (tmp_path / "abc-3.bf16").stat().st_size == 29 * TINY.hidden * 2


def test_new_texts_under_old_numbers_are_read_anew(tmp_path: Path) -> None:
    old, new = pieces([9, 20, 14]), pieces([9, 20, 14], seed=50)
    same(cached(tmp_path, old)[0], streamed(), old)
    same(cached(tmp_path, new)[0], streamed(), new)
    grown = [*new, DocumentChunk(0, 3, new[0].tokens[::-1].copy(), 0, 9)]
    store, source = cached(tmp_path, grown)
    same(store, streamed(), grown)
    assert source.texts == 1


def test_rows_without_a_checksum_are_computed_again(tmp_path: Path) -> None:
    """An interruption between rows and checksum."""
    chosen = pieces([9, 20])
    same(cached(tmp_path, chosen)[0], streamed(), chosen)
    marks = tmp_path / "abc-2.done"
    marks.write_bytes(marks.read_bytes()[:4] + bytes(4))
    with (tmp_path / "abc-2.bf16").open("r+b") as file:
        file.seek(12 * TINY.hidden * 2)
        file.write(b"\xff" * 100)
    store, source = cached(tmp_path, chosen)
    same(store, streamed(), chosen)
    assert source.texts == 1


def test_documents_that_a_cut_file_lost_are_read_anew(tmp_path: Path) -> None:
    chosen = pieces([9, 20])
    same(cached(tmp_path, chosen)[0], streamed(), chosen)
    with (tmp_path / "abc-2.bf16").open("r+b") as file:
        file.truncate(12 * TINY.hidden * 2)
    store, source = cached(tmp_path, chosen)
    same(store, streamed(), chosen)
    assert source.texts == 1
