"""Pinned counts of a replay, which a later replay is compared with."""

from collections.abc import Sequence
from pathlib import Path

from foretell.bench.competitor import PLAIN
from foretell.bench.schema import FileModel, QuestionResult
from foretell.utils.validation import validate_json


class Baseline(FileModel):
    """Tokens and passes by method and question."""

    format: str = "foretell baseline 1"
    counts: dict[str, dict[str, tuple[int, int]]]

    @property
    def methods(self) -> list[str]:
        """Names as on the command line."""
        return [name.split("/")[0] for name in self.counts]

    @staticmethod
    def read(path: Path) -> "Baseline":
        """Read a pinned file.

        Raises:
            ValueError: it is not one.
        """
        source = f"{path}: not a baseline that `foretell bench replay --pin` wrote"
        return validate_json(Baseline, path.read_bytes(), source)

    @staticmethod
    def from_results(results: Sequence[QuestionResult]) -> "Baseline":
        """Counts of a replay or a run, without plain decoding, which decides one token per pass."""
        counts: dict[str, dict[str, tuple[int, int]]] = {}
        for r in results:
            if r.repeat == 0 and not r.competitor.startswith(f"{PLAIN}/"):
                sums = sum(len(a.tokens) for a in r.answers), sum(a.passes for a in r.answers)
                counts.setdefault(r.competitor, {})[r.question] = sums
        return Baseline(counts=counts)

    def differences(self, now: "Baseline") -> list[str]:
        """One sentence per question whose counts differ from the pinned ones."""
        out = []
        for method, questions in self.counts.items():
            for question, (tokens, passes) in questions.items():
                measured = now.counts.get(method, {}).get(question)
                if measured is None:
                    out.append(f"{method}, question {question}: pinned, but not measured now")
                elif measured != (tokens, passes):
                    more = "fewer" if measured[1] * tokens < passes * measured[0] else "more"
                    out.append(
                        f"{method}, question {question}: {measured[0]} tokens in {measured[1]} passes, pinned "
                        f"{tokens} in {passes} ({more} per token)"
                    )
        return out
