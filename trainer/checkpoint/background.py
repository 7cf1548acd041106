"""Saving off the critical path: a thread of its own writes what the training thread has copied."""

import threading
from typing import Any

from trainer.checkpoint.directory import NoRoom, RunDirectory
from trainer.checkpoint.snapshot import snapshot

THREAD_NAME = "save"


class BackgroundSaver:
    """Copies states, and writes them into a run directory one at a time. Used on the main process, by its main thread.

    A copy for which there is no room is kept in memory until the next one comes, one of the best weights until it
    could be written or better ones came. So a checkpoint on the disk never speaks of a best one that is not there. (The
    next best ones, `--keep-best`, are kept where they are on the disk; memory is not for them.)
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._thread: threading.Thread | None = None
        self._unsaved: list[dict[str, Any]] = []
        """Copies, oldest first, which nobody changes any more."""
        self._reusable: dict[str, Any] | None = None
        """The state written last, whose memory is free for the next copy."""
        self._error: BaseException | None = None
        self._no_room: NoRoom | None = None

    def start(self, state: dict[str, Any]) -> None:
        """Copies the state, begins to write it, and returns. Call `wait` first."""
        assert self._thread is None
        copy = snapshot(state, self._reusable)
        self._reusable = None
        self._unsaved = [old for old in self._unsaved if old["is_best"] and not copy["is_best"]] + [copy]
        # Not a daemon: an interpreter that ends waits for the write, as for any other file.
        self._thread = threading.Thread(target=self._write_in_thread, name=THREAD_NAME)
        self._thread.start()

    def wait(self) -> None:
        """Returns when no write is under way. Raises what kept it from being done, unless it was a lack of room."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def finish(self) -> None:
        """Returns when everything is on the disk. Raises UserError when it cannot be, for lack of room too."""
        self.wait()
        self._no_room = None
        self._write()

    def end(self) -> str | None:
        """Ends a write under way, however the run ended. Returns what is to be said of one that failed."""
        try:
            self.wait()
        except Exception as error:
            return str(error)
        return self._no_room.problem if self._no_room is not None else None

    def take_refusal(self) -> str | None:
        """Once after every write for which there was no room: what to tell the user."""
        no_room, self._no_room = self._no_room, None
        return f"{no_room.problem}; training goes on and tries again at the next save" if no_room else None

    def _write_in_thread(self) -> None:
        try:
            self._write()
        except NoRoom as no_room:
            self._no_room = no_room
        except BaseException as error:  # whatever it is belongs to the thread that waits
            self._error = error

    def _write(self) -> None:
        while self._unsaved:
            self._directory.save(self._unsaved[0])
            self._reusable = self._unsaved.pop(0)
