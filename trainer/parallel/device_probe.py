"""Tells a host that waits for a device at work from one whose device waits for ever, as in an exchange between GPUs."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from trainer.parallel.activity import CurrentActivity


class DeviceProbe:
    """Asks whether the device comes to the end of what it has been given.

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
        """The seconds that the activity lasts, if they are more than the patience, for half of which the device has not
        answered; otherwise 0. To be called every few seconds."""
        now = time.monotonic()
        lasts_s = now - self._activity.since
        if lasts_s < patience_s / 2:
            return 0.0
        if self._thread is None or not self._thread.is_alive():
            self._asked = now
            self._thread = threading.Thread(target=self._ask, name="device probe", daemon=True)
            self._thread.start()
        return lasts_s if lasts_s > patience_s and now - self._asked > patience_s / 2 else 0.0

    def _ask(self) -> None:
        with suppress(RuntimeError):  # of a device that has failed: the training thread will hear of it
            self._await_device()


def await_gpu(device: torch.device) -> None:
    """Returns when the GPU has done what its default stream has been given, without keeping a core busy meanwhile."""
    with torch.cuda.device(device):
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.default_stream(device))
        event.synchronize()
