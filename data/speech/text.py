"""Transcripts as symbols: 0 is the blank of CTC, which also pads; 1, 2, ... are characters or words."""

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
    """What is compared and learned of a transcript.

    Unicode's compatibility form (NFKC) in lower case. Letters, their marks and digits stay, and an apostrophe between
    two of them; whatever else there is separates words, with one space, and none at the ends. Nothing is spelled out:
    `7` stays a digit. Applying it again changes nothing.
    """
    lower = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).lower())
    words = (word.strip("'") for word in re.sub("''+", " ", lower.translate(_SEPARATED)).split())
    return " ".join(word for word in words if word)


class _Separated(dict[int, str]):
    """Of a character's code: itself, or a space for what separates words."""

    def __missing__(self, code: int) -> str:
        character = {"\u2019": "'", "\u02bc": "'"}.get(chr(code), chr(code))
        kept = character == "'" or unicodedata.category(character)[0] in "LMN"
        return self.setdefault(code, character if kept else " ")


_SEPARATED = _Separated()


@dataclass(frozen=True)
class Alphabet:
    """The symbols of a recogniser.

    units: what a symbol is: a character (the space between words is one) or a word.
    symbols: without the blank; symbols[k - 1] has the number k.
    """

    units: Units
    symbols: tuple[str, ...]
    _numbers: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        numbers = {symbol: number for number, symbol in enumerate(self.symbols, start=BLANK + 1)}
        object.__setattr__(self, "_numbers", numbers)

    def __len__(self) -> int:
        """With the blank: the number of outputs of a recogniser."""
        return len(self.symbols) + 1

    @classmethod
    def from_transcripts(cls, transcripts: Iterable[str], units: Units) -> "Alphabet":
        """The symbols that occur in the normalised transcripts, in the order of their code points."""
        occurring = {symbol for text in transcripts for symbol in _split(normalise(text), units)}
        return cls(units, tuple(sorted(occurring)))

    @classmethod
    def from_file(cls, path: Path, units: Units) -> "Alphabet":
        """One symbol a line, in UTF-8; the space as `<space>` or itself. The blank is not among them.

        Letters are taken in lower case, as normalised text has them; other symbols may never occur in one.
        Raises UserError, naming the line, for one that is empty, there twice, or several characters where one is meant.
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
        """The symbols of the normalised text: (length,) int64. Raises UserError for one that is not in the alphabet."""
        symbols = _split(normalise(text), self.units)
        try:
            return np.fromiter((self._numbers[symbol] for symbol in symbols), np.int64, len(symbols))
        except KeyError as missing:
            raise UserError(
                f"--alphabet: {missing.args[0]!r} in the transcript {text!r} is none of its {len(self.symbols)} "
                "symbols; add it, or leave that utterance out"
            ) from None

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of symbols; blanks, which also pad, say nothing."""
        symbols = [self.symbols[number - 1] for number in ids if number != BLANK]
        return (" " if self.units == "words" else "").join(symbols)


def _split(text: str, units: Units) -> Sequence[str]:
    return text if units == "characters" else text.split()


def shortest_frames(symbols: np.ndarray) -> int:
    """The fewest frames on which CTC can place the symbols (length,): each takes one, and equal neighbours a blank."""
    return len(symbols) + int(np.count_nonzero(symbols[1:] == symbols[:-1]))
