"""Runs measurements in new processes, returns their results, and converts errors to exit statuses."""

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
"""Default number of processes on the CPU, enough to measure communication."""
FOR_SEVERAL_DEVICES = ("--multi-gpu", forms.USUAL)
"""Arguments that make a command line accept multi-device flags, also for a single device."""

Measurement = Callable[[Flags, Sequence[str], Strategy], Any]
"""Function of flags, command line and strategy that all processes call; rank 0's result is stored as JSON."""


def exit_status(work: Callable[[], int], reports: bool = True) -> int:
    """Runs `work` and returns its exit status; if it raises, returns the exit status of the error.

    reports: whether this process prints a UserError. SIGTERM raises SystemExit, so that temporary folders are removed.
    """
    previous = signal.signal(signal.SIGTERM, leave_at_once)
    try:
        return work()
    except Failure as failure:
        # without checkpoints, a restart with less memory per step is impossible
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
    """Returns the context `Group.in_use`, with error messages that do not offer to resume."""
    group.diagnosis.has_checkpoints = False
    return group.in_use()


def run_job(
    job: Callable[[Path, RankEnvironment], int], world_size: int, environment: RankEnvironment | None = None
) -> tuple[int, Any]:
    """Runs a job in new processes; returns the exit status, and the result that a process stored (or None).

    job: picklable; may write its result as JSON to the given path. environment: rank environment of this process if a
    launcher started it; the job then runs in this process.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-measured-") as folder:
        result = Path(folder) / "result.json"
        run = partial(job, result)
        status = launch(run, world_size) if environment is None else run(environment)
        return status, json.loads(result.read_text()) if result.exists() else None


@dataclass(frozen=True)
class World:
    """Strategy and number of devices of a run. mode: a value of `--multi-gpu`, or "single" for one device."""

    mode: Literal["single"] | forms.FormName
    num_devices: int = 1

    def __str__(self) -> str:
        return "single" if self.mode == "single" else f"{self.mode} {self.num_devices}"


def measure_in(world: World, argv: Sequence[str], tool: type[FlagGroup], measurement: Measurement) -> Any:
    """Runs a measurement in new processes and returns its result. Raises Failure if it does not complete.

    argv: flags of training and of the tool. measurement: must be picklable.
    """
    job = partial(_measure_here, workloads(), world, list(argv), tool, measurement)
    status, result = run_job(job, world.num_devices if world.mode in forms.PER_PROCESS else 1)
    if status != 0:
        raise Failure(f"the measurement of mode {world} ended with exit status {status}", status)
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
    """Returns flags that select the strategy of `world`, and the first `num_devices` of the GPUs that `flags` name."""
    assert flags.multi is not None
    gpus = chosen_gpus(flags)[: world.num_devices]
    if world.mode == "single":
        return replace(flags, multi=None, devices=replace(flags.devices, device=f"cuda:{gpus[0]}" if gpus else "cpu"))
    return replace(flags, multi=replace(flags.multi, multi_gpu=world.mode, gpu_ids=gpus or None))


def chosen_gpus(flags: Flags) -> tuple[int, ...]:
    """Returns the GPUs that multi-device flags choose; () on the CPU."""
    assert flags.multi is not None
    return tuple(usable_gpus(flags.devices.device, flags.multi.gpu_ids))


def warn_of_threads(flags: Flags) -> None:
    """Prints a warning if one process on the CPU uses all cores, while each of several gets a share of them."""
    if not chosen_gpus(flags) and flags.devices.num_threads is None and torch.get_num_threads() > 1:
        print("One process uses all cores, but several share them; add --num-threads 1 for a fair comparison.")
