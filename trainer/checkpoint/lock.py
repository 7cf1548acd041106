"""Who uses a run directory: one process at a time, which the lock file names."""

import fcntl
import os
import re
import socket
from pathlib import Path
from typing import IO

from trainer.loading.errors import BadInput

LOCK = "lock"


class DirectoryLock:
    """Held for the life of a process; the kernel lets go of it when the process dies, however it dies.

    Some network file systems do not carry locks from host to host. There the name in the file counts: a clean release
    empties it, so a name of another host means a job that runs there, or that died there.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: IO[str] | None = None

    def take(self, take_over: bool) -> None:
        """Raises BadInput when another process has it, OSError when the file system refuses.

        take_over: also when the file names another host, but never from a process that demonstrably holds it.
        """
        file = (self._directory / LOCK).open("a+", errors="replace")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _content(file) or "another process"
            file.close()
            raise BadInput(
                f"--save-dir {self._directory}: in use by {holder}; wait for it or choose another folder"
            ) from None
        except OSError:
            file.close()
            raise
        left_by = _content(file)
        host = re.fullmatch(r"process \d+ on (\S+)", left_by)
        if host is not None and host[1] != socket.gethostname() and not take_over:
            file.close()
            raise BadInput(
                f"--save-dir {self._directory}: in use by {left_by}, or left by it when it died; if that job has "
                "ended, add --take-over-lock, otherwise choose another folder"
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        self._file = file

    @property
    def is_held(self) -> bool:
        """By this object."""
        return self._file is not None

    def release(self) -> None:
        """Empties the file and lets go of it."""
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()
            self._file = None


def _content(file: IO[str]) -> str:
    file.seek(0)
    return file.read(1000).strip()
