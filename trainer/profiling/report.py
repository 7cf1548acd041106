"""Formats and writes results, and checks in advance whether files can be written."""

import errno
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.common.files import replace_text


def table(columns: Sequence[tuple[str, str, str]], rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats a table with a left-aligned first column and right-aligned other columns.

    columns: title, key in `rows`, and format specification of each column. Strings are not formatted; missing keys
    become "-".
    """
    lines = [[title for title, _, _ in columns]]
    for row in rows:
        values = [(row.get(key, "-"), spec) for _, key, spec in columns]
        lines.append([value if isinstance(value, str) else format(value, spec) for value, spec in values])
    first, *others = (max(map(len, cells)) for cells in zip(*lines, strict=True))
    return "\n".join("  ".join([line[0].ljust(first), *map(str.rjust, line[1:], others)]).rstrip() for line in lines)


def note_of_cut_batch(measured: Mapping[str, Any]) -> list[str]:
    """Returns a note if steps have fewer samples than requested. measured: result of `MeasuredRun.measure`."""
    asked, full = measured["requested_global_batch_size"], measured["global_batch_size"]
    return [f"Steps of {asked} samples were requested, but the training data has only {full}."] if full < asked else []


def save_results(path: Path | None, results: Mapping[str, Any]) -> None:
    """Writes a command's results to a file and prints its path; does nothing for path None."""
    if path is not None:
        write_json(path, results)
        print(f"Results: {path}")


def write_json(path: Path, results: Mapping[str, Any]) -> None:
    """Writes results as JSON, and creates missing folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(results, indent=2) + "\n")


def unwritable_targets(tool: Any, is_main: bool = True) -> list[str]:
    """Returns messages about a tool's output paths that cannot be written; each names the file or folder at fault.

    is_main: whether this is rank 0, which writes all outputs; other ranks write only traces.
    """
    found = []
    for name, kind in (("trace", "folder"), ("json", "file"), ("board", "folder")):
        path = getattr(tool, name, None)
        try:
            if path is not None and (is_main or name == "trace"):
                require_writable(path, kind)
        except OSError as error:
            blamed = f"{error.filename}: " if error.filename != str(path) else ""
            found.append(f"--{name} {path}: {blamed}{error.strerror}; choose another {kind}")
    return found


def require_writable(path: Path, kind: str = "file") -> None:
    """Raises OSError, with the file or folder at fault as `filename`, if a path cannot be written. Writes nothing.

    kind: "file", or "folder" for a folder of output files. Parent folders may be missing.
    """
    if kind == "file" and path.is_dir():
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    folder = path.parent if kind == "file" else path
    existing = next(part for part in (folder, *folder.parents) if os.path.lexists(part))
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(existing)) from None
