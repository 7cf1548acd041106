"""Prints and writes results, and checks in advance that files can be written."""

import errno
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.common.files import replace_text


def table(columns: Sequence[tuple[str, str, str]], rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats a table with the first column left-aligned and the others right-aligned.

    columns: title, key in a row, format. Strings are shown unchanged, missing keys as "-".
    """
    lines = [[title for title, _, _ in columns]]
    for row in rows:
        values = [(row.get(key, "-"), spec) for _, key, spec in columns]
        lines.append([value if isinstance(value, str) else format(value, spec) for value, spec in values])
    first, *others = (max(map(len, cells)) for cells in zip(*lines, strict=True))
    return "\n".join("  ".join([line[0].ljust(first), *map(str.rjust, line[1:], others)]).rstrip() for line in lines)


def note_of_cut_batch(measured: Mapping[str, Any]) -> list[str]:
    """Returns a note if steps have fewer samples than requested. measured: from `measure`."""
    asked, full = measured["requested_global_batch_size"], measured["global_batch_size"]
    return [f"Steps of {asked} samples were asked for; the training data has {full}."] if full < asked else []


def save_results(path: Path | None, results: Mapping[str, Any]) -> None:
    """Writes a command's results if a file is given, and prints its path. Raises OSError."""
    if path is not None:
        write_json(path, results)
        print(f"Results: {path}")


def write_json(path: Path, results: Mapping[str, Any]) -> None:
    """Writes JSON, creating missing folders. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(results, indent=2) + "\n")


def unwritable_targets(tool: Any, is_main: bool = True) -> list[str]:
    """Returns problems with paths among a tool's flags, naming the offending part.

    is_main: this process writes all of them; others write only traces.
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
    """Raises OSError naming the offending part of an unwritable path. Writes nothing.

    kind: "file", or "folder" for files to be written to. Parent folders may be missing.
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
