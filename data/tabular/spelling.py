"""Detects how a column's cells are written: the format of numbers, and equivalent spellings of a category."""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from data.csv_lines import without_point

MISSING = frozenset(
    {"", "?", "NA", "N/A", "na", "n/a", "NaN", "nan", "-NaN", "-nan", "NULL", "null", "NaT", "<NA>", "#N/A", "#N/A N/A"}
    | {"#NA", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN"}
)
"""Strings that mark a missing value in any column."""
NEARLY_ALL = 0.95
"""Minimum share of numbers in a numeric column, and of dates in a date column; other cells count as missing."""

_MARKS = frozenset(text.lower() for text in MISSING) | frozenset(
    {"-", "--", "---", "\u2013", "\u2014", ".", "..", "...", "*", "none", "n.a.", "missing"}
    | {"#null!", "#div/0!", "#value!", "#ref!", "#name?", "#num!"}
    | {f"{sign}{infinity}" for sign in ("", "+", "-") for infinity in ("inf", "infinity")}
)
"""Lower-case strings that mark a missing value among numbers; in other columns, most of them are categories."""
_MOST_CATEGORIES = 10
"""In a column with at most this many distinct numbers, a single word is a category, not a missing value."""
_LONGEST_NUMBER = 64
"""Maximum number of characters of a number; limits the time of matching, which may grow quadratically."""
_FEWEST_GROUPED = 5
"""Minimum number of distinct values such as 1,234 in a column with thousands separators; fewer may be decimals."""

_PLAIN = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_CURRENCY = r"[A-Z]{0,3}[$¢£¤¥฿\u20a0-\u20cf]"
_CELL = re.compile(
    rf"(?P<sign>[+-]?) ?(?P<head>{_CURRENCY}|) ?(?P<inner>[+-]?)"
    r"(?P<digits>[.,]?\d(?:[\d., ']*\d)?[.,]?)(?P<exponent>(?:[eE][+-]?\d+)?)"
    rf" ?(?P<tail>{_CURRENCY}|[%‰°][^\W\d_]?|\+|[^\W\d_][^\d\s]{{0,11}}|)"
)
_DIGITS = {
    decimal: re.compile(
        rf"(?:[1-9]\d{{0,2}}([{thousands} '])\d{{3}}(?:\1\d{{3}})*|\d+)(?:[{decimal}]\d*)?|[{decimal}]\d+"
    )
    for decimal, thousands in (".,", ",.")
}
"""Pattern of a number without sign, exponent and unit, for each decimal separator."""
_GROUPED = {sign: re.compile(rf"[1-9]\d{{0,2}}(?:[{sign}]\d{{3}})+") for sign in ".,"}
_LOOSE = re.compile(r"(?<!\d)\d{4}")
"""Pattern of four consecutive digits, which a number grouped by thousands lacks."""
_OTHER = {".": ",", ",": "."}
_SCALES = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9}
_ALIKE = str.maketrans({"\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2019": "'", "\u2212": "-"})
"""Replacements for typographic blanks, apostrophes and minus signs."""
_TRUTHS = frozenset({"yes", "no", "true", "false"})


class _Cell(NamedTuple):
    """String that looks like a number. unit: text around the digits. numbers: value for each decimal separator."""

    text: str
    unit: tuple[str, str]
    numbers: dict[str, float]


@dataclass(frozen=True)
class Spelling:
    """Format of a column's numbers.

    decimal: the decimal separator, "." or ","; the other one, blanks and apostrophes may separate thousands.
    head: unit before every number. tail: unit after every number; k and K (1e3), M (1e6) and B (1e9) are factors,
        not units.
    """

    decimal: str = "."
    head: str = ""
    tail: str = ""

    def number(self, text: str) -> float:
        """Parses a string; returns NaN if it is not a number in this format, and infinity if float64 overflows."""
        if self == PLAIN and is_plain(text):
            return float(text)
        cell = _cell(text)
        return cell.numbers[self.decimal] if cell and cell.unit == (self.head, self.tail) else np.nan

    def is_shown_by(self, texts: Sequence[str]) -> bool:
        """Returns whether any string has the decimal separator in a place where it cannot separate thousands."""
        cells = filter(None, (_cell(text) for text in texts if self.decimal in text))
        return any(math.isnan(cell.numbers[_OTHER[self.decimal]]) for cell in cells)


PLAIN = Spelling()


class Likely(NamedTuple):
    """Decimal separator to assume for a column whose cells do not show it. is_shown: whether other columns show it."""

    decimal: str = "."
    is_shown: bool = False


UNKNOWN = Likely()


class Reading(NamedTuple):
    """Tells whether a column is numeric. spelling: format of the numbers, or None for categories.

    doubt: why the column is not numeric although most of its cells look like numbers, or "".
    """

    spelling: Spelling | None
    doubt: str = ""


def reading_of(texts: Sequence[str], counts: np.ndarray, likely: Likely = UNKNOWN) -> Reading:
    """Decides whether a column is numeric, and detects its number format.

    The decimal separator is the point or the comma, whichever turns more rows into numbers. A column is numeric if
    nearly all rows are numbers, or if all other rows mark missing values.

    texts: distinct strings of the column, none in `MISSING`. counts: (len(texts),), number of rows with each string.
    likely: the decimal separator to assume if no row shows it.
    """
    values = [i for i, text in enumerate(texts) if not is_mark_among_numbers(text)]
    texts, counts = [texts[i] for i in values], counts[values]
    if likely.decimal == "." and texts and all(map(is_plain, texts)):
        return Reading(PLAIN)
    cells = [_cell(text) for text in texts]
    units = Counter[tuple[str, str]]()
    for cell, count in zip(cells, counts.tolist(), strict=True):
        if cell:
            units[cell.unit] += count
    if not units:
        return Reading(None)
    unit = units.most_common(1)[0][0]
    decimal, other = _most_read(cells, unit, counts, _signs(cells, likely))
    numbers, rival = _numbers(cells, unit, decimal), _numbers(cells, unit, other)
    is_read = ~np.isnan(numbers)
    if is_read.sum() == 1 and not is_plain(texts[int(is_read.argmax())]):
        return Reading(None)
    doubt = _doubt(texts, counts, numbers, rival, likely)
    others = [text for text, is_number in zip(texts, is_read.tolist(), strict=True) if not is_number]
    is_marked = len(others) == 1 and not any(map(str.isdigit, others[0])) and is_read.sum() > _MOST_CATEGORIES
    if not doubt and (is_marked or _are_nearly_all(is_read, counts)):
        return Reading(Spelling(decimal, *unit))
    looks = np.array([cell is not None for cell in cells])
    if _are_nearly_all(looks, counts):
        return Reading(None, doubt or _in_no_one_spelling(texts, is_read, looks & ~is_read))
    are_many = counts[looks].sum() > counts.sum() / 2
    return Reading(None, f"text among the numbers: {', '.join(_examples(texts, ~looks))}" if are_many else "")


def spelling_like(trained: Spelling, texts: Sequence[str], counts: np.ndarray, likely: Likely = UNKNOWN) -> Spelling:
    """Detects the number format of new rows: the format in training, unless the rows show another decimal separator.

    texts, counts, likely: as for `reading_of`.
    """
    if trained == PLAIN and not (likely.is_shown and likely.decimal == ",") and all(map(is_plain, texts)):
        return trained
    first = likely.decimal if likely.is_shown else trained.decimal
    cells = [_cell(text) for text in texts]
    decimal, _ = _most_read(cells, (trained.head, trained.tail), counts, (first, _OTHER[first]))
    return replace(trained, decimal=decimal)


def is_mark_among_numbers(text: str) -> bool:
    """Returns whether a string marks a missing value among numbers."""
    return text.lower() in _MARKS


def is_plain(text: str) -> bool:
    """Returns whether a string is a number in the notation of programs, such as -1.5e3."""
    return len(text) <= _LONGEST_NUMBER and _PLAIN.fullmatch(text) is not None


class Meaning:
    """Equivalence of a category's spellings, such as 1 and 1.0 if all numbers of the column are whole.

    Case matters, except in yes, no, true and false, and in columns with only Y and N, or only T and F.
    texts: distinct strings of the column.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        lower = {text.lower() for text in texts}
        self._truths = _TRUTHS | (lower if lower <= set("yn") or lower <= set("tf") else set())
        self._are_whole = all(float(text).is_integer() for text in texts if is_plain(text))

    def is_truth(self, text: str) -> bool:
        """Returns whether a string is a truth value such as yes, whose case does not matter."""
        return text.lower() in self._truths

    def key(self, text: str) -> str:
        """Returns the same key for equivalent strings."""
        if self.is_truth(text):
            return text.lower()
        return without_point(text) if self._are_whole else text


def canonical(texts: Sequence[str], counts: np.ndarray) -> list[str]:
    """Replaces equivalent strings of a column with one string: 1.0 with 1, and YES with yes if yes is more frequent.

    counts: (len(texts),), number of rows with each string.
    """
    meaning = Meaning(texts)
    keys = [meaning.key(text) for text in texts]
    if len(set(keys)) == len(keys):
        return [text if meaning.is_truth(text) else key for text, key in zip(texts, keys, strict=True)]
    styles: tuple[Callable[[str], str], ...] = (str.lower, str.upper, str.capitalize)
    truths = np.array([meaning.is_truth(text) for text in texts])
    style = max(styles, key=lambda style: counts[truths & [style(text) == text for text in texts]].sum())
    return [style(text) if meaning.is_truth(text) else key for text, key in zip(texts, keys, strict=True)]


def _cell(text: str) -> _Cell | None:
    """Parses a string with each decimal separator; returns None if it is not a number with either one."""
    match = _CELL.fullmatch(text.translate(_ALIKE)) if len(text) <= _LONGEST_NUMBER else None
    if match is None or (match["sign"] and match["inner"]):
        return None
    digits, tail = match["digits"], match["tail"]
    numbers = dict.fromkeys(_DIGITS, np.nan)
    for decimal, pattern in _DIGITS.items():
        if pattern.fullmatch(digits):
            plain = "".join("." if c == decimal else c for c in digits if c.isdigit() or c == decimal)
            numbers[decimal] = float(match["sign"] + match["inner"] + plain + match["exponent"]) * _SCALES.get(
                tail, 1.0
            )
    unit = match["head"], "" if tail in _SCALES else tail
    return None if all(map(math.isnan, numbers.values())) else _Cell(digits, unit, numbers)


def _signs(cells: Sequence[_Cell | None], likely: Likely) -> tuple[str, str]:
    """Returns both decimal separators, the more likely one first."""
    first = likely.decimal
    if likely == Likely(","):
        digits = [cell.text for cell in cells if cell]
        has_comma = any("," in text for text in digits)
        first = "," if _is_of_thousands(".", digits) or (has_comma and not _is_of_thousands(",", digits)) else "."
    return first, _OTHER[first]


def _is_of_thousands(sign: str, digits: Sequence[str]) -> bool:
    """Returns whether the sign separates thousands in at least five numbers, and all others are integers below 1000."""
    small = [text for text in digits if text.isdigit() and len(text) <= 3]
    grouped = [text for text in digits if _GROUPED[sign].fullmatch(text)]
    return len(grouped) >= _FEWEST_GROUPED and bool(small) and len(small) + len(grouped) == len(digits)


def _most_read(
    cells: Sequence[_Cell | None], unit: tuple[str, str], counts: np.ndarray, signs: tuple[str, str]
) -> tuple[str, str]:
    """Returns both decimal separators, first the one that turns more rows into numbers; a tie keeps their order."""
    first, second = (counts[~np.isnan(_numbers(cells, unit, sign))].sum() for sign in signs)
    return signs if first >= second else signs[::-1]


def _numbers(cells: Sequence[_Cell | None], unit: tuple[str, str], decimal: str) -> np.ndarray:
    """Returns each cell's number, NaN if it is not a number with this unit and decimal separator: (len(cells),)."""
    return np.array([cell.numbers[decimal] if cell and cell.unit == unit else np.nan for cell in cells])


def _are_nearly_all(fits: np.ndarray, counts: np.ndarray) -> bool:
    return bool(counts[fits].sum() >= NEARLY_ALL * counts.sum())


def _doubt(texts: Sequence[str], counts: np.ndarray, numbers: np.ndarray, rival: np.ndarray, likely: Likely) -> str:
    """Explains why the chosen decimal separator may be wrong; returns "" if there is no doubt.

    numbers: values with the chosen separator. rival: values with the other one. If no string has different values
    with the two separators, there is no doubt. If some strings are numbers with only one separator, there is doubt
    unless nearly all their rows are numbers with the chosen one. Otherwise, there is doubt only if `likely` is UNKNOWN,
    and strings such as 1,234 and 1500 both occur.
    """
    is_read, is_rival = ~np.isnan(numbers), ~np.isnan(rival)
    is_other, is_shown = is_read & is_rival & (numbers != rival), is_read != is_rival
    if not is_other.any():
        return ""
    if is_shown.any():
        if _are_nearly_all(is_read[is_shown], counts[is_shown]):
            return ""
        return _in_no_one_spelling(texts, is_read & is_shown, is_shown & is_rival)
    is_grouped = is_other & ["," in text for text in texts]
    is_loose = is_read & [_LOOSE.search(text) is not None for text in texts]
    if likely != UNKNOWN or not is_grouped.any() or not is_loose.any():
        return ""
    grouped, loose = _examples(texts, is_grouped, is_loose)
    return f"the comma in {grouped} may mark thousands or decimals, because {loose} has no comma"


def _in_no_one_spelling(texts: Sequence[str], *groups: np.ndarray) -> str:
    return f"numbers in different formats: {', '.join(_examples(texts, *groups))}"


def _examples(texts: Sequence[str], *groups: np.ndarray) -> list[str]:
    """Returns the first string of each group, shortened and in quotes. groups: (len(texts),) bool each."""
    found = [texts[int(rows.argmax())] for rows in groups]
    return [repr(text if len(text) <= 12 else f"{text[:9]}...") for text in found]
