"""Records the file operations of a run, kills the run at any of them, and simulates a power loss after any of them.

Killing a process does not reveal a missing fsync, because the operating system keeps what the process wrote. A power
loss is therefore simulated by a model of a disk, which keeps what was synced and an arbitrary part of the rest.
"""

import io
import os
import pickle
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.helpers.temporary_names import name_of
from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.lock import KERNEL_LOCK, LOCK

LOGS = ("train.log", "val.log", "metrics.jsonl")


class Operation(NamedTuple):
    """File operation, or the end of a save.

    kind: open, write, truncate, fsync, rename, link, unlink, sync directory, or saved. name: file name. detail: mode,
    written content, size, new name, or saved optimizer step.
    """

    kind: str
    name: str
    detail: Any = None


class KillPoint(NamedTuple):
    """Kill before an operation, which is the `repeat`-th (from 0) of its kind and name.

    half_way: kill after half of a write. error: number of an OSError that the operation raises instead of the kill.
    """

    kind: str
    name: str
    repeat: int
    half_way: bool = False
    error: int = 0


class DiskRecorder:
    """Wraps functions of `os` and `io` in this process to record operations on the files of one folder."""

    def __init__(self, folder: Path, kill_at: KillPoint | None) -> None:
        self.operations: list[Operation] = []
        self._folder = folder.resolve()
        self._kill_at = kill_at
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.RLock()
        self._open = io.open
        self._fsync = os.fsync
        io.open = self._traced_open  # type: ignore[assignment]
        os.fsync = self._traced_fsync
        for name in ("rename", "replace", "link"):
            setattr(os, name, partial(self._traced_pair, getattr(os, name), "link" if name == "link" else "rename"))
        os.unlink = partial(self._traced_unlink, os.unlink)
        save = RunDirectory.save

        def traced_save(directory: RunDirectory, state: dict[str, Any], *args: Any, **kwargs: Any) -> Path:
            path = save(directory, state, *args, **kwargs)
            self.happens(Operation("saved", path.name, state["step"]), lambda: None)
            return path

        RunDirectory.save = traced_save  # type: ignore[method-assign]

    def happens(self, operation: Operation, action: Callable[[], Any], half: Callable[[], Any] | None = None) -> Any:
        with self._lock:
            key = operation.kind, operation.name
            repeat = self._counts[key]
            self._counts[key] += 1
            kill_at = self._kill_at
            if kill_at is not None and (*key, repeat) == kill_at[:3]:
                if half is not None and kill_at.half_way:
                    half()
                if kill_at.error:
                    raise OSError(kill_at.error, os.strerror(kill_at.error))
                os.kill(os.getpid(), signal.SIGKILL)
            self.operations.append(operation)
            return action()

    def _watches(self, path: Any) -> bool:
        if isinstance(path, int):
            return False
        path = Path(os.fsdecode(path))
        return path.parent.resolve() == self._folder and name_of(path) not in (LOCK, KERNEL_LOCK, f"{LOCK}.tmp")

    def _traced_open(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        **rest: Any,
    ) -> Any:
        if mode.strip("bt") not in ("w", "a") or not self._watches(file):
            return self._open(file, mode, buffering, encoding, errors, newline, **rest)
        buffered = io.BufferedWriter(_RecordedFile(self, name_of(file), file, mode.strip("bt")))
        if "b" in mode:
            return buffered
        return io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)

    def _traced_fsync(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path == self._folder:
            self.happens(Operation("sync directory", "."), lambda: self._fsync(descriptor))
        elif self._watches(path):
            self.happens(Operation("fsync", name_of(path)), lambda: self._fsync(descriptor))
        else:
            self._fsync(descriptor)

    def _traced_pair(self, real: Callable[..., None], kind: str, source: Any, target: Any, **kwargs: Any) -> None:
        if name_of(source) != name_of(target) and self._watches(source) and self._watches(target):
            operation = Operation(kind, name_of(source), name_of(target))
            self.happens(operation, lambda: real(source, target, **kwargs))
        else:
            real(source, target, **kwargs)

    def _traced_unlink(self, real: Callable[..., None], path: Any, **kwargs: Any) -> None:
        if not kwargs and self._watches(path) and os.path.lexists(path):
            self.happens(Operation("unlink", name_of(path)), lambda: real(path))
        else:
            real(path, **kwargs)


class _RecordedFile(io.FileIO):
    def __init__(self, recorder: DiskRecorder, name: str, path: Any, mode: str) -> None:
        self._recorder = recorder
        self._name = name
        recorder.happens(Operation("open", name, mode), lambda: super(_RecordedFile, self).__init__(path, mode))

    def write(self, data: Any) -> int:
        content = bytes(data)
        write = super().write
        operation = Operation("write", self._name, content)
        return self._recorder.happens(operation, lambda: write(content), lambda: write(content[: len(content) // 2]))

    def truncate(self, size: int | None = None) -> int:
        truncate = super().truncate
        return self._recorder.happens(Operation("truncate", self._name, size), lambda: truncate(size))


def record_disk(folder: Path, trace: Path | None, kill_at: KillPoint | None = None) -> Callable[[], None]:
    """Starts a `DiskRecorder`; returns a function that writes the recorded operations to `trace`."""
    recorder = DiskRecorder(folder, kill_at)
    return lambda: trace.write_bytes(pickle.dumps(recorder.operations)) and None if trace else None


def read_trace(trace: Path) -> list[Operation]:
    return pickle.loads(trace.read_bytes())


def kill_points(operations: Sequence[Operation]) -> list[KillPoint]:
    """Returns a kill point before every operation and half-way through every write, except on logs."""
    counts: Counter[tuple[str, str]] = Counter()
    points = []
    for kind, name, _ in operations:
        if name not in LOGS:
            points.append(KillPoint(kind, name, counts[kind, name]))
            if kind == "write":
                points.append(KillPoint(kind, name, counts[kind, name], half_way=True))
        counts[kind, name] += 1
    return points


# --- loss of power -----------------------------------------------------------------------------------------------


@dataclass
class Content:
    """Content of a file. data: what the process sees. durable: what was last synced, or None."""

    data: bytes = b""
    durable: bytes | None = None


@dataclass
class Disk:
    """Folder on a disk. names: what the process sees. durable: names at the last sync. since: later name changes."""

    names: dict[str, Content] = field(default_factory=dict)
    durable: dict[str, Content] = field(default_factory=dict)
    since: list[tuple[str, str, Any]] = field(default_factory=list)

    def apply(self, operation: Operation) -> None:
        kind, name, detail = operation
        if kind == "open":
            if name not in self.names:
                self._rename("create", name, Content())
            elif "w" in detail:
                self.names[name].data = b""
        elif kind == "write":
            self.names[name].data += detail
        elif kind == "truncate":
            self.names[name].data = self.names[name].data[:detail]
        elif kind == "fsync":
            self.names[name].durable = self.names[name].data
        elif kind == "sync directory":
            self.durable, self.since = dict(self.names), []
        elif kind in ("rename", "link", "unlink"):
            self._rename(kind, name, detail)

    def _rename(self, kind: str, name: str, detail: Any) -> None:
        self.since.append((kind, name, detail))
        _change(self.names, kind, name, detail)

    def after_power_loss(self, draw: random.Random) -> dict[str, bytes]:
        """Returns a random state that the power loss may leave: file name -> content."""
        names = dict(self.durable)
        survivors = draw.choice(["none", "the first", "any", "all"])
        count = draw.randrange(len(self.since) + 1)
        for i, change in enumerate(self.since):
            if (
                survivors == "all"
                or (survivors == "the first" and i < count)
                or (survivors == "any" and draw.random() < 0.5)
            ):
                _change(names, *change)
        contents = {id(content): _what_is_left(content, draw) for content in names.values()}
        return {name: contents[id(content)] for name, content in names.items()}


def _change(names: dict[str, Content], kind: str, name: str, detail: Any) -> None:
    if kind == "create":
        names[name] = detail
    elif name in names:
        if kind == "link":
            names[detail] = names[name]
        elif kind == "rename":
            names[detail] = names.pop(name)
        else:
            del names[name]


def _what_is_left(content: Content, draw: random.Random) -> bytes:
    if content.data == content.durable:
        return content.data
    durable = content.durable or b""
    # Synced content is lost only if it was overwritten.
    certain = durable if content.data.startswith(durable) else b""
    rest = content.data[len(certain) :]
    half = rest[: draw.randrange(len(rest) + 1)]
    return draw.choice([durable, content.data, certain + half, certain + bytes(len(rest))])


def disk_after(operations: Sequence[Operation], files: Mapping[str, bytes]) -> Disk:
    """Returns the disk after the operations. files: synced contents before the operations."""
    contents = {name: Content(data, data) for name, data in files.items()}
    disk = Disk(dict(contents), dict(contents))
    for operation in operations:
        disk.apply(operation)
    return disk
