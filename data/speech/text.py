"""Transcripts as symbols: 0 is the CTC blank, also used as padding; 1, 2, ... are characters or words."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from trainer.common.errors import UserError
from trainer.common.files import MOST_RECORD, read_whole

BLANK = 0
Units = Literal["characters", "words"]
_SPACE_IN_FILES = "<space>"


def normalise(text: str) -> str:
    """Normalises a transcript for comparison and training.

    Unicode's compatibility form (NFKC) in lower case. Keeps letters, their marks and digits, and apostrophes between
    two of them; anything else separates words, by one space, without spaces at the ends. Nothing is spelled out: `7`
    stays a digit. Idempotent.
    """
    lower = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).lower())
    words = (word.strip("'") for word in re.sub("''+", " ", lower.translate(_SEPARATED)).split())
    return " ".join(word for word in words if word)


class _Separated(dict[int, str]):
    """Maps a character's code to itself, or to a space if it separates words."""

    def __missing__(self, code: int) -> str:
        character = {"\u2019": "'", "\u02bc": "'"}.get(chr(code), chr(code))
        kept = character == "'" or unicodedata.category(character)[0] in "LMN"
        return self.setdefault(code, character if kept else " ")


_SEPARATED = _Separated()


@dataclass(frozen=True)
class Alphabet:
    """The symbols of a recogniser.

    units: a symbol is a character (also the space between words) or a word.
    symbols: without the blank; symbols[k - 1] has number k.
    """

    units: Units
    symbols: tuple[str, ...]
    _numbers: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        numbers = {symbol: number for number, symbol in enumerate(self.symbols, start=BLANK + 1)}
        object.__setattr__(self, "_numbers", numbers)

    def __len__(self) -> int:
        """Returns the number of a recogniser's outputs, including the blank."""
        return len(self.symbols) + 1

    @classmethod
    def from_transcripts(cls, transcripts: Iterable[str], units: Units) -> "Alphabet":
        """Collects the symbols of normalised transcripts, sorted by code point."""
        occurring = {symbol for text in transcripts for symbol in _split(normalise(text), units)}
        return cls(units, tuple(sorted(occurring)))

    @classmethod
    def from_file(cls, path: Path, units: Units) -> "Alphabet":
        """Reads one symbol per line, in UTF-8, without the blank; the space as `<space>` or itself.

        Letters are lower-cased, as in normalised text, in which other symbols may never occur. Raises UserError, with
        the line, for a symbol that is empty, repeated, or several characters instead of one.
        """
        where = f"--alphabet {path}"
        try:
            lines = read_whole(path, MOST_RECORD).decode("utf-8-sig").splitlines()
        except OSError as error:
            raise UserError(f"{where}: {error.strerror or error}; give a file with one symbol a line") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: is not text in UTF-8 ({error.reason}); convert it") from None
        numbers: dict[str, int] = {}
        for number, line in enumerate(lines, start=1):
            symbol = " " if line in (" ", _SPACE_IN_FILES) else unicodedata.normalize("NFKC", line.strip()).lower()
            if not symbol:
                raise UserError(f"{where}, line {number}: is empty; give one symbol a line, the space as <space>")
            if units == "characters" and len(symbol) > 1:
                raise UserError(f"{where}, line {number}: {symbol!r} is more than one character; use --units words")
            if symbol in numbers:
                raise UserError(f"{where}, line {number}: {symbol!r} is in line {numbers[symbol]} already; keep one")
            numbers[symbol] = number
        if not numbers:
            raise UserError(f"{where}: is empty; give one symbol a line")
        return cls(units, tuple(numbers))

    def encode(self, text: str) -> np.ndarray:
        """Returns the symbols of the normalised text: (length,) int64. Raises UserError for symbols outside the
        alphabet.
        """
        symbols = _split(normalise(text), self.units)
        try:
            return np.fromiter((self._numbers[symbol] for symbol in symbols), np.int64, len(symbols))
        except KeyError as missing:
            raise UserError(
                f"--alphabet: {missing.args[0]!r} in the transcript {text!r} is none of its {len(self.symbols)} "
                "symbols; add it, or leave that utterance out"
            ) from None

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Converts symbols to text; skips blanks and padding."""
        symbols = [self.symbols[number - 1] for number in ids if number != BLANK]
        return (" " if self.units == "words" else "").join(symbols)


def _split(text: str, units: Units) -> Sequence[str]:
    return text if units == "characters" else text.split()


def shortest_frames(symbols: np.ndarray) -> int:
    """Returns the fewest frames for CTC to align symbols (length,): one each, and a blank between equal neighbours."""
    return len(symbols) + int(np.count_nonzero(symbols[1:] == symbols[:-1]))
