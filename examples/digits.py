"""Speculative decoding of another autoregressive model: handwritten digits, generated pixel by pixel with the engine
that decodes language models.

A small PixelCNN (van den Oord et al., arXiv 1601.06759) learns scikit-learn's 8 x 8 digits, and a smaller one is its
draft model. Jacobi decoding needs no draft model (predictive sampling, Wiggers & Hoogeboom, arXiv 2002.09928). A pixel
is a token, one of 17 grey levels, after one token for the digit. This file adds only `PixelRunner`, which runs a
network without cache on a tree of pixels. The pictures are the same, in fewer passes.

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
from foretell.model.run.runner import Runner
from foretell.shape import Chain, RootOnly, Trie

SIDE, LEVELS, CLASSES = 8, 17, 10
PIXELS, VOCAB = SIDE * SIDE, LEVELS + CLASSES


class MaskedConv2d(nn.Conv2d):
    """A convolution over the pixels above and to the left; `include_center`: and over the pixel itself."""

    def __init__(self, in_channels: int, out_channels: int, size: int, include_center: bool) -> None:
        super().__init__(in_channels, out_channels, size, padding=size // 2)
        mask = torch.ones(size, size)
        mask[size // 2, size // 2 + include_center :] = 0
        mask[size // 2 + 1 :] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Float[torch.Tensor, "b c y x"]) -> Float[torch.Tensor, "b o y x"]:
        """Convolve with the masked kernel."""
        return F.conv2d(x, self.weight * self.mask, self.bias, padding=self.padding)


class PixelCNN(nn.Module):
    """Logits of every pixel's grey level given the class and the pixels before it in raster order."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.pixel_embedding, self.class_embedding = nn.Embedding(LEVELS, width), nn.Embedding(CLASSES, width)
        self.position = nn.Parameter(torch.zeros(width, SIDE, SIDE))
        self.first = MaskedConv2d(width, width, 7, include_center=False)
        self.layers = nn.ModuleList(MaskedConv2d(width, width, 3, include_center=True) for _ in range(layers))
        self.head = nn.Conv2d(width, LEVELS, 1)

    def forward(
        self, pixels: Int[torch.Tensor, "b p"], digits: Int[torch.Tensor, " b"]
    ) -> Float[torch.Tensor, "b p l"]:
        """Logits of all pixels."""
        image = self.pixel_embedding(pixels).transpose(1, 2).unflatten(2, (SIDE, SIDE))
        x = self.first(image) + self.position + self.class_embedding(digits)[:, :, None, None]
        for layer in self.layers:
            x = x + layer(F.relu(x))
        return self.head(F.relu(x)).flatten(2).transpose(1, 2)


class PixelRunner(Runner):
    """Runs trees of pixels: one pass of the network over a batch in which every path of a tree is a picture.

    The cache of a row is the list of its tokens, as the network has no keys and values.
    """

    vocab, context = VOCAB, 1 + PIXELS

    def __init__(self, network: PixelCNN) -> None:
        self.network = network
        self._tokens: dict[int, list[int]] = {}
        self._tree: dict[int, list[int]] = {}

    def length(self, row: int) -> int:
        """Number of committed tokens: the class, then pixels."""
        return len(self._tokens.get(row, ()))

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
        """Logits of the scored nodes; the picture of a node gives the logits of its ancestors, too."""
        wanted = tree.active if scored is None else tree.active & scored
        logit_index, pictures, sources = np.full(tree.token.shape, -1), list[list[int]](), list[tuple[int, int]]()
        for i, row in enumerate(rows):
            self._tree[row] = tree.token[i].tolist()
            for node in sorted(np.flatnonzero(wanted[i]).tolist(), key=lambda n, i=i: -tree.depth[i, n]):
                if logit_index[i, node] < 0:
                    path = tree.ancestors(i, node)
                    pictures.append(self._tokens.get(row, []) + tree.token[i, path].tolist())
                    for n in path:
                        if wanted[i, n] and logit_index[i, n] < 0:
                            logit_index[i, n] = len(sources)
                            sources.append((len(pictures) - 1, self.length(row) + int(tree.depth[i, n])))
        if not sources:
            return ModelOutput(torch.zeros(0, VOCAB), logit_index)
        picture, position = (list(part) for part in zip(*sources, strict=True))
        logits = self._run(pictures)[picture, position]
        return ModelOutput(F.pad(logits, (0, CLASSES), value=-torch.inf), logit_index)

    def _run(self, pictures: list[list[int]]) -> Float[torch.Tensor, "b p l"]:
        digits = torch.tensor([p[0] - LEVELS for p in pictures])
        pixels = torch.zeros(len(pictures), PIXELS, dtype=torch.long)
        for i, p in enumerate(pictures):
            # A draft token may be a class. It is never accepted, so any pixel can take its place.
            pixels[i, : len(p) - 1] = torch.tensor(p[1:][:PIXELS]).clamp(max=LEVELS - 1)
        return self.network(pixels, digits)

    def commit(self, row: int, path: Sequence[int]) -> None:
        """Append the tokens of these nodes."""
        self._tokens.setdefault(row, []).extend(self._tree[row][node] for node in path)

    def truncate(self, row: int, length: int) -> None:
        """Remove the tokens after the first `length`."""
        self._tokens[row] = self._tokens.get(row, [])[:length]


def train(width: int, layers: int, steps: int, seed: int = 0) -> PixelCNN:
    """Train a network on the digits of scikit-learn."""
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
    # float64, so that rounding does not depend on the batch size.
    return network.eval().double()


def methods(small: PixelCNN) -> dict[str, AnyMethod]:
    """The methods that are compared."""

    def draft() -> DraftModel:
        return DraftModel(PixelRunner(small))

    return {
        "plain": Method(NoDrafter(), RootOnly(), Match()),
        "jacobi": Method(JacobiDrafter(16), Trie(16), Match()),
        "draft, match": Method(draft(), Chain(6), Match()),
        "draft, rejection": Method(draft(), Chain(6), Rejection()),
    }


def generate(target: PixelCNN, method: AnyMethod, count: int) -> tuple[np.ndarray, int, float]:
    """Pictures of 0, 1, 2, …, the mean number of target passes per picture, and seconds."""
    engine = Engine(PixelRunner(target), method, rows=count)
    requests = [
        Request([LEVELS + i % CLASSES], SamplingParams(temperature=1.0, seed=i), max_new_tokens=PIXELS)
        for i in range(count)
    ]
    start = time.perf_counter()
    completions = engine.complete(requests)
    seconds = time.perf_counter() - start
    passes = round(float(np.mean([c.statistics.target_passes for c in completions])))
    return np.array([c.tokens for c in completions]).reshape(count, SIDE, SIDE), passes, seconds


def save(pictures: np.ndarray, path: Path, zoom: int = 8) -> None:
    """Save the pictures as one image, in rows of ten."""
    from PIL import Image

    rows = [np.hstack([np.pad(p, 1) for p in pictures[i : i + 10]]) for i in range(0, len(pictures), 10)]
    sheet = (255 - np.vstack(rows).astype(np.uint16) * 255 // (LEVELS - 1)).astype(np.uint8)
    Image.fromarray(sheet).resize((sheet.shape[1] * zoom, sheet.shape[0] * zoom), Image.Resampling.NEAREST).save(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train both networks, generate the pictures with every method, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1500, help="training steps of each network")
    parser.add_argument("--count", type=int, default=20, help="pictures")
    parser.add_argument("--out", type=Path, default=Path("pictures"))
    options = parser.parse_args(arguments)
    print("training the target")
    target = train(64, 6, options.steps)
    print("training the draft model")
    small = train(16, 1, options.steps)
    options.out.mkdir(parents=True, exist_ok=True)
    plain = None
    for name, method in methods(small).items():
        pictures, passes, seconds = generate(target, method, options.count)
        save(pictures, options.out / f"{name.replace(', ', '-')}.png")
        plain = pictures if plain is None else plain
        same = "the same pictures" if (pictures == plain).all() else "other pictures of the same distribution"
        print(f"{name:18} {passes:3} passes for {PIXELS} pixels, {seconds:5.1f} s, {same}")


if __name__ == "__main__":
    main()
