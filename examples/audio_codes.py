"""Speculative decoding of audio codes: melodies, generated code by code with the engine that decodes language models.

A small codec writes sound as discrete codes, as neural codecs do (SoundStream, arXiv 2107.03312; EnCodec, arXiv
2210.13438): a frame's spectrum (modified discrete cosine transform) is quantised twice, the second time what the first
code left over. A recurrent network learns the codes of plucked melodies, and a smaller one drafts for it; copying from
the melody so far needs no draft model. `CodeRunner` runs any function from codes to logits, so a model of your own
takes its place. The sound is the same, in fewer passes.

    pip install 'foretell[examples]'
    python examples/audio_codes.py --out sounds
"""

import argparse
import wave
from collections.abc import Callable, Sequence
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
from foretell.draft import DraftModel, NoDrafter, PromptLookup
from foretell.engine.method import AnyMethod
from foretell.model.run.runner import Runner
from foretell.shape import Chain, RootOnly, Trie

RATE, HOP, FRAMES, CODES = 4000, 64, 64, 32
"""Samples per second and per frame; frames of a melody; codes of each of the two codebooks."""
LENGTH, START = 2 * FRAMES, 2 * CODES
VOCAB = START + 1
"""Coarse codes, fine codes, and the token that a melody begins with."""
_SCALE = (0, 2, 4, 7, 9, 12)

Logits = Callable[[Int[torch.Tensor, "b t"]], Float[torch.Tensor, "b t v"]]
"""From codes to the logits of what follows each, from it and those before it."""


def melody(seed: int) -> Float[np.ndarray, " n"]:
    """A melody of plucked notes: a phrase of four notes, then again."""
    rng, note = np.random.default_rng(seed), FRAMES * HOP // 8
    t, phrase = np.arange(note) / RATE, rng.integers(len(_SCALE), size=4)
    tones = [220 * 2 ** (_SCALE[k] / 12) for k in [*phrase, *phrase]]
    parts = [sum(np.sin(2 * np.pi * h * f * t) * np.exp(-6 * h * t) / h for h in (1, 2, 3)) for f in tones]
    return np.concatenate(parts) / 2


class Codec:
    """Sound as two codes per frame, learned from the frames of some melodies."""

    def __init__(self, sounds: Sequence[Float[np.ndarray, " n"]]) -> None:
        from sklearn.cluster import KMeans

        n, k = np.arange(2 * HOP)[:, None], np.arange(HOP)[None]
        self._window = np.sin(np.pi * (n + 0.5) / (2 * HOP))
        self._basis = self._window * np.cos(np.pi / HOP * (n + 0.5 + HOP / 2) * (k + 0.5)) * np.sqrt(2 / HOP)
        spectra, self.books = np.concatenate([self._spectra(s) for s in sounds]), list[np.ndarray]()
        for _ in range(2):
            book = KMeans(CODES, n_init=1, random_state=0).fit(spectra).cluster_centers_
            self.books.append(book)
            spectra = spectra - book[self._nearest(spectra, book)]

    def _spectra(self, sound: Float[np.ndarray, " n"]) -> Float[np.ndarray, "f h"]:
        padded = np.pad(sound, (0, HOP))
        return np.stack([padded[i : i + 2 * HOP] @ self._basis for i in range(0, len(sound), HOP)])

    @staticmethod
    def _nearest(spectra: np.ndarray, book: np.ndarray) -> Int[np.ndarray, " f"]:
        return ((spectra[:, None] - book) ** 2).sum(-1).argmin(1)

    def encode(self, sound: Float[np.ndarray, " n"]) -> list[int]:
        """Codes of a sound: coarse, fine, coarse, fine, …"""
        spectra = self._spectra(sound)
        coarse = self._nearest(spectra, self.books[0])
        fine = self._nearest(spectra - self.books[0][coarse], self.books[1])
        return np.stack((coarse, CODES + fine), 1).ravel().tolist()

    def decode(self, codes: Sequence[int]) -> Float[np.ndarray, " n"]:
        """The sound of codes, by overlapping frames."""
        coarse, fine = np.array(codes).reshape(-1, 2).T
        out = np.zeros((len(coarse) + 1) * HOP)
        for i, spectrum in enumerate(self.books[0][coarse] + self.books[1][fine - CODES]):
            out[i * HOP : (i + 2) * HOP] += self._basis @ spectrum
        return out[:-HOP]


class CodeNetwork(nn.Module):
    """A recurrent network over codes; coarse and fine codes take turns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.memory = nn.Embedding(VOCAB, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, codes: Int[torch.Tensor, "b t"]) -> Float[torch.Tensor, "b t v"]:
        """Logits of what follows each code."""
        logits = self.head(self.memory(self.embedding(codes))[0])
        fine_follows = torch.arange(codes.shape[1])[:, None] % 2 == 1
        code = torch.arange(VOCAB)
        wrong = (code == START) | ((code >= CODES) != fine_follows)
        return logits.masked_fill(wrong, -torch.inf)


class CodeRunner(Runner):
    """Runs trees of tokens through a function from sequences to logits: a row of the batch per path.

    The cache of a row is the list of its tokens. A model with a cache of its own keeps it in `commit`.
    """

    def __init__(self, function: Logits, vocab: int, context: int) -> None:
        self.function, self.vocab, self.context = function, vocab, context
        self._tokens: dict[int, list[int]] = {}
        self._tree: dict[int, list[int]] = {}

    def length(self, row: int) -> int:
        """Number of committed tokens."""
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
        """Logits of the scored nodes."""
        wanted = tree.active if scored is None else tree.active & scored
        logit_index, paths = np.full(tree.token.shape, -1), list[list[int]]()
        for i, row in enumerate(rows):
            self._tree[row] = tree.token[i].tolist()
            for node in np.flatnonzero(wanted[i]).tolist():
                logit_index[i, node] = len(paths)
                paths.append([*self._tokens.get(row, ()), *tree.token[i, tree.ancestors(i, node)].tolist()])
        if not paths:
            return ModelOutput(torch.zeros(0, self.vocab), logit_index)
        last = torch.tensor([len(path) - 1 for path in paths])
        padded = torch.zeros(len(paths), int(last.max()) + 1, dtype=torch.long)
        for i, path in enumerate(paths):
            padded[i, : len(path)] = torch.tensor(path)
        return ModelOutput(self.function(padded)[torch.arange(len(paths)), last], logit_index)

    def commit(self, row: int, path: Sequence[int]) -> None:
        """Append the tokens of these nodes."""
        self._tokens.setdefault(row, []).extend(self._tree[row][node] for node in path)

    def truncate(self, row: int, length: int) -> None:
        """Remove the tokens after the first `length`."""
        self._tokens[row] = self._tokens.get(row, [])[:length]


def train(codes: Int[torch.Tensor, "m t"], width: int, steps: int, seed: int = 0) -> CodeNetwork:
    """Train a network on the codes of melodies."""
    torch.manual_seed(seed)
    network, tokens = CodeNetwork(width), F.pad(codes, (1, 0), value=START)
    optimizer = torch.optim.AdamW(network.parameters(), 5e-3)
    for step in range(steps):
        batch = tokens[torch.randint(len(tokens), (16,))]
        loss = F.cross_entropy(network(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"  step {step:4}: {loss.item() / np.log(2):.3f} bits per code", flush=True)
    # float64, so that rounding does not depend on the batch size.
    return network.eval().double()


def methods(small: CodeNetwork) -> dict[str, AnyMethod]:
    """The methods that are compared."""

    def draft() -> DraftModel:
        return DraftModel(CodeRunner(small, VOCAB, 1 + LENGTH))

    return {
        "plain": Method(NoDrafter(), RootOnly(), Match()),
        "copied": Method(PromptLookup(4), Trie(8), Match()),
        "draft, match": Method(draft(), Chain(6), Match()),
        "draft, rejection": Method(draft(), Chain(6), Rejection()),
    }


def generate(target: CodeNetwork, method: AnyMethod, count: int, temperature: float) -> tuple[list[list[int]], float]:
    """Codes of melodies, and the mean number of target passes per melody."""
    engine = Engine(CodeRunner(target, VOCAB, 1 + LENGTH), method, rows=count)
    requests = [
        Request([START], SamplingParams(temperature=temperature, seed=i), max_new_tokens=LENGTH) for i in range(count)
    ]
    completions = engine.complete(requests)
    passes = float(np.mean([c.statistics.target_passes for c in completions]))
    return [list(c.tokens) for c in completions], passes


def save(sound: Float[np.ndarray, " n"], path: Path) -> None:
    """Save a sound as WAV."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((sound.clip(-1, 1) * 32767).astype("<i2").tobytes())


def main(arguments: Sequence[str] | None = None) -> None:
    """Learn the codec, train both networks, generate melodies with every method, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=600, help="training steps of each network")
    parser.add_argument("--melodies", type=int, default=64, help="melodies to learn from")
    parser.add_argument("--count", type=int, default=8, help="melodies to generate")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--out", type=Path, default=Path("sounds"))
    options = parser.parse_args(arguments)
    sounds = [melody(seed) for seed in range(options.melodies)]
    codec = Codec(sounds)
    codes = torch.tensor([codec.encode(sound) for sound in sounds])
    print("training the target")
    target = train(codes, 96, options.steps)
    print("training the draft model")
    small = train(codes, 24, options.steps)
    options.out.mkdir(parents=True, exist_ok=True)
    plain = None
    for name, method in methods(small).items():
        written, passes = generate(target, method, options.count, options.temperature)
        for i, melody_codes in enumerate(written):
            save(codec.decode(melody_codes), options.out / f"{name.replace(', ', '-')}-{i}.wav")
        plain = written if plain is None else plain
        same = "the same melodies" if written == plain else "other melodies of the same distribution"
        print(f"{name:18} {passes:5.1f} passes for {LENGTH} codes, {same}")


if __name__ == "__main__":
    main()
