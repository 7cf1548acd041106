"""The short table that a run on a user's own data begins with: what was understood of each column."""

from collections.abc import Sequence

from trainer.common.errors import printable

MOST_ROWS = 20
_WIDEST_CELL = 70


def overview(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of text, a heading and a row a line, with aligned columns and no blanks at the end of a line.

    heading: such as ("column", "kind", "values"). rows: as many cells each. Where there are several more than
    `MOST_ROWS`, a last line says how many; a long cell is cut, and control characters are spelled out.
    """
    num_shown = MOST_ROWS if len(rows) > MOST_ROWS + 1 else len(rows)
    table = [[_cell(text) for text in row] for row in (heading, *rows[:num_shown])]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    return lines + ([f"  ... and {len(rows) - num_shown} more"] if len(rows) > num_shown else [])


def _cell(text: str) -> str:
    text = " ".join(printable(text).split())
    return text if len(text) <= _WIDEST_CELL else f"{text[: _WIDEST_CELL - 3]}..."
