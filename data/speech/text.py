"""Converts transcripts to symbol numbers: 0 is the CTC blank and padding; 1, 2, ... are characters or words."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
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

    Applies Unicode's compatibility form (NFKC) and lower case. Letters, their marks, digits, and apostrophes between
    these are kept; all other characters separate words. Words are joined by single spaces. Digits are not spelled out.
    Normalising the result again does not change it.
    """
    lower = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).lower())
    words = (word.strip("'") for word in re.sub("''+", " ", lower.translate(_SEPARATED)).split())
    return " ".join(word for word in words if word)


class _Separated(dict[int, str]):
    """Maps a character's code point to the character, or to a space if the character separates words."""

    def __missing__(self, code: int) -> str:
        character = {"\u2019": "'", "\u02bc": "'"}.get(chr(code), chr(code))
        kept = character == "'" or unicodedata.category(character)[0] in "LMN"
        return self.setdefault(code, character if kept else " ")


_SEPARATED = _Separated()


@dataclass(frozen=True)
class Alphabet:
    """Symbols of a recogniser.

    units: whether symbols are characters, including the space, or words. symbols: all symbols but the blank;
    symbols[k - 1] has number k.
    """

    units: Units
    symbols: tuple[str, ...]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {symbol: number for number, symbol in enumerate(self.symbols, start=BLANK + 1)}

    def __len__(self) -> int:
        """Returns the number of symbols including the blank."""
        return len(self.symbols) + 1

    @classmethod
    def from_transcripts(cls, transcripts: Iterable[str], units: Units) -> "Alphabet":
        """Builds the alphabet of normalised transcripts, sorted by code point."""
        occurring = {symbol for text in transcripts for symbol in _split(normalise(text), units)}
        return cls(units, tuple(sorted(occurring)))

    @classmethod
    def from_file(cls, path: Path, units: Units) -> "Alphabet":
        """Reads an alphabet from a UTF-8 file with a symbol per line, without the blank; `<space>` is the space.

        Letters become lower case, as in normalised text. Raises UserError, with the line, for a symbol that is empty,
        repeated, or longer than one character if symbols are characters.
        """
        where = f"--alphabet {path}"
        try:
            lines = read_whole(path, MOST_RECORD).decode("utf-8-sig").splitlines()
        except OSError as error:
            raise UserError(f"{where}: {error.strerror or error}; give a file with one symbol per line") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: is not text in UTF-8 ({error.reason}); convert the file to UTF-8") from None
        numbers: dict[str, int] = {}
        for number, line in enumerate(lines, start=1):
            symbol = " " if line in (" ", _SPACE_IN_FILES) else unicodedata.normalize("NFKC", line.strip()).lower()
            place = f"{where}, line {number}"
            if not symbol:
                raise UserError(f"{place}: is empty; give one symbol per line, and write the space as <space>")
            if units == "characters" and len(symbol) > 1:
                advice = "give one character per line, or use --units words"
                raise UserError(f"{place}: {symbol!r} is more than one character; {advice}")
            if symbol in numbers:
                raise UserError(f"{place}: {symbol!r} is already on line {numbers[symbol]}; remove one of the two")
            numbers[symbol] = number
        if not numbers:
            raise UserError(f"{where}: is empty; give one symbol per line")
        return cls(units, tuple(numbers))

    def encode(self, text: str) -> np.ndarray:
        """Normalises a text and returns its symbol numbers, (length,) int64. Raises UserError for unknown symbols."""
        symbols = _split(normalise(text), self.units)
        try:
            return np.fromiter((self._numbers[symbol] for symbol in symbols), np.int64, len(symbols))
        except KeyError as missing:
            raise UserError(
                f"--alphabet: {missing.args[0]!r} in the transcript {text!r} is not one of the {len(self.symbols)} "
                "symbols; add the symbol, or remove the utterance"
            ) from None

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Converts symbol numbers to text; skips 0, the blank."""
        symbols = [self.symbols[number - 1] for number in ids if number != BLANK]
        return (" " if self.units == "words" else "").join(symbols)


def _split(text: str, units: Units) -> Sequence[str]:
    return text if units == "characters" else text.split()


def shortest_frames(symbols: np.ndarray) -> int:
    """Returns the frames that CTC needs for symbols (length,): one per symbol, and a blank between equal neighbours."""
    return len(symbols) + int(np.count_nonzero(symbols[1:] == symbols[:-1]))
