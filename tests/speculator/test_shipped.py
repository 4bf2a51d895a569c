"""Which trained speculator a method gets: the one named, else what ships; and what is refused."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from toy import TARGET, TinySource, Toy, ToyConfig, card_of

from foretell.catalogue import Parts
from foretell.catalogue import trained as room
from foretell.catalogue.trained import trained
from foretell.draft import network
from foretell.speculator import is_speculator
from foretell.speculator.checkpoint import save
from foretell.speculator.shipped import SHIPPED, find_shipped, shipped
from foretell.testing import TINY


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(network.NETWORKS, "toy", (ToyConfig, Toy))
    yield


def parts(source: TinySource | None, folder: Path | None = None) -> Parts:
    return Parts(vocab=TINY.vocab, network=TARGET, source=source, speculators=() if folder is None else (folder,))


def write(folder: Path, source: TinySource, fingerprint: str | None = None) -> Path:
    config = ToyConfig(target=card_of(source, fingerprint=fingerprint))
    save(folder, Toy(config, source.ends()), config)
    return folder


def test_the_named_one_is_read_in_the_dtype_of_the_target(tmp_path: Path) -> None:
    source = TinySource()
    folder = write(tmp_path / "a", source)
    assert is_speculator(folder)
    for dtype in (torch.float32, torch.bfloat16):
        found = trained(parts(TinySource(dtype=dtype), folder), "toy")
        assert found.dtype == dtype == found.embed(torch.tensor([1])).dtype
        assert not any(p.requires_grad for p in found.parameters()) and not found.training


def test_a_plain_decoder_lends_its_own_ends(tmp_path: Path) -> None:
    found = trained(parts(None, write(tmp_path / "a", TinySource())), "toy")
    assert torch.equal(found.embed(torch.tensor([3]))[0], TARGET.embedding[3])


def test_what_ships_is_found_by_kind_and_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, other = TinySource(), TinySource(seed=3)
    write(tmp_path / "other" / "toy", other)
    folder = write(tmp_path / "tiny" / "toy", source)
    assert find_shipped("toy", source.fingerprint(), tmp_path) == folder
    assert find_shipped("medusa", source.fingerprint(), tmp_path) is None
    assert [s.target for s in shipped(tmp_path)] == ["other", "tiny"]
    monkeypatch.setattr(room, "find_shipped", lambda kind, mark: find_shipped(kind, mark, tmp_path))
    assert trained(parts(source), "toy").card.fingerprint == source.fingerprint()


def test_without_any_the_sentence_says_how_to_get_one() -> None:
    with pytest.raises(ValueError, match=r"no toy speculator ships .* `foretell train toy`, .* --draft-model DIR"):
        trained(parts(TinySource()), "toy")


def test_one_for_another_target_is_refused(tmp_path: Path) -> None:
    sizes = write(tmp_path / "sizes", TinySource(replace(TINY, hidden=24, head_dim=6)))
    with pytest.raises(
        ValueError, match=r"another model \(tiny: 2 layers, width 24, 7 tokens.* has 2 layers, width 16, 7 tokens"
    ):
        trained(parts(TinySource(), sizes), "toy")
    seeds = write(tmp_path / "seeds", TinySource(seed=3))
    with pytest.raises(
        ValueError, match=rf"fingerprint {TinySource(seed=3).fingerprint()}.*{TinySource().fingerprint()}"
    ):
        trained(parts(TinySource(), seeds), "toy")
    anonymous = write(tmp_path / "anonymous", TinySource(seed=3), fingerprint="")
    assert trained(parts(TinySource(), anonymous), "toy")


def test_one_of_another_kind_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", TinySource())
    with pytest.raises(ValueError, match="of kind toy, and this method drafts with one of kind medusa"):
        trained(parts(TinySource(), folder), "medusa")


def test_models_of_transformers_have_none() -> None:
    with pytest.raises(ValueError, match="own decoder only"):
        trained(Parts(vocab=7, network=None), "toy")


def test_the_package_folder_is_where_wheels_take_it_from() -> None:
    assert SHIPPED.parent.name == "foretell"
    assert shipped() and all(s.kind and s.fingerprint for s in shipped())
