"""Python imports this at its start, where the folder is on PYTHONPATH: it records which lines of the program run.

LOCKSTEP_LINES: the file to which each new line is added, as "path:number"; every process and thread adds to it.
"""

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = str(Path(__file__).resolve().parents[3])
PROGRAM = tuple(f"{ROOT}/{part}" for part in ("trainer/", "tasks/", "models/", "data/", "profiler.py", "main"))
_missing: dict[CodeType, set[int]] = {}
_unwritten: list[str] = []


def trace(frame: FrameType, event: str, argument: Any) -> Any:
    code = frame.f_code
    if code not in _missing:
        ours = code.co_filename.startswith(PROGRAM)
        _missing[code] = {line for *_, line in code.co_lines() if line} if ours else set()
    if not _missing[code]:
        return None
    note(code, frame.f_lineno)
    return trace_lines


def trace_lines(frame: FrameType, event: str, argument: Any) -> Any:
    if event == "line":
        note(frame.f_code, frame.f_lineno)
    return trace_lines


def note(code: CodeType, line: int) -> None:
    if line in _missing[code]:
        _missing[code].discard(line)
        _unwritten.append(f"{os.path.relpath(code.co_filename, ROOT)}:{line}\n")
        # Opened each time: a process may close what it does not know, and many are killed. Where a test allows no file
        # to grow, or to be opened, the next line tries again: an exception here would end the recording.
        with suppress(OSError), open(os.environ["LOCKSTEP_LINES"], "a") as file:
            file.write("".join(_unwritten))
            file.flush()
            _unwritten.clear()


def pytest_runtest_setup() -> None:
    """As a plugin: begins again. An exception within `trace` ends the recording, such as that of a signal's handler."""
    sys.settrace(trace)


if "LOCKSTEP_LINES" in os.environ:
    threading.settrace(trace)
    sys.settrace(trace)
