"""Results on the console and in files, and whether those files can be written: asked before what may take long."""

import errno
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.common.files import replace_text


def table(columns: Sequence[tuple[str, str, str]], rows: Sequence[Mapping[str, Any]]) -> str:
    """Columns as wide as they need to be, the first one flush left, the others flush right.

    columns: title, key in a row, format. A text is shown as it is, and "-" where a row lacks the key.
    """
    lines = [[title for title, _, _ in columns]]
    for row in rows:
        values = [(row.get(key, "-"), spec) for _, key, spec in columns]
        lines.append([value if isinstance(value, str) else format(value, spec) for value, spec in values])
    first, *others = (max(map(len, cells)) for cells in zip(*lines, strict=True))
    return "\n".join("  ".join([line[0].ljust(first), *map(str.rjust, line[1:], others)]).rstrip() for line in lines)


def note_of_cut_batch(measured: Mapping[str, Any]) -> list[str]:
    """What to say where a step has fewer samples than asked for, as there are no more. measured: of `measure`."""
    asked, full = measured["requested_global_batch_size"], measured["global_batch_size"]
    return [f"Steps of {asked} samples were asked for; the training data has {full}."] if full < asked else []


def save_results(path: Path | None, results: Mapping[str, Any]) -> None:
    """Writes the results of a command if there is a file to write them to, and says so. Raises OSError."""
    if path is not None:
        write_json(path, results)
        print(f"Results: {path}")


def write_json(path: Path, results: Mapping[str, Any]) -> None:
    """Makes the folders that the path lacks. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(results, indent=2) + "\n")


def unwritable_targets(tool: Any, is_main: bool = True) -> list[str]:
    """What is wrong with the paths among a tool's flags; one sentence each, with the part that is to blame.

    is_main: this process writes all of them; the others write traces only.
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
    """Raises OSError about the part of the path that is to blame if it cannot be written. Writes nothing.

    kind: "file", or "folder" for one to write files to. Either may lack folders above it.
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
