"""The words of a transcript with their times."""

from typing import NamedTuple

from data.speech.text import Alphabet
from tasks.speech_decoder import AlignedText


class Word(NamedTuple):
    """start_s, end_s: where it lies in the recording, in seconds. confidence: in [0, 1], of its least sure symbol."""

    text: str
    start_s: float
    end_s: float
    confidence: float

    def __str__(self) -> str:
        return f"{self.text} {self.start_s:.2f}-{self.end_s:.2f} {self.confidence:.2f}"


def timed_words(text: AlignedText, alphabet: Alphabet, frame_s: float, duration_s: float) -> list[Word]:
    """The words that the symbols of a text spell. frame_s: seconds of a frame.

    duration_s: of the recording, behind which the last frame may end.
    """
    words: list[Word] = []
    begins = True
    for number, start, end, confidence in zip(text.ids, *text.aligned, strict=True):
        symbol = alphabet.symbols[number - 1]
        if symbol == " ":
            begins = True
            continue
        start_s, end_s = (float(min(frame * frame_s, duration_s)) for frame in (start, end))
        if begins:
            words.append(Word(symbol, start_s, end_s, float(confidence)))
        else:
            last = words[-1]
            words[-1] = Word(last.text + symbol, last.start_s, end_s, min(last.confidence, float(confidence)))
        begins = alphabet.units == "words"
    return words
