"""Shared by the tests of training: a tiny target on disk, sets of its own answers, and commands as users give them."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from foretell.api import Model
from foretell.datastore import fingerprint
from foretell.load import load
from foretell.train.dataset import Collection, Manifest, Record
from foretell.train.settings import Portion, Settings


@cache
def target(path: str, dtype: str = "float32") -> Model:
    """A tiny model, loaded once."""
    return load(path, dtype)


def answers(folder: Path, model: Model, texts: int = 24, seed: int = 0, tokens: int = 40, prompt: int = 8) -> Path:
    """A training set: the model continues random prompts greedily."""
    manifest = Manifest(
        model=model.name,
        fingerprint=model.source.fingerprint(),
        tokenizer=fingerprint(model.codec),
        vocab=model.config.vocab,
        kind="prompts",
        seed=seed,
    )
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 256, prompt + int(rng.integers(0, 4))).tolist() for _ in range(texts)]
    engine = model.engine("autoregressive", rows=texts)
    numbers = [engine.submit(_request(p, tokens - int(rng.integers(0, 12)))) for p in prompts]
    found: dict[int, list[int]] = {n: [] for n in numbers}
    for update in engine.run():
        found[update.request] += update.tokens
    with Collection(folder, manifest) as collection:
        for i, (prompt_tokens, n) in enumerate(zip(prompts, numbers, strict=True)):
            collection.add(Record(number=i, tokens=prompt_tokens + found[n], start=len(prompt_tokens)))
        collection.seal()
    return folder


def _request(prompt: Sequence[int], tokens: int):  # type: ignore[no-untyped-def]
    from foretell.engine import Request

    return Request(tuple(prompt), max_new_tokens=tokens)


def settings(model: str | Path, data: Path, out: Path, **changed: object) -> Settings:
    """A training of seconds."""
    values: dict[str, object] = {
        "recipe": "mlp_speculator", "model": str(model), "data": (Portion(folder=str(data), weight=1.0),), "out": str(out), "steps": 12,
        "batch_tokens": 256, "sequence": 64, "warmup": 2, "precision": "no", "draft_vocab": 64, "measure_every": 6, "measure_prompts": 3,
        "measure_tokens": 12, "lr": 3e-3,
    }  # fmt: skip
    return Settings.model_validate(values | changed)
