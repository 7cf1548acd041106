"""What has become of a run, for scripts: `state.json` in its directory.

Launchers such as torchrun exit alike after a stop with everything saved, a mistake of the user and a crash; this file
tells them apart.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Literal

from trainer.checkpoint.directory import RunDirectory
from trainer.loading.errors import BadInput
from trainer.loop.memory_limit import MEMORY
from trainer.loop.run import Run
from trainer.parallel.base import Parallel
from trainer.parallel.errors import Failure

STATE = "state.json"

State = Literal["running", "finished", "preempted", "refused", "failed"]


class RunState:
    """Writes the state of the run in a directory that is held. All processes call `running`, `finished`, `preempted`.

    These raise BadInput when the disk refuses.
    """

    def __init__(self, directory: RunDirectory, parallel: Parallel) -> None:
        self._directory = directory
        self._parallel = parallel
        self._run: Run | None = None

    def running(self, run: Run) -> None:
        """From the moment on at which a request to stop saves everything."""
        self._run = run
        self._parallel.on_main(lambda: self._write("running"))

    def finished(self, run: Run) -> None:
        """When results.json is there. Does not touch a file that says so already."""
        self._run = run
        self._parallel.on_main(lambda: None if self._says("finished") else self._write("finished"))

    def preempted(self) -> None:
        """When the run was asked to stop and everything is saved."""
        self._parallel.on_main(lambda: self._write("preempted"))

    def ended_badly(self, state: Literal["refused", "failed"], message: str | None = None) -> None:
        """As far as the disk allows, so that the reason is not hidden; nothing where there is no run to speak of."""
        if self._parallel.is_main and (self._run is not None or self._directory.holds_run):
            with suppress(BadInput):
                self._write(state, message)

    def failed(self, failure: Failure) -> None:
        """The same by a failure; with what the next start has to know."""
        self.ended_badly("failed", str(failure) or None)
        if self._parallel.is_main and failure.memory_limit is not None:
            with suppress(BadInput):
                self._directory.write_json(MEMORY, dict(failure.memory_limit))

    def stuck(self, failure: Failure) -> None:
        """The same, called by another thread than the one that trains; what is being saved is to be complete."""
        if self._run is not None and self._run.saver is not None:
            self._run.saver.end()
        self.failed(failure)

    def _says(self, state: State) -> bool:
        return self._directory.read_json(STATE).get("state") == state

    def _write(self, state: State, message: str | None = None) -> None:
        run = self._run
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
    parallel.diagnosis.before_forced_end(state.stuck)
    try:
        with parallel.diagnosis.explaining():
            yield state
    except BadInput as error:
        state.ended_badly("refused", str(error))
        raise
    except KeyboardInterrupt:
        raise  # before training began: nothing has changed
    except Failure as failure:
        state.failed(failure)
        raise
    except BaseException:  # SystemExit: the second Ctrl-C, which does not wait for a save
        state.ended_badly("failed")
        raise
