"""Runs in processes of their own, several at a time, which leave nothing behind."""

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from trainer.parallel.signals import STOP_SIGNALS, StopRequest

POLL_INTERVAL_S = 0.5
STDERR_SUFFIX = ".stderr"
STDOUT, STDERR = 1, 2


@dataclass(frozen=True)
class Child:
    """A run that is to have a process. run: picklable; returns an exit status. directory: what messages call it."""

    directory: Path
    run: Callable[[], int]

    @property
    def stderr_path(self) -> Path:
        """Beside its directory, which a run may still refuse to make or move the contents of."""
        return self.directory.with_name(self.directory.name + STDERR_SUFFIX)


@dataclass(frozen=True)
class Failure:
    """A run that ended otherwise than well. status: as a shell counts, 128 + n for signal n."""

    child: Child
    status: int

    def message(self) -> str:
        """What the run had to say, under its name."""
        path = self.child.stderr_path
        said = path.read_text(errors="replace").splitlines() if path.exists() else []
        name, mark = self.child.directory, "error: "
        errors = [f"{mark}{name}: {line.removeprefix(mark)}" for line in said if line.startswith(mark)]
        if errors:
            return "\n".join(errors)
        how = f"ended with status {self.status}"
        if self.status > 128:
            how = f"was stopped by signal {self.status - 128}; the same command goes on from its last checkpoint"
        return "\n".join([f"{mark}{name}: {how}", *said])


def run_children(
    children: Sequence[Child],
    slots: Sequence[Mapping[str, str]],
    stop: StopRequest,
    on_progress: Callable[[Sequence[Child]], None],
    on_end: Callable[[Child], None],
) -> list[Failure]:
    """Runs all of them, one per slot at a time, and returns those that failed; after a failure none is started.

    slots: the environment variables of each place. stop: is passed on, and then no child is started; one that leaves
    because of it has not failed. on_progress: called a few times a second with those that run. on_end: called with
    each that finished.
    """
    waiting, free = deque(children), list(slots)
    running: dict[SpawnProcess, tuple[Child, Mapping[str, str]]] = {}
    failures: list[Failure] = []
    passed_on = False
    try:
        while running or (waiting and not failures and not stop):
            while waiting and free and not failures and not stop:
                child, slot = waiting.popleft(), free.pop(0)
                running[_start(child, slot)] = child, slot
            wait([process.sentinel for process in running], timeout=POLL_INTERVAL_S)
            if stop.signal_number is not None and not passed_on:
                passed_on = True
                for process in running:
                    _send(process, stop.signal_number)
            for process in [process for process in running if process.exitcode is not None]:
                child, slot = running.pop(process)
                free.append(slot)
                failures += _end(child, process, stop, on_end)
            on_progress([child for child, _ in running.values()])
    finally:
        for process in running:
            process.kill()
            process.join()
    return failures


def _end(child: Child, process: SpawnProcess, stop: StopRequest, on_end: Callable[[Child], None]) -> list[Failure]:
    """After the end of a process: at most one failure."""
    assert process.exitcode is not None
    status = process.exitcode if process.exitcode >= 0 else 128 - process.exitcode
    process.close()
    failures = []
    if status == 0:
        on_end(child)
    elif stop.signal_number is None or status != 128 + stop.signal_number:
        failures.append(Failure(child, status))
    if not failures and child.stderr_path.exists() and child.stderr_path.stat().st_size == 0:
        child.stderr_path.unlink()
    return failures


def _send(process: SpawnProcess, signal_number: int) -> None:
    if process.is_alive() and process.pid is not None:
        os.kill(process.pid, signal_number)


def _start(child: Child, variables: Mapping[str, str]) -> SpawnProcess:
    child.stderr_path.parent.mkdir(parents=True, exist_ok=True)
    child.stderr_path.touch()
    process = multiprocessing.get_context("spawn").Process(target=_enter, args=(child, dict(variables)))
    with _signals_held_back():
        process.start()
    return process


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """A process started meanwhile begins with the signals held back, until it is ready for them: see `_enter`."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _enter(child: Child, variables: Mapping[str, str]) -> None:
    """The life of a child."""
    # Out of reach of the terminal, whose Ctrl-C the parent passes on: twice would mean "leave at once".
    os.setsid()
    os.environ.update(variables)
    with open(os.devnull, "w") as nowhere, child.stderr_path.open("w") as stderr:
        os.dup2(nowhere.fileno(), STDOUT)
        os.dup2(stderr.fileno(), STDERR)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*STOP_SIGNALS, signal.SIGHUP})
        status = child.run()
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    sys.exit(status)


def _leave_with_parent() -> None:
    """Asks this process to stop once its parent is gone, whatever ended it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
