"""The one exception that is shown to a user without a traceback."""


class BadInput(ValueError):
    """A mistake in what the user gave; the message names the value, the reason and the flag to change."""
