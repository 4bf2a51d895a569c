"""Which trained speculator a method uses: the one named, else the installed one; and what is refused."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from toy import TARGET, TinySource, Toy, ToyConfig, card_of

from command import run_foretell
from foretell.accept import Match
from foretell.catalogue import BuildContext, find
from foretell.catalogue.inputs import NamedInputs
from foretell.catalogue.speculators import trained_speculator
from foretell.draft import NoDrafter
from foretell.engine.method import AnyMethod, Method
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import RootOnly
from foretell.speculator import network
from foretell.speculator.checkpoint import save
from foretell.speculator.installed import (
    PACKAGE,
    PACKAGE_TARGET,
    InstalledSpeculators,
    find_all_installed,
    find_installed,
    install_hint,
)
from foretell.speculator.load import is_speculator
from foretell.speculator.network.base import Speculator
from foretell.testing import TINY


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(network.NETWORKS, "toy", (ToyConfig, Toy))
    yield


def parts(source: TinySource | None, folder: Path | None = None) -> BuildContext:
    return BuildContext(
        vocab=TINY.vocab, network=TARGET, checkpoint=source, speculators=() if folder is None else (folder,)
    )


def write(folder: Path, source: TinySource, fingerprint: str | None = None) -> Path:
    config = ToyConfig(target=card_of(source, fingerprint=fingerprint))
    save(folder, Toy(config, source.embedding_and_head()), config)
    return folder


def test_the_named_one_is_read_in_the_dtype_of_the_target(tmp_path: Path) -> None:
    source = TinySource()
    folder = write(tmp_path / "a", source)
    assert is_speculator(folder)
    for dtype in (torch.float32, torch.bfloat16):
        found = trained_speculator(parts(TinySource(dtype=dtype), folder), "toy")
        assert found.dtype == dtype == found.embed(torch.tensor([1])).dtype
        assert not any(p.requires_grad for p in found.parameters()) and not found.training


def test_a_plain_decoder_lends_its_own_ends(tmp_path: Path) -> None:
    found = trained_speculator(parts(None, write(tmp_path / "a", TinySource())), "toy")
    assert torch.equal(found.embed(torch.tensor([3]))[0], TARGET.embedding[3])


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that Python takes installed packages from."""
    folder = tmp_path / "site"
    monkeypatch.syspath_prepend(folder)
    find_all_installed.cache_clear()
    yield folder
    find_all_installed.cache_clear()


def install(site: Path, name: str, target: str, value: str = "") -> Path:
    """An installed package that registers speculators for a target, and cannot be imported."""
    package, metadata = site / name, site / f"{name}-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[foretell.speculators]\n{target} = {value or name}\n")
    return package


def test_an_installed_one_is_found_by_kind_and_fingerprint(site: Path) -> None:
    source, other = TinySource(), TinySource(seed=3)
    write(install(site, "a_package", "other") / "toy", other)
    folder = write(install(site, "b_package", "tiny", "b_package.weights") / "weights" / "toy", source)
    assert find_installed("toy", source.fingerprint()) == folder
    assert find_installed("medusa", source.fingerprint()) is None
    assert [s.target for s in find_all_installed().speculators if s.kind == "toy"] == ["other", "tiny"]
    assert trained_speculator(parts(source), "toy").target_info.fingerprint == source.fingerprint()


def test_an_installed_one_does_not_take_the_place_of_a_language_model_silently(site: Path) -> None:
    source = TinySource()
    write(install(site, "a_package", "tiny") / "toy", source)
    entry = replace(
        find("medusa"), name="toys", builder=lambda context, options: _toy_method(trained_speculator(context, "toy"))
    )
    context = replace(parts(source), drafts=(DecoderRunner(TARGET),))
    assert entry.build(context).inputs == {"speculators"}
    with pytest.raises(ValueError, match="the draft model small would have no effect: toys does not draft with it"):
        NamedInputs(drafts=["small"]).require_used({"toys": entry.build(context).inputs})


def _toy_method(found: Speculator) -> AnyMethod:
    assert found.kind == "toy"
    return Method(NoDrafter(), RootOnly(), Match())


def test_broken_packages_become_sentences_and_harm_no_others(site: Path) -> None:
    install(site, "a_missing", "tiny", "a_nowhere.at_all")
    install(site, "b_empty", "tiny")
    for name, content in (
        ("c_damaged", "{"),
        ("d_list", "[]"),
        ("e_published", '{"medusa_num_heads": 4}'),
        ("f_anonymous", '{"kind": "toy", "target": {"fingerprint": ""}}'),
    ):
        folder = install(site, name, "tiny") / "toy"
        folder.mkdir()
        (folder / "config.json").write_text(content)
    folder = write(install(site, "z_good", "tiny") / "toy", TinySource())
    assert find_installed("toy", TinySource().fingerprint()) == folder
    reasons = (
        "a_missing cannot be used: its entry point in foretell.speculators names 'a_nowhere.at_all', which is no "
        "package",
        "b_empty cannot be used: .*/b_empty: no folder with config.json in it",
        "c_damaged cannot be used: .*: not valid JSON",
        "d_list cannot be used: .*: a JSON object was expected",
        "e_published cannot be used: .*: no `kind`, or no `fingerprint`",
        "f_anonymous cannot be used: .*: no `kind`, or no `fingerprint`",
    )
    for problem, reason in zip(find_all_installed().problems, reasons, strict=True):
        assert re.fullmatch(f"the speculators of the package {reason}.*; upgrade or remove it", problem)
    with pytest.raises(ValueError, match=r"no medusa speculator is installed .* package a_missing cannot be used"):
        trained_speculator(parts(TinySource()), "medusa")


def test_without_any_the_error_names_how_to_get_one() -> None:
    with pytest.raises(
        ValueError,
        match=r"no toy speculator is installed .*; train one with `foretell train toy`, .* --draft-model DIR",
    ):
        trained_speculator(parts(TinySource()), "toy")


def test_the_sentence_names_the_package_where_it_holds_such_a_speculator() -> None:
    assert f"install the package {PACKAGE}, train one with `foretell train eagle3`" in install_hint(
        "eagle3", PACKAGE_TARGET
    )
    assert "install" not in install_hint("pass", PACKAGE_TARGET) + install_hint("eagle3", "0" * 16)


def test_methods_lists_installed_speculators_and_broken_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "speculator (ships for smollm2-135m)" in run_foretell("methods", "--markdown").stdout
    monkeypatch.setattr(
        "foretell.speculator.installed.find_all_installed", lambda: InstalledSpeculators((), ("one is broken",))
    )
    without = run_foretell("methods", "--markdown")
    assert "ships for" not in without.stdout and "speculator (train one)" in without.stdout
    assert without.stderr == "foretell: one is broken\n" and without.exit_code == 0


def test_one_for_another_target_is_refused(tmp_path: Path) -> None:
    sizes = write(tmp_path / "sizes", TinySource(replace(TINY, hidden=24, head_dim=6)))
    with pytest.raises(
        ValueError, match=r"another model \(tiny: 2 layers, width 24, 7 tokens.* has 2 layers, width 16, 7 tokens"
    ):
        trained_speculator(parts(TinySource(), sizes), "toy")
    seeds = write(tmp_path / "seeds", TinySource(seed=3))
    with pytest.raises(
        ValueError, match=rf"fingerprint {TinySource(seed=3).fingerprint()}.*{TinySource().fingerprint()}"
    ):
        trained_speculator(parts(TinySource(), seeds), "toy")
    anonymous = write(tmp_path / "anonymous", TinySource(seed=3), fingerprint="")
    assert trained_speculator(parts(TinySource(), anonymous), "toy")


def test_one_of_another_kind_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", TinySource())
    with pytest.raises(ValueError, match="of kind toy, and this method drafts with one of kind medusa"):
        trained_speculator(parts(TinySource(), folder), "medusa")


def test_models_of_transformers_have_none() -> None:
    with pytest.raises(ValueError, match="own decoder only"):
        trained_speculator(BuildContext(vocab=7, network=None), "toy")
