"""Locks a run directory for one process, including on file systems that several machines share.

On one machine, the holder is the process that has the kernel's lock on the file `lock.held`. The kernel releases this
lock when the process ends. Some network file systems do not share kernel locks between machines, or have none. The file
`lock` therefore names the holder, which renews the file's timestamp. A process that finds the `lock` of another machine
or of a holder without a kernel lock takes it over if the timestamp does not change for `STALE_S` seconds. If two do so
at once, the last to write `lock` wins: each reads it again after `SETTLE_S` seconds (Fischer's algorithm).

A suspended old holder may wake up later, and must then not write to the folder (fencing). A holder writes files under
temporary names that contain its token, and reads `lock` again before it renames a file. A new holder writes its name
into `lock`, and then renames or deletes all temporary files. An old holder that was suspended between reading and
renaming therefore finds no file to rename. A holder also reads `lock` before it deletes a file. If it is suspended
between the two, it may still delete this file.
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
from typing import IO, Literal

from trainer.common.errors import UserError
from trainer.common.files import MOST_RECORD, flush_path, has_locked, read_whole, require_regular, written_as_a_whole
from trainer.common.process import boot_of_kernel, own_name

LOCK, KERNEL_LOCK = "lock", "lock.held"

RENEW_S = 5.0
STALE_S = 60.0
"""Seconds without renewal after which a lock is taken over."""
SETTLE_S = 1.0
"""Seconds after which all processes have seen who wrote `lock` last."""
_LOOK_S = 0.2

KernelLock = Literal["taken", "in use", "not supported"]


@dataclass(frozen=True)
class Holder:
    """Content of the file `lock`. who: process and host. token: unique identifier.

    machine: result of `_machine`, or the token if the holder has no kernel lock that would show whether it is alive.
    """

    who: str
    machine: str = ""
    token: str = ""

    def __str__(self) -> str:
        return f"{self.who}\nmachine {self.machine}\ntoken {self.token}\n"


class LockTaken(UserError):
    """Raised if another process has taken over the directory, so this process must not write to it."""


class Lock:
    """Lock on a folder, held by this process; its methods rename and delete files in the folder."""

    def __init__(self, folder: Path, file: IO[str], holder: Holder) -> None:
        self._path = folder / LOCK
        self._file = file
        self.holder = holder
        self._released = threading.Event()
        self.is_lost = False
        """Whether `require` has found that another process took over."""

    def begin(self) -> None:
        """Names this process as the holder in `lock`, and starts a thread that renews the file's timestamp."""
        temporary = self.temporary(self._path)
        temporary.write_text(str(self.holder), encoding="utf-8")
        temporary.rename(self._path)
        threading.Thread(target=self._renew, name="lock", daemon=True).start()

    def temporary(self, path: Path) -> Path:
        """Returns the temporary name under which a file is written."""
        return path.with_suffix(f".{self.holder.token}.tmp")

    def rename(self, temporary: Path, path: Path) -> None:
        """Gives a complete file its final name. Raises OSError or LockTaken."""
        self.require()
        try:
            temporary.rename(path)
        except FileNotFoundError:  # deleted by the process that took over
            self.require()
            raise

    def require(self) -> None:
        """Raises LockTaken if another process took over, or OSError if `lock` cannot be read."""
        holder = _read(self._path)
        if holder.token != self.holder.token:
            self._path.parent.stat()  # raises FileNotFoundError if the folder was deleted
            self.is_lost = True
            raise LockTaken(
                f"--save-dir {self._path.parent}: {holder.who or 'another process'} took over this folder, because "
                "this process did not respond or the job restarted; this process stops, and the checkpoints are intact"
            )

    def delete(self, path: Path) -> None:
        """Deletes a file if it exists. Raises OSError or LockTaken."""
        self.require()
        path.unlink(missing_ok=True)

    def replace_text(self, path: Path, text: str) -> None:
        """Replaces a file atomically and durably. Raises OSError or LockTaken."""
        with written_as_a_whole(path, self.temporary(path), rename=self.rename) as file:
            file.write(text)
        flush_path(path.parent)

    def release(self) -> None:
        """Releases the kernel's lock, and empties `lock` unless another process took over or the disk fails."""
        self._released.set()
        with (
            suppress(LockTaken, OSError),
            written_as_a_whole(self._path, self.temporary(self._path), rename=self.rename),
        ):
            pass
        _close(self._file)

    def _renew(self) -> None:
        while not self._released.wait(RENEW_S):
            # updates only the timestamp, to keep content that another process may have written
            with suppress(OSError):
                try:
                    self.require()
                except LockTaken:
                    return
                os.utime(self._path)


def take_lock(
    folder: Path, take_over: bool = False, say: Callable[[str], None] = lambda line: None, gone: str | None = None
) -> Lock:
    """Takes a folder's lock until `release` or process exit; may wait for `2 * STALE_S` seconds.

    take_over: whether to skip the wait that shows whether the old holder is alive. say: prints a line before the wait.
    gone: token of a holder that has exited.

    Raises UserError if another process holds the lock, or OSError on file system errors.
    """
    with ExitStack() as unless_taken:
        if (folder / KERNEL_LOCK).exists():
            require_regular(folder / KERNEL_LOCK)  # opening a named pipe would block forever
        file = (folder / KERNEL_LOCK).open("a")
        unless_taken.callback(_close, file)
        left_by, machine, token = _read(folder / LOCK), _machine(folder), secrets.token_hex(4)
        kernel_lock = _kernel_lock(file)
        is_here = left_by.machine == machine and kernel_lock != "not supported"
        may_be_alive = not (is_here or left_by.who == "" or left_by.token == gone != "")
        if kernel_lock == "in use" and not may_be_alive:  # the kernel knows best
            raise _in_use(folder, left_by)
        waits = may_be_alive and (kernel_lock == "in use" or not take_over)
        if waits:
            most_s = 2 * STALE_S if kernel_lock == "in use" else STALE_S
            say(
                f"{folder}: locked by {left_by.who}, which may have died; waiting up to {most_s:.0f} s to see whether "
                "it is alive."
            )
            kernel_lock = _await_end(folder, file, left_by, 0 if take_over else STALE_S)
        lock = Lock(folder, file, Holder(own_name(), machine if kernel_lock == "taken" else token, token))
        lock.begin()
        if waits or kernel_lock == "not supported":
            time.sleep(SETTLE_S)
            if (now := _read(folder / LOCK)).token != token:
                raise _in_use(folder, now)
        unless_taken.pop_all()
    return lock


def _close(file: IO[str]) -> None:
    with suppress(OSError):  # network file systems may fail to close, which must not hide an earlier error
        file.close()


def _in_use(folder: Path, holder: Holder) -> UserError:
    who = holder.who or "another process"
    return UserError(f"--save-dir {folder}: in use by {who}; wait until it ends, or choose another folder")


def _kernel_lock(file: IO[str]) -> KernelLock:
    try:
        return "taken" if has_locked(fcntl.lockf, file, fcntl.LOCK_EX | fcntl.LOCK_NB) else "not supported"
    except BlockingIOError:
        return "in use"


def _await_end(folder: Path, file: IO[str], left_by: Holder, least_s: float) -> KernelLock:
    """Waits until the holder releases the lock, or does not renew it for `least_s`; raises UserError if it is alive.

    A file server keeps the kernel lock of a machine that has died for some time (NFS 4: 90 s by default).
    """
    path, began = folder / LOCK, time.monotonic()
    first = _stamp(path)
    while True:
        waited_s, kernel_lock = time.monotonic() - began, _kernel_lock(file)
        is_released = _stamp(path) != first
        if is_released and (now := _read(path)).who != "":
            raise _in_use(folder, now)
        if kernel_lock != "in use" and (is_released or waited_s > least_s):
            return kernel_lock
        if waited_s > 2 * STALE_S:
            raise _in_use(folder, left_by)
        time.sleep(_LOOK_S)


def _stamp(path: Path) -> tuple[int, int]:
    with path.open() as file:  # network file systems refresh metadata on open
        status = os.fstat(file.fileno())
    return status.st_ino, status.st_mtime_ns


def _read(path: Path) -> Holder:
    """Reads a lock file; `Holder("")` if it is empty, invalid or missing. Raises OSError if the file cannot be read."""
    try:
        who, *lines = read_whole(path, MOST_RECORD).decode(errors="replace").splitlines() or [""]
    except FileNotFoundError:
        return Holder("")
    said = dict(line.split(" ", 1) for line in lines if " " in line)
    if not re.fullmatch(r"process \d+ on \S+", who):
        return Holder("")
    # A truncated file does not name the machine. If it names this host, the holder is assumed to have run here, so
    # that no process waits for a dead holder.
    machine = said.get("machine") or (_machine(path.parent) if who.endswith(f" on {socket.gethostname()}") else "")
    return Holder(who, machine, said.get("token", ""))


def _machine(folder: Path) -> str:
    """Returns a string that identifies this machine's current boot and the folder's file system."""
    return f"{boot_of_kernel()}:{folder.stat().st_dev}"
