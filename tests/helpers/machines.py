"""Processes that simulate machines which share a file system without locks, and which freeze at critical moments."""

import errno
import multiprocessing
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import trainer.checkpoint.directory
import trainer.checkpoint.lock
from tests.checkpoint.conftest import state_at
from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.manifest import Retention
from trainer.common.errors import UserError

STALE_S, RENEW_S = 0.2, 0.03


def not_supported(*arguments: object) -> None:
    """Fails like fcntl.lockf and fcntl.flock on a file system without kernel locks."""
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def be_machine(name: str, number: int) -> None:
    """Makes this process act as a machine, without kernel locks and with shorter waiting times.

    number: even if each process gets a kernel lock that the others do not see, and odd if it gets none.
    """
    lock = trainer.checkpoint.lock
    lock._machine = lambda folder: name
    lock.fcntl = SimpleNamespace(lockf=not_supported if number % 2 else lambda *_: None, LOCK_EX=0, LOCK_NB=0)
    lock.STALE_S, lock.RENEW_S, lock._LOOK_S, lock.SETTLE_S = STALE_S, RENEW_S, 0.01, 0.02


def race(folder: Path, seed: int, num_machines: int, seconds: float) -> tuple[list[int], int, int]:
    """Lets machines take over one run directory from each other and save checkpoints, while some of them freeze.

    Returns the saved steps, the number of takeovers, and the number of freezes just before a rename.
    """
    context = multiprocessing.get_context("fork")
    folder.parent.mkdir(parents=True, exist_ok=True)
    promises, takings, freezings = (folder.with_name(f"{folder.name}.{what}") for what in ("saved", "taken", "frozen"))
    until = time.monotonic() + seconds
    arguments = (folder, seed, until, (promises, takings, freezings))
    processes = [context.Process(target=_live, args=(i, *arguments)) for i in range(num_machines)]
    for process in processes:
        process.start()
    draw, wake_at = random.Random(seed), {}
    while any(process.is_alive() for process in processes):
        for process in processes:
            if draw.random() < 0.004 and process.is_alive():
                os.kill(process.pid, signal.SIGSTOP)
            if _is_stopped(process.pid):
                wake_at.setdefault(process.pid, time.monotonic() + draw.uniform(0, 3 * STALE_S))
                if time.monotonic() > min(wake_at[process.pid], until):
                    del wake_at[process.pid]
                    os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.005)
    assert [process.exitcode for process in processes] == [0] * num_machines
    read = [path.read_text().split() if path.exists() else [] for path in (promises, takings, freezings)]
    return [int(step) for step in read[0]], len(read[1]), len(read[2])


def _live(number: int, folder: Path, seed: int, until: float, notes: tuple[Path, Path, Path]) -> None:
    name = f"machine-{number}"
    be_machine(name, number)
    draw = random.Random(f"{seed} {name}")
    rename = Path.rename

    def freeze_and_rename(path: Path, target: Path) -> Path:
        if draw.random() < 0.04:
            _note(notes[2], "x")
            os.kill(os.getpid(), signal.SIGSTOP)
        return rename(path, target)

    Path.rename = freeze_and_rename  # type: ignore[assignment, method-assign]
    trainer.checkpoint.directory.flush_path = lambda path: None
    while time.monotonic() < until:
        directory = RunDirectory(folder, Retention(3), lambda line: None)
        with suppress(UserError):
            directory.acquire()
            _note(notes[1], "x")
            step = directory.load_newest()["step"] if directory.has_checkpoint else 0
            for epoch in range(step // 10 + 1, step // 10 + 2 + draw.randrange(40)):
                if time.monotonic() > until:
                    break
                directory.save(state_at(epoch))
                _note(notes[0], f"{10 * epoch}")
        if draw.random() < 0.5:
            directory.release()
        time.sleep(draw.uniform(0, 0.02))
    os._exit(0)


def _note(path: Path, word: str) -> None:
    with path.open("a") as file:
        file.write(f"{word}\n")


def _is_stopped(process: int | None) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
