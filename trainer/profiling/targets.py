"""Whether results can be written where they are to go: asked before a measurement, which may take long."""

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def unusable_targets(tool: Any, writes_results: bool = True) -> list[str]:
    """What is wrong with the paths among a tool's flags; one sentence each. Changes nothing on the disk.

    writes_results: this process writes --json and --board, as the main process does; all of them write traces.
    """
    targets: list[tuple[str, Callable[[Path], None], str]] = [("trace", probe_folder, "folder")]
    if writes_results:
        targets += [("json", probe_file, "file"), ("board", probe_folder, "folder")]
    found = []
    for name, probe, kind in targets:
        path = getattr(tool, name, None)
        if path is None:
            continue
        try:
            probe(path)
        except OSError as error:
            found.append(unusable(f"--{name} {path}", error, kind))
    return found


def unusable(target: str, error: OSError, kind: str) -> str:
    """One sentence about a target that cannot be written, as "--json a/b", with the part of the path that is to blame.

    kind: what to choose another of: "file" or "folder".
    """
    blamed = f"{error.filename}: " if error.filename and not target.endswith(f" {error.filename}") else ""
    return f"{target}: {blamed}{error.strerror}; choose another {kind}"


def probe_file(path: Path) -> None:
    """Raises OSError about the part of the path that is to blame if no file can be written there."""
    if path.is_dir():
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    probe_folder(path.parent)


def probe_folder(folder: Path) -> None:
    """Raises OSError about the part of the path that is to blame if the folder cannot be made or written to."""
    existing = next(part for part in (folder, *folder.parents) if os.path.lexists(part))
    if not existing.is_dir():
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(existing))
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(existing)) from None
