"""Where the runs of `--seeds` and `--folds` can be at once, and running them there: one per slot at a time."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path

import torch

from trainer.parallel.devices import DeviceFlags, MultiDeviceFlags, num_cores, pick_device
from trainer.parallel.launch import Launcher, exit_status

POLL_INTERVAL_S = 0.5


@dataclass(frozen=True)
class Slots:
    """variables: the environment variables of each slot. flags: what every run is told."""

    variables: Sequence[Mapping[str, str]]
    flags: Sequence[str]
    description: str


def choose_slots(devices: DeviceFlags, multi: MultiDeviceFlags | None) -> Slots:
    """One per GPU unless `--device` names one, several on the CPU, and a single one for runs on several devices."""
    if multi is not None:
        return Slots([{}], [], "one after the other, each on all its devices")
    if pick_device(devices.device).type == "cpu":
        num_threads = devices.num_threads or 1
        num_slots = max(1, num_cores() // num_threads)
        threads = f"{num_threads} thread{'s' * (num_threads > 1)}"
        description = f"at most {num_slots} at a time on the CPU, each on {threads}"
        return Slots([{}] * num_slots, ["--num-threads", str(num_threads)], description)
    if ":" in devices.device:
        return Slots([{}], [], f"one after the other on {devices.device}")
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = chosen.split(",") if chosen is not None else [str(i) for i in range(torch.cuda.device_count())]
    variables = [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus][: torch.cuda.device_count()]
    several = f"one at a time on each of {len(variables)} GPUs"
    return Slots(variables, [], several if len(variables) > 1 else "one after the other on the GPU")


def run_jobs(
    launcher: Launcher, jobs: Mapping[Path, Callable[[], int]], slots: Sequence[Mapping[str, str]]
) -> Iterator[tuple[list[Path], dict[Path, int]]]:
    """Runs all of them; after a failure or a request to stop none is started.

    jobs: picklable, by the directory of each; they return an exit status. slots: the environment variables of each.
    Yields a few times a second the directories of those that run, and the exit statuses of those that have ended since.
    """
    waiting, free = deque(jobs.items()), list(slots)
    running: dict[SpawnProcess, tuple[Path, Mapping[str, str]]] = {}
    while waiting or running:
        while waiting and free:
            (directory, job), slot = waiting.popleft(), free.pop(0)
            running[launcher.start(job, slot, stderr_path(directory))] = directory, slot
        ended = {}
        for process, exit_code in launcher.wait(POLL_INTERVAL_S).items():
            directory, slot = running.pop(process)
            free.append(slot)
            ended[directory] = exit_status(exit_code)
            if stderr_path(directory).stat().st_size == 0:
                stderr_path(directory).unlink()
        if launcher.stop or any(ended.values()):
            waiting.clear()
        yield [directory for directory, _ in running.values()], ended


def stderr_path(directory: Path) -> Path:
    """Beside the directory of a run, which may still refuse to make it or move its contents."""
    return directory.with_name(f"{directory.name}.stderr")


def failure_message(directory: Path, status: int) -> str:
    """What a run that failed had to say, under its name."""
    path = stderr_path(directory)
    said = path.read_text(errors="replace").splitlines() if path.exists() else []
    errors = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
    if errors:
        return "\n".join(f"error: {directory}: {line}" for line in errors)
    how = f"ended with status {status}"
    if status > 128:
        how = f"was stopped by signal {status - 128}; the same command goes on from its last checkpoint"
    return "\n".join([f"error: {directory}: {how}", *said])
