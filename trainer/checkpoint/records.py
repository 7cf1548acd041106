"""The small JSON files of a run directory, each replaced as a whole by `RunDirectory.write_json`."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.checkpoint.format import flaw_of_config
from trainer.common.files import MOST_RECORD, read_whole, refusing_disk_errors

CONFIG = "config.json"
RESULTS = "results.json"


def read_json(path: Path, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """What was written; empty when there is no such file or it is damaged. say: gets a line if it is damaged."""
    try:
        content = json.loads(read_whole(path, MOST_RECORD))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        say(f"{path} is damaged: it is no JSON object.")
        return {}
    return content


def as_json(content: Any) -> str:
    """The text of a file."""
    return json.dumps(without_nan(content), indent=2, allow_nan=False) + "\n"


def without_nan(value: Any) -> Any:
    """For JSON, which knows no NaN and no infinity: None stands for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: without_nan(item) for name, item in value.items()}
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return [without_nan(item) for item in value] if is_list else value


def metrics_of(results: Mapping[str, Any]) -> dict[str, float]:
    """Those of results.json by name, such as "test/loss"; NaN where it has none. Empty of a run without results."""
    return {name: math.nan if value is None else value for name, value in results.get("metrics", {}).items()}


def read_config(folder: Path, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """config.json of a run directory; empty where there is none, or one that nothing can be relied on in.

    say: gets a line about a damaged one.
    """
    path = folder / CONFIG
    content = read_json(path, say)
    flaw = flaw_of_config(content) if content else None
    if flaw is not None:
        say(f"{path} is damaged: {flaw}.")
        return {}
    return content


def delete(path: Path) -> None:
    """Whether or not it is there. Raises BadInput when the disk refuses."""
    with refusing_disk_errors(f"--save-dir {path.parent}: cannot delete {path.name}"):
        path.unlink(missing_ok=True)
