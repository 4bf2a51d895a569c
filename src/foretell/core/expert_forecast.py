"""Predicts the experts of tokens from those that the same tokens had before."""

import numpy as np
from jaxtyping import Float, Int

_DECAY = 0.98
"""Share of the counted routes that is kept per step."""
_FIRST_HITS = 0.5
"""Share of a token's experts that its last ones are taken to predict, before it is known."""


class ExpertForecast:
    """Predicts the experts of tokens: those that the token had when it was last read, as far as these have predicted
    its next ones, and else the experts that are used most.

    Routers read the residual stream, to which the token's own embedding contributes most, so the same token has mostly
    the same experts (observed for Mixtral, arXiv 2401.04088, and for OpenMoE, arXiv 2402.01739). `layers`: those with
    experts, `count`: of a layer, `active`: of a token.
    """

    def __init__(self, layers: int, count: int, active: int) -> None:
        self._last: dict[int, Int[np.ndarray, "l k"]] = {}
        self._used = np.full((layers, count), active / count)
        """Probability that a token has an expert."""
        self._hits, self._asked = _FIRST_HITS, 1.0
        self._layer = np.arange(layers)[:, None]

    @property
    def hit_share(self) -> float:
        """Share of the experts of tokens that were read before which their last ones predicted."""
        return self._hits / self._asked

    def probabilities(self, token: int) -> Float[np.ndarray, "l e"]:
        """Probability that a token has each expert of each layer."""
        last = self._last.get(token)
        if last is None:
            return self._used
        probability = (1 - self.hit_share) * self._used
        probability[self._layer, last] += self.hit_share
        return np.minimum(probability, 1.0)

    def last(self, token: int) -> Int[np.ndarray, "l k"] | None:
        """The experts that a token had when it was last read; None: it was not."""
        return self._last.get(token)

    def observe(self, tokens: Int[np.ndarray, " t"], routes: Int[np.ndarray, "l t k"]) -> None:
        """Learn the experts of the tokens of a pass."""
        share = np.zeros_like(self._used)
        for layer in range(len(routes)):
            np.add.at(share[layer], routes[layer].ravel(), 1 / len(tokens))
        self._used += (1 - _DECAY) * (share - self._used)
        for place, token in enumerate(tokens.tolist()):
            own, last = routes[:, place], self._last.get(token)
            if last is not None:
                hits = (own[:, :, None] == last[:, None, :]).any(2).mean()
                self._hits, self._asked = _DECAY * self._hits + float(hits), _DECAY * self._asked + 1
            self._last[token] = own.astype(np.int16)
