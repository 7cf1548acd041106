"""Temporary names of files in a run directory, which contain a token that is unique to each start of a run."""

import os
import re
from pathlib import Path


def name_of(path: str | bytes | Path) -> str:
    """Returns the last part of a path without tokens."""
    return re.sub(r"(\.[0-9a-f]{8})+(?=\.tmp$)", "", os.path.basename(os.fsdecode(path)))
