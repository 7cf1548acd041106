"""What the processes compare while training goes on, without a message of their own."""

from collections.abc import Sequence
from typing import Protocol


class Comparison(Protocol):
    """Its numbers go along with those that a step exchanges anyway, and are added up over all processes.

    All of them call the methods at the same step.
    """

    def begin(self) -> None:
        """Before the first step of this process."""

    def after_step(self, step: int) -> None:
        """step: optimizer steps done."""

    def numbers_to_add(self, step: int) -> Sequence[float]:
        """What goes along with the exchange that starts after so many steps; equally many on all processes."""

    def compare(self, sums: Sequence[float]) -> list[str]:
        """sums: of what `numbers_to_add` gave, of each exchange in turn. Returns what the user should read.

        Raises BadInput if the run cannot go on.
        """
