"""What a forked process does before its command line: make a mistake part of the program, watch its disk."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.faults import mutants
from tests.faults.disk import KillPoint, record_disk


@dataclass(frozen=True)
class Prepared:
    """A `tests.helpers.forks.Preparation`.

    mutant: a function of `tests.faults.mutants`, by name. watched: the run directory whose operations are recorded into
    the file `trace`, or up to the one before which the process kills itself.
    """

    mutant: str | None = None
    watched: Path | None = None
    trace: Path | None = None
    kill_at: KillPoint | None = None

    def __call__(self) -> Callable[[], None]:
        finish = record_disk(self.watched, self.trace, self.kill_at) if self.watched is not None else lambda: None
        if self.mutant is not None:
            getattr(mutants, self.mutant)()
        return finish
