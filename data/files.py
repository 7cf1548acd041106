"""What writing files that survive takes, besides writing them."""

import os
from pathlib import Path


def flush_folder(path: Path) -> None:
    """Makes what was renamed in a folder survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
