"""Batches whose answers are written anew, by the draft itself (on policy) or by the target."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from foretell.accept import Match
from foretell.draft import Nothing
from foretell.engine import Engine, Request
from foretell.method import Method
from foretell.model.decoder import Decoder
from foretell.model.runner import DecoderRunner, Network
from foretell.sampling import Sampling
from foretell.shape import Root
from foretell.train.batch import Batch
from foretell.train.features import padded, read, width


@dataclass
class Writer:
    """A model that continues texts; `make` copies its weights as they are now, again after every `refresh` batches (0: never)."""

    make: Callable[[], Network]
    refresh: int
    _network: Network | None = field(default=None, init=False)
    _batches: int = field(default=0, init=False)

    def continued(
        self, prompts: Sequence[Sequence[int]], most: int, temperature: float, eos: tuple[int, ...], seed: int
    ) -> list[list[int]]:
        """The prompts, each with up to `most` sampled tokens more; `seed` decides them."""
        if self._network is None or (self.refresh and self._batches % self.refresh == 0):
            self._network = self.make()
        self._batches += 1
        engine = Engine(DecoderRunner(self._network), Method(Nothing(), Root(), Match()), rows=len(prompts))
        seeds = [(seed + i) % (1 << 31) for i in range(len(prompts))]
        found = engine.complete(
            [
                Request(prompt, Sampling(temperature=temperature, seed=s), most, eos=eos)
                for prompt, s in zip(prompts, seeds, strict=True)
            ]
        )
        return [[*prompt, *c.tokens] for prompt, c in zip(prompts, found, strict=True)]


@dataclass(frozen=True)
class Rewriter:
    """Gives a share of all batches other answers: each text is cut at random within its answer and continued.

    What is written is learned with the target's states over it. Which batches, and where they are cut, is drawn from torch's own generator, whose
    state checkpoints keep.
    """

    writer: Writer
    target: Decoder
    taps: tuple[int, ...]
    share: float
    most: int
    temperature: float
    eos: tuple[int, ...]

    @torch.no_grad()
    def batch(self, batch: Batch) -> Batch:
        """The batch, or another one made from its prompts."""
        if float(torch.rand(())) >= self.share:
            return batch
        cuts = [self._cut(answer) for answer in batch.answer.cpu()]
        rows = [i for i, cut in enumerate(cuts) if cut]
        if not rows:
            return batch
        prompts = [batch.token[i, : cuts[i]].tolist() for i in rows]
        seed = int(torch.randint(0, 1 << 31, ()))
        texts = self.writer.continued(prompts, self.most, self.temperature, self.eos, seed)
        arrays = [torch.tensor(t).numpy() for t in texts]
        wide = width(max(map(len, texts)))
        token = padded(arrays, wide).to(batch.token.device)
        place = torch.arange(wide, device=token.device)
        ends = torch.tensor([len(t) for t in texts], device=token.device)[:, None]
        starts = torch.tensor([len(p) for p in prompts], device=token.device)[:, None]
        features = read(self.target, token.to(self.target.device), self.taps)
        return Batch(
            token=token,
            answer=(place >= starts) & (place < ends),
            real=place < ends,
            features=tuple(f.to(token.device) for f in features),
        )

    def _cut(self, answer: torch.Tensor) -> int:
        """How much of a text stays, between the beginning of what is to be learned and its end; 0: it has no answer after a first token."""
        places = answer.nonzero()[:, 0]
        places = places[(places > 0) & (places < self.target.config.context - 1)]
        return int(places[int(torch.randint(0, len(places), ()))]) if len(places) else 0
