"""Jobs that tests start and kill, either in new interpreters or in forked processes, which start faster."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from tests.conftest import ROOT, launcher
from tests.helpers import forks
from trainer.parallel.environment import RankEnvironment

GIVE_UP_S = 180


class Job:
    """Attempt at a run, whose processes append to one output file and record their forward passes in a folder."""

    def __init__(self, folder: Path, world_size: int) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.world_size = world_size

    @property
    def output(self) -> str:
        path = self.folder / "output.txt"
        return path.read_text() if path.exists() else ""

    @property
    def has_begun(self) -> bool:
        """Whether every rank has recorded a forward pass after the first, which is on a placeholder batch."""
        return sum(file.read_text().count("\n") > 1 for file in self.folder.glob("*.jsonl")) == self.world_size

    @property
    def evaluates(self) -> bool:
        """Whether the last recorded forward pass was in an evaluation."""
        newest = max((p for p in self.folder.iterdir() if p.stem.isdigit()), key=lambda p: p.stat().st_mtime_ns)
        return newest.suffix == ".evaluated"

    def is_running(self) -> bool:
        raise NotImplementedError

    def statuses(self) -> list[int]:
        """Waits up to GIVE_UP_S seconds, and returns the exit statuses of all processes, negative for a signal."""
        raise NotImplementedError

    def kill(self) -> None:
        raise NotImplementedError

    def give_up(self, reason: str) -> NoReturn:
        """Raises AssertionError with the output of a job that hangs."""
        raise AssertionError(f"{reason}:\n{self.output}")

    def kill_rank(self, draw: random.Random) -> None:
        """Sends SIGKILL to a random rank."""
        records = sorted(self.folder.glob("*.jsonl"))
        os.kill(int(draw.choice(records).stem), signal.SIGKILL)


class CommandLine(Job):
    """Job in new interpreters, with a launcher if it has several processes."""

    def __init__(self, argv: Sequence[object], world_size: int, folder: Path, environment: Mapping[str, str]) -> None:
        super().__init__(folder, world_size)
        with (folder / "output.txt").open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, *map(str, [*launcher(world_size), *argv])],
                cwd=ROOT,
                env={**environment, "LOCKSTEP_RECORD": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def is_running(self) -> bool:
        return self._process.poll() is None

    def statuses(self) -> list[int]:
        return [self._process.wait(GIVE_UP_S)]

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def kill_rank(self, draw: random.Random) -> None:
        super().kill_rank(draw)
        self._process.terminate()  # otherwise the launcher would restart all ranks


class Forks(Job):
    """Job with one forked process per rank. form: --multi-gpu of several processes."""

    def __init__(
        self,
        argv: Sequence[object],
        world_size: int,
        folder: Path,
        environment: Mapping[str, str],
        prepare: forks.Preparation | None = None,
        form: str = "ddp",
    ) -> None:
        super().__init__(folder, world_size)
        variables = {**environment, "LOCKSTEP_RECORD": str(folder), "GLOO_SOCKET_IFNAME": "lo"}
        output, meeting_place = folder / "output.txt", f"file://{folder}/rendezvous"
        self._processes = (
            [forks.start(argv, variables, output, output, prepare=prepare)]
            if world_size == 1
            else [
                forks.start(
                    ["--multi-gpu", form, *argv],
                    variables,
                    output,
                    output,
                    RankEnvironment(rank, world_size, rank, world_size, meeting_place),
                    prepare,
                )
                for rank in range(world_size)
            ]
        )

    def is_running(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def send(self, number: signal.Signals) -> None:
        for process in self._processes:
            os.kill(process.pid, number)

    def statuses(self) -> list[int]:
        for process in self._processes:
            process.join(GIVE_UP_S)
        if any(process.is_alive() for process in self._processes):
            self.give_up("the job did not end")
        return [process.exitcode for process in self._processes]

    def give_up(self, reason: str) -> NoReturn:
        self.send(signal.SIGABRT)  # makes faulthandler print each rank's stack
        time.sleep(1.0)
        self.kill()
        super().give_up(reason)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def wait_until(condition: Callable[[], bool], job: Job) -> bool:
    """Waits for a condition; returns False if the job ended first."""
    deadline = time.monotonic() + GIVE_UP_S
    while not condition():
        if not job.is_running():
            return condition()
        if time.monotonic() > deadline:
            job.give_up("the job has not come so far")
        time.sleep(0.002)
    return True
