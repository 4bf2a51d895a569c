"""examples/audio_codes.py: the codec gives back what it was given, and every method gives the same melodies."""

import sys
import wave
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import audio_codes  # type: ignore[import-not-found]


def test_the_transform_is_exact_and_codes_keep_the_sound() -> None:
    sounds = [audio_codes.melody(seed) for seed in range(12)]
    codec = audio_codes.Codec(sounds)
    spectra, whole = codec._spectra(sounds[0]), np.zeros(len(sounds[0]) + audio_codes.HOP)
    for i, spectrum in enumerate(spectra):
        whole[i * audio_codes.HOP : (i + 2) * audio_codes.HOP] += codec._basis @ spectrum
    inside = slice(audio_codes.HOP, len(sounds[0]))
    assert np.allclose(whole[inside], sounds[0][inside]), "overlapping frames cancel their aliases"
    codes = codec.encode(sounds[0])
    assert len(codes) == audio_codes.LENGTH
    error = codec.decode(codes)[inside.start :] - sounds[0][inside]
    assert (error**2).mean() < 0.5 * (sounds[0] ** 2).mean()


@pytest.mark.exhaustive
def test_melodies_do_not_depend_on_the_method(tmp_path: Path) -> None:
    sounds = [audio_codes.melody(seed) for seed in range(12)]
    codes = torch.tensor([audio_codes.Codec(sounds).encode(sounds[0])])
    target, small = audio_codes.train(codes, 16, 40), audio_codes.train(codes, 8, 20, seed=1)
    results = {name: audio_codes.generate(target, m, 3, 1.0) for name, m in audio_codes.methods(small).items()}
    plain, passes = results.pop("plain")
    assert passes == audio_codes.LENGTH and {len(c) for c in plain} == {audio_codes.LENGTH}
    kinds = np.array(plain).reshape(3, -1, 2) // audio_codes.CODES
    assert (kinds == (0, 1)).all(), "coarse and fine codes take turns"
    for name, (written, fewer) in results.items():
        assert fewer < passes and (name == "draft, rejection" or written == plain)


@pytest.mark.exhaustive
def test_the_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    audio_codes.main(["--steps", "3", "--melodies", "12", "--count", "1", "--out", str(tmp_path)])
    assert capsys.readouterr().out.count("passes for 128 codes") == 4
    with wave.open(str(tmp_path / "plain-0.wav")) as file:
        assert file.getnframes() == audio_codes.FRAMES * audio_codes.HOP and file.getframerate() == audio_codes.RATE
