"""The card of a compressed model: what was done to it, on which text, and what it cost."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from foretell.lab.compress import LASER, LLM_PRUNER, LOW_RANK, SHORTGPT, SLICEGPT
from foretell.lab.quantize.base import ROLES
from foretell.model.config.compressed import Ranks
from foretell.model.config.readers.compressed import CARD, COMPRESSED_BY
from foretell.utils.validation import read_json
from foretell.verify.comparison import Comparison


@dataclass(frozen=True)
class Card:
    """What `compression.json` and README.md say."""

    method: str
    amount: str
    source: str
    blocks: tuple[int, ...]
    """Blocks of the source that are left."""
    two_of_four: bool
    """Whether the CPU kernels have a product of their own for its matrices."""
    ranks: Mapping[str, Ranks]
    """Of the matrices of the blocks that are stored and run as two factors; the others are dense."""
    zeros: float
    """Share of zeros in the matrices of the blocks."""
    calibration: str
    """Where the calibration text comes from."""
    calibration_tokens: int
    calibration_sha256: str
    """Of the calibration tokens."""
    comparison_text: str
    """Where the text of the comparison comes from, which was held back from calibration."""
    comparison: Comparison

    @property
    def speed(self) -> str:
        """How Foretell runs the model, in a sentence."""
        if self.method == SHORTGPT:
            return "It has fewer blocks, so a pass reads less."
        if self.method == LLM_PRUNER:
            return "Its blocks have fewer heads or channels, so a pass reads less."
        if self.method == SLICEGPT:
            return (
                "Its residual stream has fewer numbers, so every matrix is smaller; two more per block multiply "
                "the stream. Foretell runs it, other programs do not."
            )
        if self.method == LASER:
            return "One matrix has a lower rank and is stored dense, so it is as fast as the source."
        if self.method in LOW_RANK:
            return self._low_rank_speed
        if self.two_of_four:
            return "The CPU kernels multiply its 2:4 matrices from 9 bits per weight; elsewhere it runs dense."
        return "It runs as a dense model, as fast as the source: zeros are multiplied like other numbers."

    @property
    def _low_rank_speed(self) -> str:
        dense = ", ".join(role for role in ROLES if role not in self.ranks)
        if not self.ranks:
            return "It runs dense, as fast as the source: two factors of this rank would be no smaller than any matrix."
        spans = {role: (r if isinstance(r, tuple) else (r,)) for role, r in self.ranks.items()}
        ranks = {role: " to ".join(map(str, sorted({min(r), max(r)}))) for role, r in spans.items()}
        factored = ", ".join(f"{role} (rank {span})" for role, span in ranks.items())
        rest = f" Two factors would be no smaller than {dense}, which run dense." if dense else ""
        return f"It is stored and run as two factors in {factored}, so a pass reads less.{rest}"


def write_card(folder: Path, card: Card) -> None:
    """Write the card for programs and for people, and the method into the configuration."""
    config = folder / "config.json"
    config.write_text(json.dumps(read_json(config) | {COMPRESSED_BY: card.method}, indent=2) + "\n", "utf-8")
    (folder / CARD).write_text(json.dumps(asdict(card), indent=2) + "\n", "utf-8")
    (folder / "README.md").write_text(_text(card), "utf-8")


def _text(card: Card) -> str:
    comparison = card.comparison
    calibration = f"{card.calibration_tokens:,} tokens of {card.calibration} (SHA-256 {card.calibration_sha256})"
    rows = {
        "Source": card.source,
        "Method": f"{card.method}, {card.amount}",
        "Zeros in the matrices of the blocks": f"{card.zeros:.1%}",
        "Calibration": calibration if card.calibration_tokens else "none",
        "Compared on": f"{comparison.tokens:,} positions of {card.comparison_text}, held back from calibration",
        "Perplexity before": f"{comparison.perplexity:.3f}",
        "Perplexity after": f"{comparison.quantized_perplexity:.3f}",
        "KL divergence from the source": f"{comparison.kl:.4f} nats",
        "Same most probable token": f"{comparison.same_top:.1%}",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        f"# A compressed model\n\nMade with `foretell compress`. It is another model than its source: its answers "
        f"differ. {card.speed}\n\n| | |\n|---|---|\n{table}\n"
    )
