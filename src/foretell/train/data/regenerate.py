"""Training on freshly generated answers: from the draft model itself (on-policy distillation) or from the target."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Shaped
from torch import nn

from foretell.accept import Match
from foretell.core.sampling import SamplingParams
from foretell.draft import NoDrafter
from foretell.engine.engine import Engine
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.model.block.decoder import Decoder
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.shape import RootOnly
from foretell.train.data.batch import Batch
from foretell.train.data.features import compute_hidden_states, pad_sequences, padded_width


class AnswerGenerator:
    """Continues prompts with the target, or with a copy of a draft model that is being trained.

    `make_network` gives the network. With a `draft` it is called again every `refresh` batches, so that it copies the
    draft's current weights.
    """

    def __init__(self, make_network: Callable[[], Network], draft: nn.Module | None = None, refresh: int = 1) -> None:
        self._make_network, self._draft, self._refresh = make_network, draft, refresh
        self._network: Network | None = None
        self._batches = 0
        self._weights: dict[str, Float[torch.Tensor, "*shape"]] = {}

    def on_batch(self) -> None:
        """Count a batch, regenerated or not, so that all processes copy the draft before the same batches."""
        if self._draft is not None and self._batches % self._refresh == 0:
            self._weights = {n: p.detach().clone() for n, p in self._draft.named_parameters()}
            self._network = self._make_network()
        self._batches += 1

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float, eos: tuple[int, ...], seed: int
    ) -> list[list[int]]:
        """The prompts, each followed by up to `max_new_tokens` sampled tokens, which depend on `seed`."""
        if self._network is None:
            self._network = self._make_network()
        engine = Engine(DecoderRunner(self._network), Method(NoDrafter(), RootOnly(), Match()), rows=len(prompts))
        seeds = [(seed + i) % (1 << 31) for i in range(len(prompts))]
        completions = engine.complete(
            [
                Request(prompt, SamplingParams(temperature=temperature, seed=s), max_new_tokens, eos=eos)
                for prompt, s in zip(prompts, seeds, strict=True)
            ]
        )
        return [[*prompt, *c.tokens] for prompt, c in zip(prompts, completions, strict=True)]

    def state(self) -> dict[str, Shaped[torch.Tensor, "*shape"]]:
        """The number of batches, and the weights of the draft's copy."""
        return {"batches": torch.tensor(self._batches)} | {"weight/" + n: w for n, w in self._weights.items()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Shaped[torch.Tensor, "*shape"]]) -> None:
        """Restore what `state` returned; the draft keeps its own weights."""
        self._batches = int(state["batches"])
        if self._draft is None or not self._batches:
            return
        parameters = dict(self._draft.named_parameters())
        current = {n: p.clone() for n, p in parameters.items()}
        self._weights = {n: state["weight/" + n].to(p.device) for n, p in parameters.items()}
        _copy(self._weights, parameters)
        self._network = self._make_network()
        _copy(current, parameters)


def _copy(values: Mapping[str, torch.Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(values[name])


@dataclass(frozen=True)
class BatchRegenerator:
    """Replaces the answers of a fraction of the batches: each sequence is cut within its answer and continued.

    The new tokens are learned from the target's hidden states over them. The choice of batches and cut points uses
    torch's global generator, which the trainer seeds at every step.
    """

    generator: AnswerGenerator
    target: Decoder
    hidden_layers: tuple[int, ...]
    fraction: float
    max_new_tokens: int
    temperature: float
    eos: tuple[int, ...]

    @torch.no_grad()
    def regenerate(self, batch: Batch) -> Batch:
        """The batch, or a new one made from its prompts."""
        self.generator.on_batch()
        if float(torch.rand(())) >= self.fraction:
            return batch
        cuts = [self._cut_point(mask) for mask in batch.loss_mask.cpu()]
        rows = [i for i, cut in enumerate(cuts) if cut]
        if not rows:
            return batch
        prompts = [batch.token[i, : cuts[i]].tolist() for i in rows]
        seed = int(torch.randint(0, 1 << 31, ()))
        sequences = self.generator.generate(prompts, self.max_new_tokens, self.temperature, self.eos, seed)
        width = padded_width(max(map(len, sequences)))
        token = pad_sequences([torch.tensor(t).numpy() for t in sequences], width).to(batch.token.device)
        position = torch.arange(width, device=token.device)
        end = torch.tensor([len(t) for t in sequences], device=token.device)[:, None]
        start = torch.tensor([len(p) for p in prompts], device=token.device)[:, None]
        features = compute_hidden_states(self.target, token.to(self.target.device), self.hidden_layers)
        loss_mask = (position >= start) & (position < end)
        return Batch(token, loss_mask, tuple(f.to(token.device) for f in features))

    def _cut_point(self, loss_mask: Bool[torch.Tensor, " s"]) -> int:
        """A random position of the answer, which becomes the prompt's length; 0: no position can be chosen."""
        positions = loss_mask.nonzero()[:, 0]
        positions = positions[(positions > 0) & (positions < self.target.config.context - 1)]
        return int(positions[int(torch.randint(0, len(positions), ()))]) if len(positions) else 0
