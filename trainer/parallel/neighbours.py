"""The other processes of a run on this machine: whether they live, and their end."""

import os
import select
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress

from trainer.common.process import boot_of_kernel

ABORTS_WITHIN_S = 0.5


def process_space() -> str:
    """Within which a process id names the same process: this boot of the kernel, and its pid namespace."""
    try:
        return f"{boot_of_kernel()}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


class Neighbours:
    """Holds on to processes while they live, so that no other one with the same id is ever taken for them.

    processes: rank -> process id, within this `process_space`. Where the system has no descriptors of processes, as off
    Linux, nothing is known of any.
    """

    def __init__(self, processes: Mapping[int, int]) -> None:
        self._descriptors: dict[int, int] = {}
        for rank, process in processes.items():
            with suppress(OSError, AttributeError):
                self._descriptors[rank] = os.pidfd_open(process)

    def is_gone(self, rank: int) -> bool:
        """Whether it is known to have ended: then it has let go of its locks."""
        return self.await_end(rank, 0.0)

    def await_end(self, rank: int, timeout_s: float) -> bool:
        """Waits until it has ended; False if it is no neighbour, or lives after that time."""
        if rank not in self._descriptors:
            return False
        poll = select.poll()
        poll.register(self._descriptors[rank], select.POLLIN)
        return bool(poll.poll(1000 * timeout_s))

    def end(self, rank: int) -> None:
        """Ends it if it lives, and if this process may; nothing for one that is no neighbour.

        By SIGABRT, at which a stuck one shows where it is; by SIGKILL, which a stopped one obeys too, if that is not
        enough.
        """
        for number in (signal.SIGABRT, signal.SIGKILL):
            if rank in self._descriptors and not self.is_gone(rank):
                with suppress(OSError):
                    signal.pidfd_send_signal(self._descriptors[rank], number)
                self.await_end(rank, ABORTS_WITHIN_S)

    def close(self) -> None:
        """Lets go of them."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
