"""Preparation of a forked process: adds a mistake to the program, and records or interrupts file operations."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.faults import mutants
from tests.faults.disk import KillPoint, record_disk


@dataclass(frozen=True)
class Prepared:
    """Picklable `tests.helpers.forks.Preparation`.

    mutant: name of a function in `tests.faults.mutants`. watched: run directory whose file operations are recorded in
    the file `trace`. kill_at: operation at which the process is killed or gets an error.
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
