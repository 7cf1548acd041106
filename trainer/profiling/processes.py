"""Work in processes: from what one does to its exit status, and measurements in new ones, which hand back results."""

import json
import signal
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from trainer.commands.build import start_strategy
from trainer.commands.flags import Flags
from trainer.commands.parse import parse
from trainer.common import forms
from trainer.common.errors import UserError
from trainer.config import FlagGroup
from trainer.failure.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_RESTART, Failure, print_refusal
from trainer.failure.signals import leave_at_once
from trainer.parallel.devices import usable_gpus
from trainer.parallel.environment import RankEnvironment
from trainer.parallel.group import Group
from trainer.parallel.launch import launch
from trainer.parallel.strategy import Strategy
from trainer.registry import Registry, hand_in, workloads

PROCESSES_ON_CPU = 2
"""Unless told otherwise, so that there is something to exchange."""
FOR_SEVERAL_DEVICES = ("--multi-gpu", forms.USUAL)
"""Makes a command line one of several devices, so that their flags are known whatever the world is."""

Measurement = Callable[[Flags, Sequence[str], Strategy], Any]
"""All processes of a world call it with its flags and the command line; the main one's plain values are the result."""


def exit_status(work: Callable[[], int], reports: bool = True) -> int:
    """Does some work; returns its exit status, or that of what went wrong, once the user knows of it.

    reports: this process, and not another one, tells the user of a UserError. SIGTERM ends the work by SystemExit, so
    that folders for the time of a measurement are removed.
    """
    previous = signal.signal(signal.SIGTERM, leave_at_once)
    try:
        return work()
    except Failure as failure:
        # Only a run with checkpoints can go on with less memory.
        return EXIT_FAILED if failure.status == EXIT_RESTART else failure.status
    except UserError as error:
        if reports:
            print_refusal(error)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, previous)


def in_use(group: Group) -> AbstractContextManager[None]:
    """Around a measurement with some devices, which does not go on from a checkpoint; see `Group.in_use`."""
    group.diagnosis.has_checkpoints = False
    return group.in_use()


def run_job(
    job: Callable[[Path, RankEnvironment], int], world_size: int, environment: RankEnvironment | None = None
) -> tuple[int, Any]:
    """Calls a job in so many new processes; returns the exit status and what one of them left, or None.

    job: picklable; may leave its result as JSON in the file that it is given. environment: who this process is, if it
    is one of them already; then it calls the job itself.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-measured-") as folder:
        result = Path(folder) / "result.json"
        run = partial(job, result)
        status = launch(run, world_size) if environment is None else run(environment)
        return status, json.loads(result.read_text()) if result.exists() else None


@dataclass(frozen=True)
class World:
    """A way to spread a run over devices. num_devices: 1 for "single"."""

    mode: Literal["single"] | forms.FormName
    num_devices: int = 1

    def __str__(self) -> str:
        return "single" if self.mode == "single" else f"{self.mode} {self.num_devices}"


def measure_in(world: World, argv: Sequence[str], tool: type[FlagGroup], measurement: Measurement) -> Any:
    """The result of a measurement in new processes. Raises Failure if it did not come to its end; the user knows why.

    argv: flags of training and of the tool. measurement: picklable.
    """
    job = partial(_measure_here, workloads(), world, list(argv), tool, measurement)
    status, result = run_job(job, world.num_devices if world.mode in forms.PER_PROCESS else 1)
    if status != 0:
        raise Failure(f"measuring {world} ended with status {status}", status)
    return result


def _measure_here(
    tasks: Registry,
    world: World,
    argv: list[str],
    tool: type[FlagGroup],
    measurement: Measurement,
    result: Path,
    rank: RankEnvironment,
) -> int:
    hand_in(tasks)

    def work() -> int:
        flags = placed(parse([*argv, *FOR_SEVERAL_DEVICES], True, tool)[0], world)
        strategy = start_strategy(flags, rank)
        with in_use(strategy.group):
            found = measurement(flags, argv, strategy)
            if strategy.group.is_main:
                result.write_text(json.dumps(found))
        return 0

    return exit_status(work)


def placed(flags: Flags, world: World) -> Flags:
    """The flags for a world on the first devices of those that they name."""
    assert flags.multi is not None
    gpus = chosen_gpus(flags)[: world.num_devices]
    if world.mode == "single":
        return replace(flags, multi=None, devices=replace(flags.devices, device=f"cuda:{gpus[0]}" if gpus else "cpu"))
    return replace(flags, multi=replace(flags.multi, multi_gpu=world.mode, gpu_ids=gpus or None))


def chosen_gpus(flags: Flags) -> tuple[int, ...]:
    """The GPUs that runs of these flags, which are of several devices, may use; none where they train on the CPU."""
    assert flags.multi is not None
    return tuple(usable_gpus(flags.devices.device, flags.multi.gpu_ids))


def warn_of_threads(flags: Flags) -> None:
    """Tells the user if a single CPU process has threads that several would have to share."""
    if not chosen_gpus(flags) and flags.devices.num_threads is None and torch.get_num_threads() > 1:
        print("Without --num-threads 1 one process takes all cores, and several share them.")
