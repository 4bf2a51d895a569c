"""Checkpoints: bytes and exactness per number of bits, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from toy import TinySource, card_of

from foretell.speculator import checkpoint
from foretell.speculator.checkpoint import WEIGHTS, Bits, load_own, save, write_weights
from foretell.speculator.config_file import CONFIG
from foretell.speculator.network.medusa import Medusa, MedusaConfig
from foretell.testing import TINY

SOURCE = TinySource(replace(TINY, hidden=96))


@pytest.fixture
def heads() -> Medusa:
    return Medusa(MedusaConfig(target=card_of(SOURCE), heads=2), SOURCE.embedding_and_head())


def read_back(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in load_own(folder, SOURCE.embedding_and_head()).state_dict().items()}


@pytest.mark.parametrize(("bits", "most"), [(16, 0.004), (8, 0.02), (4, 0.15)])
def test_every_row_is_as_exact_as_its_bits_allow(tmp_path: Path, heads: Medusa, bits: Bits, most: float) -> None:
    torch.manual_seed(3)
    for parameter in heads.parameters():
        # Of very different sizes: one scale for all would lose the small rows.
        parameter.data = torch.randn_like(parameter) * torch.logspace(-6, 1, len(parameter)).view(
            -1, *[1] * (parameter.ndim - 1)
        )
    save(tmp_path, heads, heads.config, bits)
    found = read_back(tmp_path)
    for name, parameter in heads.named_parameters():
        rows = parameter.detach().view(len(parameter), -1)
        lost = found[name].view_as(rows) - rows
        assert (lost.norm(dim=1) <= most * rows.norm(dim=1)).all(), name


def test_numbers_that_four_bits_represent_are_exact(tmp_path: Path, heads: Medusa) -> None:
    for parameter in heads.parameters():
        parameter.data = torch.randint(-7, 8, parameter.shape) * 0.25
        parameter.data[..., ::32] = -1.75
    save(tmp_path, heads, heads.config, 4)
    found = read_back(tmp_path)
    assert all(torch.equal(found[n], p) for n, p in heads.named_parameters())


def test_a_full_disk_is_told_in_a_sentence(tmp_path: Path, heads: Medusa, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(ValueError, match=r"the weights cannot be written \(No space left on device\); make room"):
        save(tmp_path, heads, heads.config)
    assert not list(tmp_path.iterdir())


def test_half_the_bits_take_half_the_space(tmp_path: Path, heads: Medusa) -> None:
    numbers = sum(p.numel() for p in heads.parameters() if p.ndim == 2)
    room = []
    every: tuple[Bits, ...] = (16, 8, 4)
    for bits in every:
        save(tmp_path, heads, heads.config, bits)
        room.append(8 * (tmp_path / WEIGHTS).stat().st_size / numbers)
    rest = room[0] - 16
    assert room[1] - rest == pytest.approx(8 + 32 / 96, abs=0.5)
    assert room[2] - rest == pytest.approx(4 + 16 / 32, abs=0.5)


def test_numbers_without_their_scale_are_refused(tmp_path: Path, heads: Medusa) -> None:
    save(tmp_path, heads, heads.config, 8)
    tensors = load_file(tmp_path / WEIGHTS)
    name = next(n for n in tensors if n.endswith("::scale"))
    save_file({n: t for n, t in tensors.items() if n != name}, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=r"stored as torch\.int8 without a scale"):
        load_own(tmp_path, SOURCE.embedding_and_head())
    save_file(tensors | {name: tensors[name][:3].contiguous()}, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match="scales that do not fit"):
        load_own(tmp_path, SOURCE.embedding_and_head())


@pytest.mark.parametrize("tokens", [[0, 1, 99], [-1, 1, 2], [1, 0, 2], [1, 1, 2], [0, 1], [0.0, 1.0, 2.0]])
def test_drafted_tokens_that_the_target_lacks_are_refused_in_a_sentence(tmp_path: Path, tokens: list[float]) -> None:
    network = Medusa(MedusaConfig(target=card_of(SOURCE), heads=2, draft_vocab=3), SOURCE.embedding_and_head())
    save(tmp_path, network, network.config)
    write_weights(tmp_path, load_file(tmp_path / WEIGHTS) | {"token_of": torch.tensor(tokens)})
    with pytest.raises(ValueError, match=r"damaged: token_of is no ascending list of 3 of the target's \d+ tokens"):
        load_own(tmp_path, SOURCE.embedding_and_head())


def test_a_configuration_nested_without_end_is_refused_in_a_sentence(tmp_path: Path, heads: Medusa) -> None:
    save(tmp_path, heads, heads.config)
    (tmp_path / CONFIG).write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config.json"):
        load_own(tmp_path, SOURCE.embedding_and_head())


def test_a_key_that_is_not_read_is_refused_by_its_name(tmp_path: Path, heads: Medusa) -> None:
    """Files from before 0.1.0 have such keys, as `taps`, too."""
    save(tmp_path, heads, heads.config)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | {"taps": [1, 2]}))
    with pytest.raises(ValueError, match=r"config.json: taps: extra inputs are not permitted"):
        load_own(tmp_path, SOURCE.embedding_and_head())
