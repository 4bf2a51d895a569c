"""A table with renderings as Markdown and as HTML; `rich`, which has neither, shows it in a terminal
(`bench.console`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Cell = str | float | int | None


@dataclass(frozen=True)
class TextTable:
    """Rows under a header; floats are rounded to `digits`, None is a dash."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    digits: int = 2

    def markdown(self) -> str:
        """Render as Markdown."""
        lines = ["| " + " | ".join(self.header) + " |", "|---|" + "---:|" * (len(self.header) - 1)]
        lines += ["| " + " | ".join(row) + " |" for row in self.texts()]
        return "\n".join(lines) + "\n"

    def html(self) -> str:
        """Render as HTML."""
        head = "".join(f"<th>{escape(h)}</th>" for h in self.header)
        body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in self.texts())
        return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'

    def texts(self) -> list[list[str]]:
        """The rows as texts."""
        return [[self._text(c) for c in row] for row in self.rows]

    def _text(self, value: Cell) -> str:
        if value is None:
            return "–"
        return f"{value:.{self.digits}f}" if isinstance(value, float) else str(value)
