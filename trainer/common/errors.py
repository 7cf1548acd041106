"""The one exception that is shown to a user without a traceback, and how others are told in a line."""

MOST_SHOWN = 1500
"""Characters of a line, which may repeat what somebody wrote into a file."""


def printable(text: str) -> str:
    """A line without what a terminal would take for a command: control characters, also in names of files, as \\x1b."""
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text)


def shown_line(text: str) -> str:
    """A line as a terminal may show it: `printable`, and without its middle where it is longer than MOST_SHOWN."""
    if len(text) > MOST_SHOWN:
        text = f"{text[: MOST_SHOWN // 2]} ... {text[-MOST_SHOWN // 3 :]}"
    return printable(text)


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
