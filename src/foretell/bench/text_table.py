"""A table with renderings as Markdown and as HTML."""

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
        lines += ["| " + " | ".join(self._text(c) for c in row) + " |" for row in self.rows]
        return "\n".join(lines) + "\n"

    def html(self) -> str:
        """Render as HTML."""
        head = "".join(f"<th>{escape(h)}</th>" for h in self.header)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(self._text(c))}</td>" for c in row) + "</tr>" for row in self.rows
        )
        return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'

    def _text(self, value: Cell) -> str:
        if value is None:
            return "–"
        return f"{value:.{self.digits}f}" if isinstance(value, float) else str(value)
