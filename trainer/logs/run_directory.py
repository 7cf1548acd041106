"""What of a run's log lies in its directory, as one logger: what the disk refuses is told as such."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from trainer.common.errors import DiskError
from trainer.common.files import DISK_FULL, FOLDER_GONE
from trainer.logs.files import FileLogger
from trainer.logs.logger import LoggedRun, Logger, Record
from trainer.logs.tensorboard import TensorBoardLogger
from trainer.task import Picture


class RunDirectoryLogger(Logger):
    """Every method raises DiskError when the disk refuses, and OSError when it is full, which whoever trains tells."""

    def __init__(self) -> None:
        self._files, self._board = FileLogger(), TensorBoardLogger()

    def start(self, run: LoggedRun) -> None:
        self._directory = run.directory
        with self._refusing():
            self._files.start(run)
            self._board.start(run)

    def say(self, line: str) -> None:
        with self._refusing():
            self._files.say(line)

    def metrics(self, record: Record) -> None:
        with self._refusing():
            self._files.metrics(record)
            self._board.metrics(record)

    def pictures(self, step: int, pictures: Mapping[str, Picture]) -> None:
        with self._refusing():
            self._board.pictures(step, pictures)

    def text(self, name: str, content: str, step: int) -> None:
        """For TensorBoard alone."""
        with self._refusing():
            self._board.text(name, content, step)

    def flush(self) -> None:
        """Hands everything to the operating system, so that a kill loses nothing from before this call."""
        with self._refusing():
            self._board.flush()

    def end(self, state: str) -> None:
        with self._refusing():
            self._files.end(state)
            self._board.end(state)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in DISK_FULL:
                raise
            reason = error.strerror or error if self._directory.is_dir() else FOLDER_GONE
            raise DiskError(
                f"--save-dir {self._directory}: cannot write a log: {reason}; see to the file system and run the same "
                "command again"
            ) from None
