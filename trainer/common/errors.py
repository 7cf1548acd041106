"""Exceptions shown to the user without a traceback, and one-line texts of all others."""

MOST_OF_LINE = 1500
"""Characters of a line that is printed; files may hold longer ones."""
MOST_OF_VALUE = 200
"""Characters of a value quoted in a message."""


def printable(text: str) -> str:
    r"""Escapes control characters, which a terminal would obey, as \\x1b."""
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text)


def shown_line(text: str) -> str:
    """Makes a line safe to print: escapes it (`printable`) and cuts out its middle beyond MOST_OF_LINE."""
    for _ in range(2):  # escaping may lengthen it several times
        if len(text) > MOST_OF_LINE:
            text = f"{text[: MOST_OF_LINE // 2]} ... {text[-MOST_OF_LINE // 3 :]}"
        text = printable(text)
    return text


def shortened(text: str) -> str:
    """Truncates a value for a message."""
    return text if len(text) <= MOST_OF_VALUE else f"{text[:MOST_OF_VALUE]}... ({len(text)} characters)"


class UserError(ValueError):
    """A mistake in the user's input; the message names the value, the reason and the flag to change."""


BadInput = UserError
"""Former name of `UserError`, kept for user tasks."""


class UnfitState(UserError):
    """The run cannot be saved: it diverged, its ranks drifted apart, or the checkpoint could not be resumed."""


class DiskError(UserError):
    """The file system refused a read or a write, so the content of a file is unknown."""


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
    if "Original Traceback" in text:  # from a data-loading worker: the last line names the cause
        return shown_line(lines[-1].strip())
    told = lines[0]
    if "Last error:" in lines[1:-1]:  # from NCCL: the next line names the cause
        told = f"{told}: {lines[lines.index('Last error:') + 1].strip()}"
    return shown_line(told if isinstance(error, UserError) else f"{type(error).__name__}: {told}".removesuffix(": "))
