"""What has become of a run, for scripts: `state.json` in its directory.

Launchers such as torchrun exit alike after a stop with everything saved, a mistake of the user and a crash; this file
tells them apart.
"""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, get_args

from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.manifest import CONFIG, read_json
from trainer.common.errors import UserError
from trainer.loop.memory import MEMORY
from trainer.loop.rescue import rescue
from trainer.loop.run import Run
from trainer.parallel.base import Parallel
from trainer.parallel.errors import EXIT_BAD_INPUT, EXIT_FINISHED, EXIT_INTERRUPTED, Failure

STATE = "state.json"

State = Literal["running", "finished", "preempted", "paused", "refused", "failed"]


def read_state(folder: Path) -> State | None:
    """What state.json of a run directory says; None where there is none, or a damaged one."""
    state = read_json(folder / STATE).get("state")
    return state if state in get_args(State) else None


class RunState:
    """Writes the state of the run in a directory that is held."""

    def __init__(self, directory: RunDirectory, parallel: Parallel) -> None:
        self._directory = directory
        self._parallel = parallel
        self._run: Run | None = None

    def enter(self, state: State, run: Run, message: str | None = None) -> None:
        """All processes call it. A file that says "finished" already stays. Raises UserError when the disk refuses."""
        self._run = run
        self._parallel.on_main(lambda: self._write(state, message))

    def record_failure(self, error: BaseException) -> None:
        """As far as the disk allows, so that the reason is not hidden; nothing where there is no run to speak of.

        After a failure with what may be left of the last steps.
        """
        status = (
            EXIT_BAD_INPUT if isinstance(error, UserError) else error.status if isinstance(error, Failure) else None
        )
        state: State = "refused" if status == EXIT_BAD_INPUT else "failed"
        is_stop = status == EXIT_INTERRUPTED
        run, parallel = self._run, self._parallel
        if run is not None and isinstance(error, UserError | Failure):
            if isinstance(error, Failure) and is_stop and parallel.has_full_state and not parallel.exits_with_signal:
                error.status = EXIT_FINISHED
            rescue(run, error)
        if not self._directory.is_held:
            return
        if is_stop and self._run is not None and self._is_saved(self._run):
            state, self._run.stop.signal_number = "preempted", signal.SIGINT
        path = self._directory.path
        # Of whatever else ends it, such as the second Ctrl-C, there is nothing to tell.
        message = str(error) or None if isinstance(error, UserError | Failure) and state != "preempted" else None
        with suppress(UserError):
            if self._run is not None or self._directory.has_checkpoint or (path / CONFIG).exists():
                self._write(state, message)
        with suppress(UserError):
            if isinstance(error, Failure) and error.memory_limit is not None:
                self._directory.write_json(MEMORY, dict(error.memory_limit))

    def fail(self, failure: Failure) -> None:
        """Another process failed, and this one is stuck. Called by another thread than the one that trains."""
        if self._run is not None:
            self._run.saver.end()  # what is being saved is to be complete
        self.record_failure(failure)

    def _is_saved(self, run: Run) -> bool:
        """Whether the newest checkpoint is of the last step."""
        entries = self._directory.entries
        return (entries[-1].step if entries else 0) >= run.progress.step

    def _write(self, state: State, message: str | None = None) -> None:
        run, path = self._run, self._directory.path / STATE
        if run is not None:
            run.log.state = state
        if state == "finished" == read_state(path.parent):
            return
        self._directory.write_json(
            STATE,
            {
                "state": state,
                "epoch": run.progress.position.epoch if run is not None else None,
                "step": run.progress.step if run is not None else None,
                "signal": run.stop.signal_number if run is not None else None,
                "message": message,
                "host": socket.gethostname(),
                "process": os.getpid(),
                "time": datetime.now(UTC).isoformat(timespec="seconds"),
            },
        )


@contextmanager
def recorded(directory: RunDirectory, parallel: Parallel) -> Iterator[RunState]:
    """Around all that happens while a directory is held: notes whatever ends it by an exception."""
    state = RunState(directory, parallel)
    parallel.diagnosis.before_forced_end(state.fail)
    try:
        with parallel.diagnosis.explaining():
            yield state
    except KeyboardInterrupt:
        raise  # before training began: nothing has changed
    except BaseException as error:  # the second Ctrl-C too, which does not wait for a save
        state.record_failure(error)
        raise
