"""What drafting has given and taken from one request."""

from foretell.engine.tuning import (
    FADING,
    HORIZON,
    MOST_FACTOR,
    MOST_LOSS,
    OFFER_WEIGHT,
    OWN_COST,
    OWN_PRIOR,
    OWN_WEIGHT,
    REQUEST_WEIGHT,
)


class DraftAccount:
    """What drafting has given and taken from one request; it goes with the request through pauses."""

    def __init__(self) -> None:
        self.lead, self.tokens = 0.0, 0
        """Times of plain steps that it is ahead of plain decoding, and its tokens so far."""
        self._debt = 0.0
        """Times of plain steps that its drafters have read for tokens to come."""
        self._factors, self._offers = dict[str, tuple[float, float]](), dict[str, tuple[float, float]]()
        self._right, self._tried = OWN_PRIOR * OWN_WEIGHT, OWN_WEIGHT

    def factor(self, drafter: str) -> float:
        """Chances of this request's drafts over those of all requests."""
        predicted, right = self._factors.get(drafter, (0.0, 0.0))
        return min(MOST_FACTOR, (REQUEST_WEIGHT + right) / (REQUEST_WEIGHT + predicted))

    def count(self, drafter: str, predicted: float, right: int) -> None:
        """Count a step: the summed chances of drafts before the factor, and how many of them were right."""
        before, hits = self._factors.get(drafter, (0.0, 0.0))
        self._factors[drafter] = FADING * before + predicted, FADING * hits + right

    def share(self, drafter: str, promised: float) -> float:
        """What a drafter offers for this request over what it offers for all, `promised` accepted tokens a step."""
        steps, offered = self._offers.get(drafter, (0.0, 0.0))
        return (OFFER_WEIGHT * promised + offered) / max(promised * (OFFER_WEIGHT + steps), 1e-9)

    def count_offer(self, drafter: str, chances: float) -> None:
        """Count a step in which a drafter offered drafts with these summed chances, before the factor."""
        steps, offered = self._offers.get(drafter, (0.0, 0.0))
        self._offers[drafter] = FADING * steps + 1, FADING * offered + chances

    def deficit(self, room: int) -> float:
        """What it has lost over what it may lose in its life, of which `room` tokens are to come."""
        return max(0.0, -self.lead) / (MOST_LOSS * (self.tokens + min(room, HORIZON)))

    def count_step(self, gained: float, tokens: int, read: float, left: int) -> None:
        """Count a step of so many tokens, with the plain steps that it has gained: what drafters `read` in it, in plain
        steps, is paid for by the `left` tokens to come, as the choice to read it assumed.
        """
        self._debt += read
        paid = self._debt * min(1.0, tokens / max(1, min(left, HORIZON)))
        self._debt -= paid
        self.lead += gained - paid

    def count_chain(self, drafted: int, accepted: int) -> None:
        """Count a chain of the request."""
        self._right = FADING * self._right + accepted
        self._tried = FADING * self._tried + accepted + (accepted < drafted)

    def own_depth(self, longest: int) -> int:
        """The length of its next chain, from its earlier ones alone: the most tokens per time, where drafting a token
        takes `OWN_COST` of a pass.
        """
        chance, tokens, best = min(1.0, self._right / self._tried), 1.0, (1, 0.0)
        for depth in range(1, longest + 1):
            tokens += chance**depth
            best = max(best, (depth, tokens / (1 + OWN_COST * depth)), key=lambda pair: pair[1])
        return min(best[0], longest)
