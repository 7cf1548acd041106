"""Exceptions that are printed without a traceback, and one-line descriptions of other exceptions."""

MOST_OF_LINE = 1500
"""Largest number of characters of a printed line."""
MOST_OF_VALUE = 200
"""Largest number of characters of a value in a message."""


def printable(text: str) -> str:
    r"""Escapes control characters, which a terminal would interpret: ESC becomes \\x1b."""
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text)


def shown_line(text: str) -> str:
    """Makes a line safe to print: escapes control characters, and cuts lines longer than MOST_OF_LINE characters."""
    for _ in range(2):  # escaping may make the line several times longer
        if len(text) > MOST_OF_LINE:
            text = f"{text[: MOST_OF_LINE // 2]} ... {text[-MOST_OF_LINE // 3 :]}"
        text = printable(text)
    return text


def shortened(text: str) -> str:
    """Truncates a value for a message to MOST_OF_VALUE characters."""
    return text if len(text) <= MOST_OF_VALUE else f"{text[:MOST_OF_VALUE]}... ({len(text)} characters)"


class UserError(ValueError):
    """Raised for mistakes in the user's input; the message names the value, the reason and the flag to change."""


BadInput = UserError
"""Former name of `UserError`, for task files that use it."""


class UnfitState(UserError):
    """Raised if a run's state must not be saved: it is not finite, differs between ranks, or cannot be restored."""


class DiskError(UserError):
    """Raised if the file system fails to read or write a file, whose content is then unknown."""


def message(error: BaseException | None) -> str:
    """Returns the text of an exception, even if its `__str__` fails."""
    try:
        return str(error)
    except Exception:
        return "its message cannot be shown"


def reason(error: BaseException) -> str:
    """Describes an exception in one printable line."""
    text = message(error)
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    if "Original Traceback" in text:  # from a DataLoader worker: the last line names the cause
        return shown_line(lines[-1].strip())
    told = lines[0]
    if "Last error:" in lines[1:-1]:  # from NCCL: the next line names the cause
        told = f"{told}: {lines[lines.index('Last error:') + 1].strip()}"
    return shown_line(told if isinstance(error, UserError) else f"{type(error).__name__}: {told}".removesuffix(": "))
