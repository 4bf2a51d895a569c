"""Requests beside requests, with every method of the catalogue: unequal lengths, drafts with a shorter context, requests that fail, cached prefixes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch

from foretell.accept import Match, Rejection
from foretell.catalogue import BUILT_IN, Entry, Parts, build
from foretell.config import SpeculativeConfig
from foretell.context import Context, Step
from foretell.draft import Cascade, DraftModel, Eagle, Lookup, Mix, Nothing, Retriever, Translated
from foretell.draft.base import Continuation
from foretell.engine import Completion, Engine, Request, Update
from foretell.method import AnyMethod, Method
from foretell.model import native
from foretell.model.native.decoder import NativeDecoder
from foretell.model.runner import DecoderRunner
from foretell.sampling import Sampling
from foretell.shape import Chain, Root, Trie
from foretell.testing import TINY, letter_codec, tiny_decoder
from helpers import (
    VARIANTS,
    VOCAB,
    Variant,
    engine_for,
    naive,
    of_catalogue,
    random_tokens,
    small_model,
    speculator,
    target,
    unchecked,
    wide_target,
)

every_entry = pytest.mark.parametrize("entry", BUILT_IN, ids=lambda e: e.name)
kernels_only = pytest.mark.skipif(not native.available(), reason="the CPU kernels are not available")
PLAIN: AnyMethod = Method(Nothing(), Root(), Match())


class Strict(Engine):
    """Raises whatever a step raises."""

    def _observe(self, step: Step) -> None:
        self.method.keep(step)

    def step(self) -> list[Update]:
        with torch.inference_mode():
            self._admit()
            return self._advance(self._read_next())


def tokens(completions: Sequence[Completion]) -> list[list[int]]:
    return [list(c.tokens) for c in completions]


def unequal(temperature: float) -> list[Request]:
    """Requests with room for 0, 1 and 2 drafts beside longer ones, which they join and leave."""
    lengths = ((9, 12), (5, 1), (3, 2), (7, 3), (12, 9), (4, 1))
    return [Request(random_tokens(n, seed=n), Sampling(temperature, seed=n), new) for n, new in lengths]


@cache
def wide_engine_texts(temperature: float) -> list[list[int]]:
    return tokens(wide_engine(PLAIN, 1).complete(unequal(temperature)))


def wide_engine(method: AnyMethod, rows: int) -> Engine:
    """The wide target on the CPU kernels."""
    return Strict(DecoderRunner(NativeDecoder(wide_target(), "float32")), method, rows=rows, chunk=8)


def wide_method(entry: Entry) -> AnyMethod:
    drafts = [DecoderRunner(NativeDecoder(wide_target(*w), "float32")) for w in ((5, 1), (0, 2))]
    trained = speculator(entry.speculator, wide=True) if entry.speculator else None
    return of_catalogue(entry, wide_target(), drafts, trained)


@kernels_only
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@every_entry
def test_requests_of_any_room_run_beside_each_other_on_the_kernels(entry: Entry, temperature: float) -> None:
    with unchecked():
        found = wide_engine(wide_method(entry), 2).complete(unequal(temperature))
        alone = [wide_engine(wide_method(entry), 1).complete([r])[0] for r in unequal(temperature)[:3]]
    assert [len(c.tokens) for c in found] == [r.max_new_tokens for r in unequal(temperature)]
    assert tokens(found[:3]) == tokens(alone)
    if entry.lossless and (entry.same_seed or temperature == 0):
        assert tokens(found) == wide_engine_texts(temperature)


@cache
def plain_texts(temperature: float) -> list[list[int]]:
    return [naive(target(), r) for r in unequal(temperature)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_requests_of_any_room_run_beside_each_other(variant: Variant, temperature: float) -> None:
    with unchecked():
        found = Strict(DecoderRunner(target()), variant.make(VOCAB), rows=2).complete(unequal(temperature))
    assert [len(c.tokens) for c in found] == [r.max_new_tokens for r in unequal(temperature)]
    if variant.lossless and (variant.same_seed or temperature == 0):
        assert tokens(found) == plain_texts(temperature)
