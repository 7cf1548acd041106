"""Texts and paths that a user gives, as far as they can be any at all."""

import os
from pathlib import Path

MOST_SHOWN = 200
"""Characters of a value in a message."""


def checked_path(text: str) -> Path:
    """The path, whether or not something is there. Raises ValueError for one that the system cannot look at."""
    if any(not character.isprintable() and character != "\t" for character in checked_text(text)):
        raise ValueError("must not have control characters in its name")
    try:
        os.stat(expanded(Path(text)))
    except (FileNotFoundError, NotADirectoryError):
        pass  # whether it has to be there is for others to say
    except OSError as error:
        raise ValueError(f"cannot be looked at: {error.strerror}") from None
    return Path(text)


def expanded(path: Path) -> Path:
    """Without ~ at its beginning. Raises ValueError for a user that is not there."""
    try:
        return path.expanduser()
    except RuntimeError:
        name = path.parts[0].removeprefix("~")
        raise ValueError(f"there is no user {name} with a home" if name else "this user has no home") from None


def whole(path: Path) -> Path:
    """The path from the root on, which leads to the same place from any folder."""
    plain = os.path.abspath(path)
    return Path(plain) if os.path.realpath(plain) == os.path.realpath(path) else path.absolute()  # `..` beyond a link


def checked_text(text: str) -> str:
    """The text. Raises ValueError for what is none in UTF-8, or holds a NUL byte."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("is not text in UTF-8") from None
    if "\0" in text:
        raise ValueError("must not hold a NUL byte")
    return text


def shortened(text: str) -> str:
    """What a message shows of a value that may be of any length."""
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({len(text)} characters)"
