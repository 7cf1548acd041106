"""Notices a device that does not come to its end, as in an exchange between GPUs that hangs."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from trainer.parallel.activity import CurrentActivity


class DeviceProbe:
    """Asks whether the device has done what it was given.

    It asks from a thread of its own, which the device may keep for ever, and only once the training thread has been in
    one activity for long: a step has nothing to do with it.

    await_device: returns when the device has done what it has been given until now.
    """

    def __init__(self, activity: CurrentActivity, await_device: Callable[[], None]) -> None:
        self._activity = activity
        self._await_device = await_device
        self._thread: threading.Thread | None = None
        self._asked = 0.0

    def stuck_s(self, patience_s: float) -> float:
        """For how long the device is known to be stuck; to be called every few seconds.

        0 unless the training thread has been in one activity for longer than the patience, in seconds, and the device
        has not answered for half of it.
        """
        now = time.monotonic()
        lasts_s = now - self._activity.since
        if lasts_s < patience_s / 2:
            return 0.0
        if self._thread is None or not self._thread.is_alive():
            self._asked = now
            self._thread = threading.Thread(target=self._ask, name="device probe", daemon=True)
            self._thread.start()
        silent_s = now - self._asked
        return silent_s if lasts_s > patience_s and silent_s > patience_s / 2 else 0.0

    def _ask(self) -> None:
        with suppress(RuntimeError):  # of a device that has failed: the training thread will hear of it
            self._await_device()


def await_gpu(device: torch.device) -> None:
    """Returns when the GPU has done what its default stream has been given, without keeping a core busy meanwhile."""
    with torch.cuda.device(device):
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.default_stream(device))
        event.synchronize()
