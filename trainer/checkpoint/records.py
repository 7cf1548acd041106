"""The small JSON files of a run directory, each replaced as a whole by `RunDirectory.write_json`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.checkpoint.format import schema_error_of_config
from trainer.common.errors import DiskError
from trainer.common.files import MOST_RECORD, NO_FILE, read_whole, without_nan

CONFIG = "config.json"
RESULTS = "results.json"
IF_UNREADABLE = "see to the file system and run the same command again, or move the file away to do without it"


def read_json(path: Path, say: Callable[[str], None] = lambda line: None, most: int = MOST_RECORD) -> dict[str, Any]:
    """The record in a file; empty when there is no such file or it is damaged. say: gets a line if it is damaged.

    most: bytes that the file may have. Raises DiskError when it is there and cannot be read.
    """
    try:
        content = json.loads(read_whole(path, most))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, OSError) and error.errno not in NO_FILE:
            problem = f"--save-dir {path.parent}: cannot read {path.name}: {error.strerror}"
            raise DiskError(f"{problem}; {IF_UNREADABLE}") from None
        content = None
    if not isinstance(content, dict):
        say(f"{path} is damaged: it is no JSON object.")
        return {}
    return content


def as_json(content: Any) -> str:
    """The text of a file."""
    return json.dumps(without_nan(content), indent=2, allow_nan=False) + "\n"


def read_config(folder: Path, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """config.json of a run directory; empty where there is none, or one that nothing can be relied on in.

    say: gets a line about a damaged one.
    """
    path = folder / CONFIG
    content = read_json(path, say)
    schema_error = schema_error_of_config(content) if content else None
    if schema_error is not None:
        say(f"{path} is damaged: {schema_error}.")
        return {}
    return content
