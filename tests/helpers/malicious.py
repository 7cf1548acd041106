"""What a harmful file may hold."""

import os
from pathlib import Path


class Malicious:
    """Unpickled it makes a folder: in a harmful file that would be any call."""

    def __init__(self, creates: Path) -> None:
        self.creates = creates

    def __reduce__(self):
        return os.mkdir, (str(self.creates),)
