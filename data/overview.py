"""Formats the table at the start of a run's output, which shows how each column of the user's data was read."""

from collections.abc import Sequence

from trainer.common.errors import printable

MOST_ROWS = 20
_WIDEST_CELL, _WIDEST_LAST_CELL = 70, 200


def overview(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Formats a heading and rows as lines with aligned columns.

    heading: column titles, such as ("column", "kind", "values"). rows: each has a cell per title; if there are more
    than `MOST_ROWS` + 1, the last line counts the omitted rows. Long cells are cut, and control characters are escaped.
    """
    num_shown = MOST_ROWS if len(rows) > MOST_ROWS + 1 else len(rows)
    table = [
        [*(_cell(text, _WIDEST_CELL) for text in row[:-1]), _cell(row[-1], _WIDEST_LAST_CELL)]
        for row in (heading, *rows[:num_shown])
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    return lines + ([f"  ... and {len(rows) - num_shown} more"] if len(rows) > num_shown else [])


def _cell(text: str, widest: int) -> str:
    text = " ".join(printable(text).split())
    return text if len(text) <= widest else f"{text[: widest - 3]}..."
