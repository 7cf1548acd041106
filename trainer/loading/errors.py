"""The one exception that is shown to a user without a traceback."""


def printable(text: str) -> str:
    """A line without what a terminal would take for a command: control characters, also in names of files, as \\x1b."""
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text)


class BadInput(ValueError):
    """A mistake in what the user gave; the message names the value, the reason and the flag to change."""
