"""Starts and supervises processes: the ranks of a run that is started without a launcher, and the runs of `--seeds`.

Ranks meet through a file and use the loopback interface, so they need no MASTER_PORT and accept no remote connections.
"""

import fcntl
import functools
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from trainer.common.files import has_locked
from trainer.common.process import to_stderr
from trainer.common.validation import without_folders_of_classes
from trainer.failure.diagnosis import RESUMES
from trainer.failure.errors import EXIT_RESTART
from trainer.failure.signals import STOP_SIGNALS, StopRequest, exit_quickly
from trainer.flags import MultiDeviceFlags
from trainer.parallel.devices import usable_gpus
from trainer.parallel.environment import RankEnvironment

GRACE_PERIOD_S = 10
SAVES_WITHIN_S = 30
"""Time in seconds for surviving ranks to save and exit after another rank fails, as under torchrun."""
MOST_STARTS = 32
"""Maximum number of starts; each out-of-memory error halves the batch size, so log2 of the batch size would suffice."""
EXIT_UNGUARDED = 64
"""Exit status (EX_USAGE) of a script without a main guard, whose import would start the run again."""
PROCESS_NAME = "Lockstep"
NEW_FOR_S = 10
"""Minimum age in seconds of a leftover folder to remove; a younger folder may not have been locked yet."""
FOLDER = "lockstep-rendezvous-"
"""Name prefix of the temporary folders for the ranks' rendezvous files."""
STDOUT, STDERR = 1, 2
SAFE_PATH = "PYTHONSAFEPATH"
"""Variable that keeps new interpreters from importing modules of the current folder, such as a user's signal.py."""


# --- any processes -----------------------------------------------------------------------------------------------


class Launcher:
    """Starts processes, forwards stop signals to them, and waits until all of them have exited.

    running: processes that have not exited. stop: whether this process was asked to stop.
    """

    def __init__(self) -> None:
        self.running: list[SpawnProcess] = []
        self.stop = StopRequest(self._pass_on)

    def __enter__(self) -> "Launcher":
        self.stop.install()
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._join()
            for process in self.running:
                process.terminate()
            self._join()
        finally:
            for process in self.running:
                process.kill()
                process.join()
            self.stop.uninstall()

    def start(
        self, function: Callable[[], int], variables: Mapping[str, str], stderr: Path | None = None
    ) -> SpawnProcess:
        """Calls a function in a new process, which receives SIGTERM if this process dies.

        function: picklable; returns the exit status. variables: environment variables to set. stderr: a file for
        standard error; the process then has no terminal, and its standard output is discarded.
        """
        if stderr is not None:
            stderr.parent.mkdir(parents=True, exist_ok=True)
            stderr.touch()
        arguments = (function, {SAFE_PATH: os.environ.get(SAFE_PATH, ""), **variables}, stderr)
        process = multiprocessing.get_context("spawn").Process(name=PROCESS_NAME, target=_call, args=arguments)
        # Block signals until the new process handles them; first start Python's resource tracker, which unblocks them.
        with _set(SAFE_PATH, "1"), without_folders_of_classes():
            resource_tracker.ensure_running()
            previous = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            try:
                process.start()
                self.running.append(process)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        if self.stop.signal_number is not None:
            _send(process, self.stop.signal_number)
        return process

    def wait(self, timeout_s: float | None = None) -> dict[SpawnProcess, int]:
        """Waits up to `timeout_s` for a process to exit; returns the exit codes by process (-n: killed by signal n)."""
        wait([process.sentinel for process in self.running], timeout_s)
        ended = {process: process.exitcode for process in self.running if process.exitcode is not None}
        self.running = [process for process in self.running if process not in ended]
        return ended

    def _join(self) -> None:
        deadline = time.monotonic() + GRACE_PERIOD_S
        for process in self.running:
            process.join(max(0.0, deadline - time.monotonic()))

    def _pass_on(self, number: int) -> None:
        # A terminal sends Ctrl-C to its whole process group; a second SIGINT would mean "exit without saving".
        group = os.getpgrp() if number == signal.SIGINT and sys.stdin is not None and sys.stdin.isatty() else None
        for process in self.running:
            _send(process, number, except_group=group)


@contextmanager
def _set(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def exit_status(exit_code: int) -> int:
    """Converts an exit code to a shell's exit status: 128 + n after signal n."""
    return exit_code if exit_code >= 0 else 128 - exit_code


def _send(process: SpawnProcess, number: int, except_group: int | None = None) -> None:
    assert process.pid is not None
    with suppress(ProcessLookupError):
        if process.is_alive() and os.getpgid(process.pid) != except_group:
            os.kill(process.pid, number)


def _call(function: Callable[[], int], variables: Mapping[str, str], stderr: Path | None) -> None:
    exit_quickly()
    os.environ.update(variables)
    if stderr is not None:
        os.setsid()  # detaches from the terminal; the launcher forwards Ctrl-C
        with open(os.devnull, "w") as nowhere, stderr.open("w") as file:
            os.dup2(nowhere.fileno(), STDOUT)
            os.dup2(file.fileno(), STDERR)
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        status = function()
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    sys.exit(status)


def _stop_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def imports_script_of_parent() -> bool:
    """Returns whether a `Launcher` started this process and the process is still importing its parent's script."""
    process = multiprocessing.current_process()
    return process.name == PROCESS_NAME and getattr(process, "_inheriting", False)


def was_started_by_multiprocessing() -> bool:
    """Returns whether this process is a worker, such as a process of a pool."""
    return multiprocessing.parent_process() is not None


# --- the processes of one run ------------------------------------------------------------------------------------


def num_processes(flags: MultiDeviceFlags, device: str) -> int:
    """Returns the number of processes to start, by default one per selected GPU, or 1 on the CPU."""
    return flags.nproc or len(usable_gpus(device, flags.gpu_ids)) or 1


def launch(
    run: Callable[[RankEnvironment], int], world_size: int, again: Callable[[RankEnvironment], int] | None = None
) -> int:
    """Calls `run` in `world_size` new processes, and starts all of them again if one exits with EXIT_RESTART.

    run: picklable; returns an exit status. again: replaces `run` in restarts, to resume from checkpoints; None without
    checkpoints. Returns the first nonzero exit status, or 0; 128 + n for a process killed by signal n. After forwarding
    stop signal n, returns 128 + n if a restart is due or there are no checkpoints.
    """
    for start in range(MOST_STARTS):
        status = _launch_once(again if start > 0 and again else run, world_size, again is not None)
        if status != EXIT_RESTART:
            break
    return status


@contextmanager
def rendezvous_folder() -> Iterator[str]:
    """Context with a temporary folder for the ranks' rendezvous file; also removes folders of killed launchers.

    Processes that use the folder hold a lock on it (`in_use`), which the kernel releases when they end. Ranks lock the
    folder too, because they may outlive their launcher while they save.
    """
    for stale in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        with suppress(OSError), in_use(stale, fcntl.LOCK_EX | fcntl.LOCK_NB) as is_locked:  # or another user's folder
            if is_locked and time.time() - stale.stat().st_mtime > NEW_FOR_S:
                shutil.rmtree(stale)
    with tempfile.TemporaryDirectory(prefix=FOLDER) as folder, in_use(folder):
        yield folder


@contextmanager
def in_use(folder: str | Path, how: int = fcntl.LOCK_SH) -> Iterator[bool]:
    """Context that locks a folder; yields False if its file system has no kernel locks. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield has_locked(fcntl.flock, descriptor, how)
    finally:
        os.close(descriptor)


def _run_in(folder: str, run: Callable[[RankEnvironment], int], environment: RankEnvironment) -> int:
    with in_use(folder):
        return run(environment)


def _launch_once(run: Callable[[RankEnvironment], int], world_size: int, has_checkpoints: bool) -> int:
    variables = {}
    if sys.platform == "linux":
        variables = {name: os.environ.get(name, "lo") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    failures: list[tuple[int, int]] = []
    with rendezvous_folder() as folder, Launcher() as launcher:
        ranks = {}
        for rank in range(world_size):
            environment = RankEnvironment(rank, world_size, rank, world_size, f"file://{folder}/rendezvous")
            ranks[launcher.start(functools.partial(_run_in, folder, run, environment), variables)] = rank
        while launcher.running and not failures:
            failures = [(ranks[process], code) for process, code in launcher.wait().items() if code != 0]
        codes = [code for _, code in failures]
        deadline = time.monotonic() + SAVES_WITHIN_S
        while launcher.running and time.monotonic() < deadline:
            codes += launcher.wait(deadline - time.monotonic()).values()
    failed, exit_code = failures[0] if failures else (0, 0)
    goes_on = EXIT_RESTART in codes
    died_of_stop = exit_code == -(launcher.stop.signal_number or 0)  # before the process handled signals
    if launcher.stop and (died_of_stop or goes_on or not has_checkpoints):
        return launcher.stop.exit_status
    if exit_code < 0:
        end = "; restarting" if goes_on else f"; {RESUMES}" if has_checkpoints else ""
        to_stderr(f"rank {failed} was killed by signal {-exit_code}{end}")
    return EXIT_RESTART if goes_on else exit_status(exit_code)
