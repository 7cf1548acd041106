"""Who uses a run directory: one process at a time, also on a file system that several machines share.

On one machine the kernel's lock on `lock.held` decides, which ends with the process, however it dies. Some network file
systems do not carry it to other machines. There `lock` counts: it names the holder, who renews its time. Where the
kernel cannot tell, it is watched for `STALE_S`, by the watcher's own clock, and taken over if nobody renews it.

A holder that was frozen for so long may still go on, and must not write beside the new one (fencing). All that it
writes has a temporary name of its own until it is complete, and it reads `lock` again before it renames that. The new
holder writes its name into `lock` first and deletes the temporary files of others after that: an old one that was
frozen between reading and renaming finds nothing to rename. It reads `lock` again before it deletes a file, too: one
that was frozen just then deletes at most that one file, which it did not need any more as the holder.
"""

import fcntl
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from trainer.common.errors import UserError
from trainer.common.files import MOST_RECORD, flush_path, read_whole, require_regular, written_as_a_whole
from trainer.common.process import boot_of_kernel, own_name

LOCK, KERNEL_LOCK = "lock", "lock.held"

RENEW_S = 5.0
STALE_S = 60.0
"""A lock that nobody has renewed for so long is taken over."""
_LOOK_S = 0.2


@dataclass(frozen=True)
class Holder:
    """What `lock` says. machine: within which the kernel's locks are seen by all. token: like no other."""

    who: str
    machine: str = ""
    token: str = ""

    def __str__(self) -> str:
        return f"{self.who}\nmachine {self.machine}\ntoken {self.token}\n"


class Writer:
    """Gives files of a folder their names when they are complete, and deletes them.

    This one is for a folder that nobody else uses.
    """

    def temporary(self, path: Path) -> Path:
        """The name of a file until it is complete."""
        return path.with_suffix(".tmp")

    def rename(self, temporary: Path, path: Path) -> None:
        """Gives it its name. Raises OSError."""
        temporary.rename(path)

    def require(self) -> None:
        """Raises OSError, or LockTaken, when this process must not change the folder any more."""

    def delete(self, path: Path) -> None:
        self.require()
        path.unlink(missing_ok=True)

    def replace_text(self, path: Path, text: str) -> None:
        """Replaces a file as a whole, durably. Raises OSError."""
        with written_as_a_whole(path, self.temporary(path), rename=self.rename) as file:
            file.write(text)
        flush_path(path.parent)


class LockTaken(UserError):
    """Another process has taken the directory over: this one must not write to it any more."""


class Lock(Writer):
    """A folder's lock while this process holds it."""

    def __init__(self, folder: Path, file: IO[str], holder: Holder) -> None:
        self._path = folder / LOCK
        self._file = file
        self._holder = holder
        self._released = threading.Event()
        self.is_lost = False
        """Whether another process was found to have taken it over."""

    def begin(self) -> None:
        """Writes the holder's name, and renews it from now on."""
        temporary = self.temporary(self._path)
        temporary.write_text(str(self._holder), encoding="utf-8")
        temporary.rename(self._path)
        threading.Thread(target=self._renew, name="lock", daemon=True).start()

    def temporary(self, path: Path) -> Path:
        return path.with_suffix(f".{self._holder.token}.tmp")

    def rename(self, temporary: Path, path: Path) -> None:
        """Raises LockTaken too."""
        self.require()
        try:
            temporary.rename(path)
        except FileNotFoundError:  # whoever has taken over deletes it
            self.require()
            raise

    def require(self) -> None:
        """Raises LockTaken when another process has taken it over, OSError when that cannot be told."""
        holder = _read(self._path)
        if holder.token != self._holder.token:
            self._path.parent.stat()  # a folder that is gone was taken by nobody
            self.is_lost = True
            raise LockTaken(
                f"--save-dir {self._path.parent}: was taken over by {holder.who or 'another process'} while this one "
                "gave no sign of life, or by a restart of the same job; this run ends, and what it has saved is "
                "intact"
            )

    def release(self) -> None:
        """Empties the file, unless it is another's by now or the disk refuses, and lets go of it."""
        self._released.set()
        with (
            suppress(LockTaken, OSError),
            written_as_a_whole(self._path, self.temporary(self._path), rename=self.rename),
        ):
            pass
        _close(self._file)

    def _renew(self) -> None:
        while not self._released.wait(RENEW_S):
            # By its time alone: what another one has written meanwhile is not touched.
            with suppress(OSError):
                try:
                    self.require()
                except LockTaken:
                    return
                os.utime(self._path)


def take_lock(folder: Path, take_over: bool = False, say: Callable[[str], None] = lambda line: None) -> Lock:
    """The lock, for the life of this process or until it is released. May wait for `STALE_S`.

    take_over: without waiting, from a holder that does not demonstrably live. say: gets a line before it waits.

    Raises UserError when another process has it, OSError when the file system refuses.
    """
    with ExitStack() as unless_taken:
        if (folder / KERNEL_LOCK).exists():
            require_regular(folder / KERNEL_LOCK)  # opening a pipe would wait without end
        file = (folder / KERNEL_LOCK).open("a")
        unless_taken.callback(_close, file)
        left_by = _read(folder / LOCK)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(folder, left_by) from None
        own = Holder(own_name(), _machine(folder), secrets.token_hex(4))
        is_known_to_be_gone = left_by.who == "" or left_by.machine == own.machine
        if not (take_over or is_known_to_be_gone):
            say(
                f"{folder}: in use by {left_by.who}, or left by it when it died; waiting for {STALE_S:.0f} s whether "
                "it gives a sign of life."
            )
            if _is_renewed(folder / LOCK):
                raise _in_use(folder, left_by)
        lock = Lock(folder, file, own)
        lock.begin()
        unless_taken.pop_all()
    return lock


def _close(file: IO[str]) -> None:
    with suppress(OSError):  # of a network file system; it must not hide why the file is closed
        file.close()


def _in_use(folder: Path, holder: Holder) -> UserError:
    who = holder.who or "another process"
    return UserError(f"--save-dir {folder}: in use by {who}; wait for it or choose another folder")


def _is_renewed(path: Path) -> bool:
    first, until = _stamp(path), time.monotonic() + STALE_S
    while time.monotonic() < until:
        time.sleep(_LOOK_S)
        if _stamp(path) != first:
            return _read(path).who != ""  # it may have been released
    return False


def _stamp(path: Path) -> tuple[int, int]:
    with path.open() as file:  # a network file system looks again when a file is opened
        status = os.fstat(file.fileno())
    return status.st_ino, status.st_mtime_ns


def _read(path: Path) -> Holder:
    """Nobody, where it is empty, or holds anything else. Raises OSError, but not where there is none."""
    try:
        who, *lines = read_whole(path, MOST_RECORD).decode(errors="replace").splitlines() or [""]
    except FileNotFoundError:
        return Holder("")
    said = dict(line.split(" ", 1) for line in lines if " " in line)
    if not re.fullmatch(r"process \d+ on \S+", who):
        return Holder("")
    # One that was cut short says no more: the host stands for the machine, so that nobody waits for a dead process.
    machine = said.get("machine") or (_machine(path.parent) if who.endswith(f" on {socket.gethostname()}") else "")
    return Holder(who, machine, said.get("token", ""))


def _machine(folder: Path) -> str:
    """This boot of the kernel, and the file system as it is mounted here; the host where the system does not tell."""
    return f"{boot_of_kernel()}:{folder.stat().st_dev}"
