"""Reads configurations of models that `foretell compress` wrote in a form which other programs cannot run.

Their `model_type` is one that no other program knows, so that none runs them without what it does not read.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from foretell.model.config.compressed import LowRank, Ranks
from foretell.utils.validation import Fields, read_json

COMPRESSED = "foretell_compressed"
"""Their `model_type`."""
BASE_TYPE = "compressed_model_type"
"""Key of the `model_type` before the compression."""
LOW_RANK, SHORTCUTS = "low_rank", "shortcuts"
CARD = "compression.json"
"""File beside the weights of every compressed model, which says what was done to it."""
COMPRESSED_BY = "foretell_compression"
"""Key of the configuration with the method of that file."""
_REMEDY = "write it again with `foretell compress`"


def compressed_keys(base: str, low_rank: LowRank, shortcuts: bool = False) -> dict[str, Any]:
    """What describes a compressed model of the `model_type` `base`; empty: an ordinary model."""
    if not low_rank and not shortcuts:
        return {}
    ranks = low_rank.stored
    return {"model_type": COMPRESSED, BASE_TYPE: base, "architectures": []} | (
        {LOW_RANK: ranks} if ranks else {SHORTCUTS: True}
    )


def base_config(raw: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The configuration with the `model_type` before the compression; others as they are."""
    if raw.get("model_type") != COMPRESSED:
        return raw
    if not isinstance(raw.get(BASE_TYPE), str):
        raise ValueError(f"{source}: the configuration of a compressed model has no {BASE_TYPE}; {_REMEDY}")
    if LOW_RANK not in raw and SHORTCUTS not in raw:
        raise ValueError(
            f"{source}: a compressed model, and neither {LOW_RANK} nor {SHORTCUTS} says of which kind; {_REMEDY}"
        )
    return {**raw, "model_type": raw[BASE_TYPE]}


def check_card(folder: Path, raw: Mapping[str, Any]) -> None:
    """Check that a compressed model is described by its card; others are as they are.

    Raises:
        ValueError: its card is missing or damaged, or is that of another method.
    """
    method, file = raw.get(COMPRESSED_BY), folder / CARD
    if not file.is_file():
        if method is not None:
            raise ValueError(
                f"{folder}: a compressed model ({method}) without its {CARD}, which says what was done to it; copy "
                f"that file too, or {_REMEDY}"
            )
        return
    named = read_json(file, _REMEDY).get("method")
    if not isinstance(named, str):
        raise ValueError(f"{file}: no method is named, so it is unknown what was done to the model; {_REMEDY}")
    if method is not None and named != method:
        raise ValueError(f"{file}: says {named}, and config.json beside it {method}; {_REMEDY}")


def read_compressed(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The fields of `ModelConfig` of a compressed model.

    Raises:
        ValueError: a rank of a matrix that does not exist, or no positive number.
    """
    if raw.get("model_type") != COMPRESSED:
        return {}
    read = Fields(raw, source)
    if LOW_RANK not in raw:
        return {"shortcuts": read.flag(SHORTCUTS)}
    known = [field.name for field in fields(LowRank)]
    ranks, layers = read.fields(LOW_RANK), read.integer("num_hidden_layers")
    wrong = next((name for name in ranks.raw if name not in known), None)
    if wrong is not None:
        raise read.wrong(LOW_RANK, f"ranks of {', '.join(known)}", wrong)
    return {LOW_RANK: LowRank(**{name: _read_ranks(ranks, name, layers) for name in ranks.raw})}


def _read_ranks(ranks: Fields, name: str, layers: int) -> Ranks:
    by_layer, whole = ranks.integers(name), not isinstance(ranks.raw[name], list)
    if len(by_layer) != (1 if whole else layers) or min(by_layer) < whole:
        raise ranks.wrong(name, f"a positive rank, or {layers} ranks from 0 on", ranks.raw[name])
    return by_layer[0] if whole else by_layer
