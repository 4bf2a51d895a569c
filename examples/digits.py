"""Speculation for any autoregressive model: handwritten digits written pixel by pixel, with the loop that decodes
language models.

A small PixelCNN (van den Oord et al., arXiv 1601.06759) learns scikit-learn's 8 x 8 digits, a smaller one drafts for
it, and Jacobi decoding needs no draft at all (predictive sampling, Wiggers & Hoogeboom, arXiv 2002.09928). A pixel is a
token: 17 grey levels, after one token that names the digit. All this file adds is `PixelRunner`: how a network without
cache reads a tree of pixels. The pictures are the same, in fewer passes.

    pip install 'foretell[examples]'
    python examples/digits.py --out pictures
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import nn

from foretell import Engine, Method, Request, SamplingParams
from foretell.accept import Match, Rejection
from foretell.core.context import ModelOutput
from foretell.core.tree import TokenTree
from foretell.draft import DraftModel, JacobiDrafter, NoDrafter
from foretell.engine.method import AnyMethod
from foretell.model.runner import Runner
from foretell.shape import Chain, RootOnly, Trie

SIDE, LEVELS, CLASSES = 8, 17, 10
PIXELS, VOCAB = SIDE * SIDE, LEVELS + CLASSES


class MaskedConv2d(nn.Conv2d):
    """A convolution that sees the pixels above and to the left; `own`: also the pixel itself."""

    def __init__(self, into: int, out: int, size: int, own: bool) -> None:
        super().__init__(into, out, size, padding=size // 2)
        mask = torch.ones(size, size)
        mask[size // 2, size // 2 + own :] = 0
        mask[size // 2 + 1 :] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Float[torch.Tensor, "b c y x"]) -> Float[torch.Tensor, "b o y x"]:
        """Convolve with the masked kernel."""
        return F.conv2d(x, self.weight * self.mask, self.bias, padding=self.padding)


class PixelCNN(nn.Module):
    """Scores of every pixel's grey level given the class and the pixels before it in raster order."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.value, self.digit = nn.Embedding(LEVELS, width), nn.Embedding(CLASSES, width)
        self.place = nn.Parameter(torch.zeros(width, SIDE, SIDE))
        self.first = MaskedConv2d(width, width, 7, own=False)
        self.layers = nn.ModuleList(MaskedConv2d(width, width, 3, own=True) for _ in range(layers))
        self.last = nn.Conv2d(width, LEVELS, 1)

    def forward(
        self, pixels: Int[torch.Tensor, "b p"], digits: Int[torch.Tensor, " b"]
    ) -> Float[torch.Tensor, "b p l"]:
        """Scores for all pixels at once."""
        image = self.value(pixels).transpose(1, 2).unflatten(2, (SIDE, SIDE))
        x = self.first(image) + self.place + self.digit(digits)[:, :, None, None]
        for layer in self.layers:
            x = x + layer(F.relu(x))
        return self.last(F.relu(x)).flatten(2).transpose(1, 2)


class PixelRunner(Runner):
    """Reads trees of pixels by running the whole masked network once, every path of the tree as a picture of its own.

    Kept tokens are remembered instead of keys and values: the simplest cache there is.
    """

    vocab, context = VOCAB, 1 + PIXELS

    def __init__(self, network: PixelCNN) -> None:
        self.network = network
        self._kept: dict[int, list[int]] = {}
        self._tree: dict[int, list[int]] = {}

    def length(self, row: int) -> int:
        """Tokens kept: the class, then pixels."""
        return len(self._kept.get(row, ()))

    @torch.inference_mode()
    def forward(
        self,
        rows: Sequence[int],
        tree: TokenTree,
        *,
        active: Bool[np.ndarray, "b n"] | None = None,
        scored: Bool[np.ndarray, "b n"] | None = None,
        hidden_layers: Sequence[int] = (),
    ) -> ModelOutput:
        """Scores after the wanted nodes; a node on the way to another is scored by the same picture."""
        wanted = tree.active if scored is None else tree.active & scored
        at, pictures, where = np.full(tree.token.shape, -1), list[list[int]](), list[tuple[int, int]]()
        for i, row in enumerate(rows):
            self._tree[row] = tree.token[i].tolist()
            for node in sorted(np.flatnonzero(wanted[i]).tolist(), key=lambda n, i=i: -tree.depth[i, n]):
                if at[i, node] < 0:
                    path = tree.ancestors(i, node)
                    pictures.append(self._kept.get(row, []) + tree.token[i, path].tolist())
                    for n in path:
                        if wanted[i, n] and at[i, n] < 0:
                            at[i, n] = len(where)
                            where.append((len(pictures) - 1, self.length(row) + int(tree.depth[i, n])))
        if not where:
            return ModelOutput(torch.zeros(0, VOCAB), at)
        picture, place = (list(part) for part in zip(*where, strict=True))
        return ModelOutput(F.pad(self._scores(pictures)[picture, place], (0, CLASSES), value=-torch.inf), at)

    def _scores(self, pictures: list[list[int]]) -> Float[torch.Tensor, "b p l"]:
        digits = torch.tensor([p[0] - LEVELS for p in pictures])
        pixels = torch.zeros(len(pictures), PIXELS, dtype=torch.long)
        for i, p in enumerate(pictures):
            # A guess may be a class where a pixel belongs: it is never accepted, so what is read in its place does not
            # matter.
            pixels[i, : len(p) - 1] = torch.tensor(p[1:][:PIXELS]).clamp(max=LEVELS - 1)
        return self.network(pixels, digits)

    def commit(self, row: int, path: Sequence[int]) -> None:
        """Remember these nodes."""
        self._kept.setdefault(row, []).extend(self._tree[row][node] for node in path)

    def truncate(self, row: int, length: int) -> None:
        """Forget what came later."""
        self._kept[row] = self._kept.get(row, [])[:length]


def train(width: int, layers: int, steps: int, seed: int = 0) -> PixelCNN:
    """Learn the digits that scikit-learn ships with."""
    from sklearn.datasets import load_digits

    torch.manual_seed(seed)
    images, labels = load_digits(return_X_y=True)
    pixels, digits = torch.from_numpy(images).long(), torch.from_numpy(labels).long()
    network = PixelCNN(width, layers)
    optimizer = torch.optim.AdamW(network.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps + 1)
    for step in range(steps):
        batch = torch.randint(0, len(pixels), (128,))
        loss = F.cross_entropy(network(pixels[batch], digits[batch]).flatten(0, 1), pixels[batch].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"  step {step:5}: {loss.item() / np.log(2):.3f} bits per pixel", flush=True)
    # Wide numbers, so that the size of a batch does not show in the last bits.
    return network.eval().double()


def methods(small: PixelCNN) -> dict[str, AnyMethod]:
    """Ways to write the same pictures."""

    def draft() -> DraftModel:
        return DraftModel(PixelRunner(small))

    return {
        "plain": Method(NoDrafter(), RootOnly(), Match()),
        "jacobi": Method(JacobiDrafter(16), Trie(16), Match()),
        "draft, match": Method(draft(), Chain(6), Match()),
        "draft, rejection": Method(draft(), Chain(6), Rejection()),
    }


def write(target: PixelCNN, method: AnyMethod, count: int) -> tuple[np.ndarray, int, float]:
    """Pictures of 0, 1, 2, …, passes of the target per picture, and seconds."""
    engine = Engine(PixelRunner(target), method, rows=count)
    requests = [
        Request([LEVELS + i % CLASSES], SamplingParams(temperature=1.0, seed=i), max_new_tokens=PIXELS)
        for i in range(count)
    ]
    start = time.perf_counter()
    found = engine.complete(requests)
    seconds = time.perf_counter() - start
    passes = round(float(np.mean([done.statistics.target_passes for done in found])))
    return np.array([done.tokens for done in found]).reshape(count, SIDE, SIDE), passes, seconds


def save(pictures: np.ndarray, path: Path, zoom: int = 8) -> None:
    """Draw the pictures in rows of ten."""
    from PIL import Image

    rows = [np.hstack([np.pad(p, 1) for p in pictures[i : i + 10]]) for i in range(0, len(pictures), 10)]
    sheet = (255 - np.vstack(rows).astype(np.uint16) * 255 // (LEVELS - 1)).astype(np.uint8)
    Image.fromarray(sheet).resize((sheet.shape[1] * zoom, sheet.shape[0] * zoom), Image.Resampling.NEAREST).save(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train both networks, write pictures in every way, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1500, help="training steps of the target; the draft gets as many")
    parser.add_argument("--count", type=int, default=20, help="pictures")
    parser.add_argument("--out", type=Path, default=Path("pictures"))
    options = parser.parse_args(arguments)
    print("training the target")
    target = train(64, 6, options.steps)
    print("training the draft")
    small = train(16, 1, options.steps)
    options.out.mkdir(parents=True, exist_ok=True)
    plain = None
    for name, method in methods(small).items():
        pictures, passes, seconds = write(target, method, options.count)
        save(pictures, options.out / f"{name.replace(', ', '-')}.png")
        plain = pictures if plain is None else plain
        same = "the same pictures" if (pictures == plain).all() else "other pictures of the same law"
        print(f"{name:18} {passes:3} passes for {PIXELS} pixels, {seconds:5.1f} s, {same}")


if __name__ == "__main__":
    main()
