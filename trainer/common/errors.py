"""The one exception that is shown to a user without a traceback, and how others are told in a line."""

MOST_OF_LINE = 1500
"""Characters of a line, which may repeat what somebody wrote into a file."""
MOST_OF_VALUE = 200
"""Characters of a value in a message."""


def printable(text: str) -> str:
    """A line without what a terminal would take for a command: control characters, also in names of files, as \\x1b."""
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text)


def shown_line(text: str) -> str:
    """A line as a terminal may show it: `printable`, and without its middle where it is longer than MOST_OF_LINE."""
    for _ in range(2):  # `printable` may make it several times as long
        if len(text) > MOST_OF_LINE:
            text = f"{text[: MOST_OF_LINE // 2]} ... {text[-MOST_OF_LINE // 3 :]}"
        text = printable(text)
    return text


def shortened(text: str) -> str:
    """What a message shows of a value that may be of any length."""
    return text if len(text) <= MOST_OF_VALUE else f"{text[:MOST_OF_VALUE]}... ({len(text)} characters)"


class UserError(ValueError):
    """A mistake in what the user gave; the message names the value, the reason and the flag to change."""


BadInput = UserError
"""The name of `UserError` in tasks that were written before it."""


class UnfitState(UserError):
    """The state of a run cannot be saved: it diverged, its ranks drifted apart, or no resume could read it."""


class DiskError(UserError):
    """The file system refused, or could not read what is there: what a file holds is not known."""


def message(error: BaseException | None) -> str:
    """The text of an exception, also of one whose own `__str__` fails."""
    try:
        return str(error)
    except Exception:
        return "its message cannot be shown"


def reason(error: BaseException) -> str:
    """An exception in one line, as a terminal may show it."""
    text = message(error)
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    if "Original Traceback" in text:  # of a data-loading process: the cause is its last line
        return shown_line(lines[-1].strip())
    told = lines[0]
    if "Last error:" in lines[1:-1]:  # of NCCL: the cause stands below it
        told = f"{told}: {lines[lines.index('Last error:') + 1].strip()}"
    return shown_line(told if isinstance(error, UserError) else f"{type(error).__name__}: {told}".removesuffix(": "))
