"""What a process is doing: named when it fails, or when others wait for it."""

import time
from collections.abc import Callable

EXCHANGE = "the exchange with the other ranks"


def ignore_border(name: str) -> None:
    """What `CurrentActivity.on_border` is where nobody measures."""


class CurrentActivity:
    """Set by the training thread and read by another one; plain attributes, so that a step hardly notices.

    step: the optimizer step under way, from 1; 0 before the first. name: a noun, such as "forward". since: when it was
    entered, on the monotonic clock. number: activities entered so far; every process of a run enters the same ones in
    turn, so the least number is the one that is late.
    """

    def __init__(self) -> None:
        self.step = 0
        self.name = "start-up"
        self.since = time.monotonic()
        self.number = 0
        self.on_border: Callable[[str], None] = ignore_border
        """Called where one begins, and where within a backward this process begins to wait for others, or ends."""

    def enter(self, name: str) -> None:
        self.name = name
        self.since = time.monotonic()
        self.number += 1
        self.on_border(name)

    def __str__(self) -> str:
        return f"{self.name} at optimizer step {self.step}" if self.step else self.name
