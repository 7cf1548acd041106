"""The small JSON files of a run directory, each replaced as a whole, durably."""

import json
from pathlib import Path
from typing import Any

from trainer.loading.files import refusing_disk_errors, replace_text

CONFIG = "config.json"
RESULTS = "results.json"


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote; empty when there is no such file or it is damaged."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def write_json(path: Path, content: Any) -> None:
    """Raises BadInput when the disk refuses."""
    with refusing_disk_errors(f"--save-dir {path.parent}: cannot write {path.name}"):
        replace_text(path, json.dumps(content, indent=2) + "\n")


def delete(path: Path) -> None:
    """Whether or not it is there. Raises BadInput when the disk refuses."""
    with refusing_disk_errors(f"--save-dir {path.parent}: cannot delete {path.name}"):
        path.unlink(missing_ok=True)
