"""The temporary names of a run directory's files, which hold a token of their own for each start of a run."""

import os
import re
from pathlib import Path


def name_of(path: str | bytes | Path) -> str:
    """The last part of a path, without tokens."""
    return re.sub(r"(\.[0-9a-f]{8})+(?=\.tmp$)", "", os.path.basename(os.fsdecode(path)))
