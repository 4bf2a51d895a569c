"""Batches whose answers are written anew, by the draft itself (on policy) or by the target."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import nn

from foretell.accept import Match
from foretell.core.sampling import SamplingParams
from foretell.draft import NoDrafter
from foretell.engine.engine import Engine, Request
from foretell.engine.method import Method
from foretell.model.decoder import Decoder
from foretell.model.network import Network
from foretell.model.runner import DecoderRunner
from foretell.shape import RootOnly
from foretell.train.data.batch import Batch
from foretell.train.data.features import padded, read, width


class Writer:
    """A model that continues prompts: the target, or a copy of a draft that is being trained.

    `make` gives its network, once; of a `draft` again after every `refresh` batches, with the weights that the draft
    has then.
    """

    def __init__(self, make: Callable[[], Network], draft: nn.Module | None = None, refresh: int = 1) -> None:
        self._make, self._draft, self._refresh = make, draft, refresh
        self._network: Network | None = None
        self._batches = 0
        self._weights: dict[str, Float[torch.Tensor, "*shape"]] = {}

    def next_batch(self) -> None:
        """A batch begins, whether it is rewritten or not; in every process the draft is copied before the same
        batches.
        """
        if self._draft is not None and self._batches % self._refresh == 0:
            self._weights = {n: p.detach().clone() for n, p in self._draft.named_parameters()}
            self._network = self._make()
        self._batches += 1

    def continued(
        self, prompts: Sequence[Sequence[int]], most: int, temperature: float, eos: tuple[int, ...], seed: int
    ) -> list[list[int]]:
        """The prompts, each with up to `most` sampled tokens more; `seed` decides them."""
        if self._network is None:
            self._network = self._make()
        engine = Engine(DecoderRunner(self._network), Method(NoDrafter(), RootOnly(), Match()), rows=len(prompts))
        seeds = [(seed + i) % (1 << 31) for i in range(len(prompts))]
        found = engine.complete(
            [
                Request(prompt, SamplingParams(temperature=temperature, seed=s), most, eos=eos)
                for prompt, s in zip(prompts, seeds, strict=True)
            ]
        )
        return [[*prompt, *c.tokens] for prompt, c in zip(prompts, found, strict=True)]

    def state(self) -> dict[str, Shaped[torch.Tensor, "*shape"]]:
        """Batches so far, and the weights that the copy of the draft was made with."""
        return {"batches": torch.tensor(self._batches)} | {"weight/" + n: w for n, w in self._weights.items()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Shaped[torch.Tensor, "*shape"]]) -> None:
        """Go on from what `state` gave; the draft keeps its weights."""
        self._batches = int(state["batches"])
        if self._draft is None or not self._batches:
            return
        held = dict(self._draft.named_parameters())
        now = {n: p.clone() for n, p in held.items()}
        self._weights = {n: state["weight/" + n].to(p.device) for n, p in held.items()}
        _copy(self._weights, held)
        self._network = self._make()
        _copy(now, held)


def _copy(values: Mapping[str, torch.Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(values[name])


@dataclass(frozen=True)
class Rewriter:
    """Gives a share of all batches other answers: each text is cut at random within its answer and continued.

    What is written is learned with the target's states over it. Which batches, and where they are cut, is drawn from
    torch's own generator, which is seeded anew at every step.
    """

    writer: Writer
    target: Decoder
    hidden_layers: tuple[int, ...]
    share: float
    most: int
    temperature: float
    eos: tuple[int, ...]

    @torch.no_grad()
    def batch(self, batch: Batch) -> Batch:
        """The batch, or another one made from its prompts."""
        self.writer.next_batch()
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
        features = read(self.target, token.to(self.target.device), self.hidden_layers)
        return Batch(
            token=token,
            answer=(place >= starts) & (place < ends),
            real=place < ends,
            features=tuple(f.to(token.device) for f in features),
        )

    def _cut(self, answer: torch.Tensor) -> int:
        """How much of a text stays, between the beginning of what is to be learned and its end; 0: it has no answer
        after a first token.
        """
        places = answer.nonzero()[:, 0]
        places = places[(places > 0) & (places < self.target.config.context - 1)]
        return int(places[int(torch.randint(0, len(places), ()))]) if len(places) else 0
