"""Who uses a run directory: one process at a time, which the lock file names.

The kernel lets go of a lock when the process dies, however it dies. Some network file systems do not carry locks from
host to host. There the name in the file counts: a clean release empties it, so a name of another host means a job that
runs there, or that died there.
"""

import fcntl
import os
import re
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from trainer.loading.errors import BadInput

LOCK = "lock"


def take_lock(folder: Path, take_over: bool) -> IO[str]:
    """The locked file, which holds the lock for the life of this process, or until `release_lock`.

    take_over: also when the file names another host, but never from a process that demonstrably holds it.

    Raises BadInput when another process has it, OSError when the file system refuses.
    """
    with ExitStack() as unless_taken:
        file = unless_taken.enter_context((folder / LOCK).open("a+", errors="replace"))
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _content(file) or "another process"
            raise BadInput(f"--save-dir {folder}: in use by {holder}; wait for it or choose another folder") from None
        left_by = _content(file)
        host = re.fullmatch(r"process \d+ on (\S+)", left_by)
        if host is not None and host[1] != socket.gethostname() and not take_over:
            raise BadInput(
                f"--save-dir {folder}: in use by {left_by}, or left by it when it died; if that job has ended, add "
                "--take-over-lock, otherwise choose another folder"
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        unless_taken.pop_all()
    return file


def release_lock(file: IO[str]) -> None:
    """Empties the file and lets go of it."""
    with file:
        file.truncate(0)


def _content(file: IO[str]) -> str:
    file.seek(0)
    return file.read(1000).strip()
