"""Object for a harmful pickle file."""

import os
from pathlib import Path


class Malicious:
    """Creates a folder when it is unpickled, in place of the arbitrary call of a harmful file."""

    def __init__(self, creates: Path) -> None:
        self.creates = creates

    def __reduce__(self):
        return os.mkdir, (str(self.creates),)
