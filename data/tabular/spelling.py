"""How the cells of a column are written: its numbers in one way, and which spellings of a category mean the same."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

MISSING = frozenset(
    {"", "?", "NA", "N/A", "na", "n/a", "NaN", "nan", "-NaN", "-nan", "NULL", "null", "NaT", "<NA>", "#N/A", "#N/A N/A"}
    | {"#NA", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN"}
)
"""Texts that stand for no value in any column."""
NEARLY_ALL = 0.95
"""Of the values that are there, in a column of numbers or dates; what is no number there counts as missing."""

_MARKS = frozenset(text.lower() for text in MISSING) | frozenset(
    {"-", "--", "---", "\u2013", "\u2014", ".", "..", "...", "*", "none", "n.a.", "missing"}
    | {"#null!", "#div/0!", "#value!", "#ref!", "#name?", "#num!"}
    | {f"{sign}{infinity}" for sign in ("", "+", "-") for infinity in ("inf", "infinity")}
)
"""In lower case."""
_MOST_CATEGORIES = 10
_LONGEST_NUMBER = 64
"""Characters. To match a text takes the square of its length, and no number has as many."""
_FEWEST_GROUPED = 5
"""Different numbers in groups of three digits: fewer may be decimals that happen to have three digits each."""

_PLAIN = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_CURRENCY = r"[A-Z]{0,3}[$¢£¤¥฿\u20a0-\u20cf]"
_CELL = re.compile(
    rf"(?P<sign>[+-]?) ?(?P<head>{_CURRENCY}|) ?(?P<inner>[+-]?)"
    r"(?P<digits>[.,]?\d(?:[\d., ']*\d)?[.,]?(?:[eE][+-]?\d+)?)"
    rf" ?(?P<tail>{_CURRENCY}|[%‰°][^\W\d_]?|\+|[^\W\d_][^\d\s]{{0,11}}|)"
)
_SCALES = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9}
_ALIKE = str.maketrans({"\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2019": "'", "\u2212": "-"})
"""Blanks, apostrophes and minus signs of typesetting."""

_BLANKS = ((".", " "), (",", " "), (".", "'"))
_LOOSE = re.compile(r"(?<!\d)\d{4}")
"""Four digits of a number that is not in groups."""


def _number_with(decimal: str, thousands: str) -> re.Pattern[str]:
    decimal, thousands = re.escape(decimal), re.escape(thousands)
    whole = rf"(?:[1-9]\d{{0,2}}(?:{thousands}\d{{3}})+|\d+)" if thousands else r"\d+"
    return re.compile(rf"(?:{whole}(?:{decimal}\d*)?|{decimal}\d+)(?:[eE][+-]?\d+)?")


_PATTERNS = {signs: _number_with(*signs) for signs in ((".", ""), (".", ","), (",", ""), (",", "."), *_BLANKS)}
"""By the signs of the decimals and of the thousands."""
_GROUPED = {sign: re.compile(rf"[1-9]\d{{0,2}}(?:{re.escape(sign)}\d{{3}})+") for sign in ".,"}
_TRUTHS = frozenset({"yes", "no", "true", "false"})
_WHOLE = re.compile(r"([+-]?\d+)\.0*")


class _Cell(NamedTuple):
    """A text that looks like a number. unit: what stands before and after it."""

    sign: str
    digits: str
    unit: tuple[str, str]
    scale: float


@dataclass(frozen=True)
class Spelling:
    """How the numbers of a column are written.

    decimal, thousands: the signs; "" where there is none. head, tail: the unit, before or after every number. k or K, M
    and B are no units, but thousands, millions and billions.
    """

    decimal: str = "."
    thousands: str = ""
    head: str = ""
    tail: str = ""

    def number(self, text: str) -> float:
        """NaN where the text is no number in this spelling; infinity where it is too large for float64."""
        if self == PLAIN and _is_plain(text):
            return float(text)
        cell = _cell(text)
        return self.value(cell) if cell else np.nan

    def value(self, cell: _Cell) -> float:
        """As `number`."""
        if cell.unit != (self.head, self.tail) or not _PATTERNS[self.decimal, self.thousands].fullmatch(cell.digits):
            return np.nan
        digits = cell.digits.replace(self.thousands, "").replace(self.decimal, ".")
        return float(cell.sign + digits) * cell.scale


PLAIN = Spelling()


class Reading(NamedTuple):
    """spelling: of the numbers of a column; None for categories. doubt: why they are none although most look so."""

    spelling: Spelling | None
    doubt: str = ""


def reading_of(texts: Sequence[str], counts: np.ndarray, decimal_comma: bool = False) -> Reading:
    """Whether a column holds numbers, and how they are written.

    Of several spellings the one that reads most rows counts, unless other rows show another one. Nearly all rows have
    to be numbers, or all but those with a mark of missing values, which a single word is beside many different numbers.

    texts: the different ones, none of `MISSING`. counts: rows of each, (len(texts),). decimal_comma: the comma in 1,234
    is that of decimals where no cell shows what it is.
    """
    values = [i for i, text in enumerate(texts) if not is_mark_among_numbers(text)]
    texts, counts = [texts[i] for i in values], counts[values]
    if not decimal_comma and texts and all(map(_is_plain, texts)):
        return Reading(PLAIN)
    cells = [_cell(text) for text in texts]
    units = Counter[tuple[str, str]]()
    for cell, count in zip(cells, counts.tolist(), strict=True):
        units.update({cell.unit: count} if cell else {})
    if not units:
        return Reading(None)
    spellings = _spellings(cells, units.most_common(1)[0][0], decimal_comma)
    numbers = _numbers(spellings, cells)
    best = _best(numbers, counts)
    is_read = ~np.isnan(numbers[best])
    if spellings[best] != PLAIN and is_read.sum() < 2:
        return Reading(None)
    doubt = _doubt(texts, counts, numbers, best, decimal_comma)
    others = [text for text, is_number in zip(texts, is_read.tolist(), strict=True) if not is_number]
    is_marked = len(others) == 1 and not any(map(str.isdigit, others[0])) and is_read.sum() > _MOST_CATEGORIES
    if not doubt and (is_marked or _are_nearly_all(is_read, counts)):
        return Reading(spellings[best])
    looks = np.array([cell is not None for cell in cells])
    if _are_nearly_all(looks, counts):
        return Reading(None, doubt or _in_no_one_spelling(texts, is_read, looks & ~is_read))
    are_many = counts[looks].sum() > counts.sum() / 2
    return Reading(None, f"not only numbers: {', '.join(_examples(texts, ~looks))}" if are_many else "")


def spelling_like(trained: Spelling, texts: Sequence[str], counts: np.ndarray, decimal_comma: bool = False) -> Spelling:
    """How new rows of a column of numbers are written: as in training, but with other signs where their cells show it.

    texts, counts, decimal_comma: as of `reading_of`.
    """
    if trained == PLAIN and all(map(_is_plain, texts)):
        return trained
    cells = [_cell(text) for text in texts]
    spellings = [trained, *_spellings(cells, (trained.head, trained.tail), decimal_comma)]
    return spellings[_best(_numbers(spellings, cells), counts)]


def is_mark_among_numbers(text: str) -> bool:
    """Whether a text stands for no value where the others are numbers."""
    return text.lower() in _MARKS


class Meaning:
    """Which spellings of a category mean the same: yes and YES, and beside whole numbers 1 and 1.0.

    Other words keep their case, and so do letters, but in a column of nothing else than Y and N, or T and F.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        """texts: the different ones of the column."""
        lower = {text.lower() for text in texts}
        self._truths = _TRUTHS | (lower if lower <= set("yn") or lower <= set("tf") else set())
        self._are_whole = all(float(text).is_integer() for text in texts if _is_plain(text))

    def is_truth(self, text: str) -> bool:
        """Whether the case of the text means nothing."""
        return text.lower() in self._truths

    def key(self, text: str) -> str:
        """Equal for texts that mean the same."""
        if self.is_truth(text):
            return text.lower()
        whole = _WHOLE.fullmatch(text) if self._are_whole else None
        return whole[1] if whole else text


def canonical(texts: Sequence[str], counts: np.ndarray) -> list[str]:
    """For the different texts of a column one for each meaning: 1 for 1.0, and yes for YES where it is commoner.

    counts: rows of each, (len(texts),).
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
    """None for a text that is no number in any spelling."""
    match = _CELL.fullmatch(text.translate(_ALIKE)) if len(text) <= _LONGEST_NUMBER else None
    if match is None or (match["sign"] and match["inner"]):
        return None
    if not any(pattern.fullmatch(match["digits"]) for pattern in _PATTERNS.values()):
        return None
    head, tail = match["head"], match["tail"]
    scale = _SCALES.get(tail, 1.0)
    return _Cell(match["sign"] + match["inner"], match["digits"], (head, "" if tail in _SCALES else tail), scale)


def _is_plain(text: str) -> bool:
    return len(text) <= _LONGEST_NUMBER and _PLAIN.fullmatch(text) is not None


def _spellings(cells: Sequence[_Cell | None], unit: tuple[str, str], decimal_comma: bool) -> list[Spelling]:
    """Those that may be meant; of two that read the same the earlier is."""
    digits = [cell.digits for cell in cells if cell]
    comma, point_comma, comma_point = (",", ""), (".", ","), (",", ".")
    order = [comma, comma_point, point_comma] if decimal_comma else [point_comma, comma, comma_point]
    order = [(".", ""), *order, *_BLANKS]
    for sign, grouped in ((".", comma_point), (",", point_comma)):
        if decimal_comma and _is_of_thousands(sign, digits):
            order.insert(0, grouped)
    occur = set("." + "".join(digits))
    return [Spelling(*signs, *unit) for signs in order if (signs[1] or signs[0]) in occur]


def _is_of_thousands(sign: str, digits: Sequence[str]) -> bool:
    """Whether all larger numbers, and no smaller ones, are in groups: as decimals that would be odd."""
    small = [text for text in digits if text.isdigit() and len(text) <= 3]
    grouped = [text for text in digits if _GROUPED[sign].fullmatch(text)]
    return len(grouped) >= _FEWEST_GROUPED and bool(small) and len(small) + len(grouped) == len(digits)


def _numbers(spellings: Sequence[Spelling], cells: Sequence[_Cell | None]) -> np.ndarray:
    """The cells by each spelling, (len(spellings), len(cells)), NaN where it does not read one."""
    return np.array([[spelling.value(cell) if cell else np.nan for cell in cells] for spelling in spellings])


def _best(numbers: np.ndarray, counts: np.ndarray) -> int:
    """The spelling that reads most rows, the first of several."""
    return int((~np.isnan(numbers) @ counts).argmax())


def _are_nearly_all(fits: np.ndarray, counts: np.ndarray) -> bool:
    return bool(counts[fits].sum() >= NEARLY_ALL * counts.sum())


def _doubt(texts: Sequence[str], counts: np.ndarray, numbers: np.ndarray, best: int, decimal_comma: bool) -> str:
    """Why the best spelling may be wrong where another one reads other numbers; empty where it is not.

    That is so unless nearly all rows show it that only one of the two reads. Where none shows anything, the order of
    the spellings decides, but for numbers such as 1234 beside 1,234.
    """
    is_read = ~np.isnan(numbers[best])
    for rival in numbers:
        is_other, is_shown = rival != numbers[best], np.isnan(rival) == is_read
        is_other &= ~np.isnan(rival) & is_read
        if not is_other.any():
            continue
        if is_shown.any() and not _are_nearly_all(is_read[is_shown], counts[is_shown]):
            return _in_no_one_spelling(texts, is_read & is_shown, is_shown & ~is_read)
        is_loose = np.array([_LOOSE.search(text) is not None for text in texts]) & is_read
        if not decimal_comma and is_loose.any() and not is_shown.any():
            example, loose = _examples(texts, is_other, is_loose)
            return f"{example} may be thousands or decimals, beside {loose}"
    return ""


def _in_no_one_spelling(texts: Sequence[str], *groups: np.ndarray) -> str:
    return f"numbers in no one spelling: {', '.join(_examples(texts, *groups))}"


def _examples(texts: Sequence[str], *groups: np.ndarray) -> list[str]:
    """One text of each group of rows."""
    found = [texts[int(rows.argmax())] for rows in groups]
    return [repr(text if len(text) <= 12 else f"{text[:9]}...") for text in found]
