"""examples/digits.py: after a few training steps, every method gives the same pictures."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import digits  # type: ignore[import-not-found]


def test_pictures_do_not_depend_on_the_method(tmp_path: Path) -> None:
    torch.manual_seed(0)
    target, small = digits.train(8, 1, 12), digits.train(4, 1, 12, seed=1)
    results = {name: digits.generate(target, method, 3) for name, method in digits.methods(small).items()}
    plain, passes, _ = results.pop("plain")
    assert passes == digits.PIXELS and plain.shape == (3, 8, 8) and plain.max() < digits.LEVELS
    for name, (pictures, fewer, _) in results.items():
        assert fewer < digits.PIXELS
        assert name == "draft, rejection" or (pictures == plain).all()
    digits.save(plain, tmp_path / "plain.png")
    assert (tmp_path / "plain.png").stat().st_size > 100


def test_a_pixel_sees_only_what_comes_before_it() -> None:
    network = digits.PixelCNN(8, 2).double()
    pixels = torch.randint(0, digits.LEVELS, (1, digits.PIXELS), generator=torch.Generator().manual_seed(0))
    before = network(pixels, torch.tensor([3]))
    changed = pixels.clone()
    changed[0, 30] = (changed[0, 30] + 5) % digits.LEVELS
    different = (network(changed, torch.tensor([3])) != before).any(-1)[0].numpy()
    assert np.flatnonzero(different).min() == 31
