"""What this process is called, among those of other machines too."""

import os
import socket
from pathlib import Path


def own_name() -> str:
    """For messages: its id, and its host."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def boot_of_kernel() -> str:
    """The same for all containers of a machine, and another one when it starts again; the host where none is told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
