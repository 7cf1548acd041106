"""Runs what is to be measured on its devices: in this process, or in new ones that are there for one measurement."""

import dataclasses
import functools
import json
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn

import torch

from trainer.commands.build import start_parallel
from trainer.commands.flags import Flags, parse
from trainer.config import FlagGroup, refuse
from trainer.loading.errors import BadInput
from trainer.parallel.base import Parallel
from trainer.parallel.devices import num_cores
from trainer.parallel.environment import RankEnvironment
from trainer.parallel.errors import EXIT_AGAIN, EXIT_BAD_INPUT, EXIT_FAILED, Failure, print_refusal
from trainer.parallel.launch import launch
from trainer.profiling.excerpt import opened
from trainer.profiling.measure import measure


@dataclass(frozen=True)
class World:
    """A way to spread a run over devices. num_devices: 1 for "single"."""

    mode: Literal["single", "dp", "ddp"]
    num_devices: int = 1

    def __str__(self) -> str:
        return "single" if self.mode == "single" else f"{self.mode} {self.num_devices}"


def exit_status(work: Callable[[], None], speaks: bool = True) -> int:
    """Does some work; returns the exit status, once the user knows what went wrong, if anything did.

    speaks: this process, and not another one, tells the user of a BadInput.
    """
    try:
        with _ending_at_sigterm():
            work()
    except Failure as failure:
        # Only a run with checkpoints can go on with less memory.
        return EXIT_FAILED if failure.status == EXIT_AGAIN else failure.status
    except BadInput as error:
        if speaks:
            print_refusal(error)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except _Terminated:
        return 128 + signal.SIGTERM
    return 0


class _Terminated(SystemExit):
    """SIGTERM has come."""


@contextmanager
def _ending_at_sigterm() -> Iterator[None]:
    """SIGTERM ends this process as Ctrl-C does, so that folders for the time of a measurement are removed."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise _Terminated(128 + number)

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def on_devices(flags: Flags, environment: RankEnvironment | None, work: Callable[[Parallel], None]) -> int:
    """Does some work with the devices that the flags name, as one of its processes; returns the exit status."""
    parallel: Parallel | None = None

    def explained() -> None:
        nonlocal parallel
        parallel = start_parallel(flags, environment)
        parallel.diagnosis.has_checkpoints = False
        with parallel.diagnosis.explaining():
            work(parallel)

    try:
        return exit_status(explained, environment is None or environment.rank == 0)
    finally:
        if parallel is not None:
            parallel.close()


def measure_world(
    world: World, argv: Sequence[str], tool: type[FlagGroup], num_steps: int, num_settling_steps: int
) -> dict[str, Any]:
    """What `measure` returns for a run in this world, in processes of its own.

    argv: flags of training and of the tool. Raises Failure if it did not come to its end; the user knows why.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-world-") as folder:
        result = Path(folder) / "result.json"
        job = functools.partial(_measure_here, world, list(argv), tool, (num_steps, num_settling_steps), result)
        status = launch(job, world.num_devices if world.mode == "ddp" else 1)
        if status != 0:
            raise Failure(f"measuring {world} ended with status {status}", status)
        return json.loads(result.read_text())


def _measure_here(
    world: World,
    argv: list[str],
    tool: type[FlagGroup],
    steps: tuple[int, int],
    result: Path,
    environment: RankEnvironment,
) -> int:
    flags, problems = parse(for_several_devices(argv), True, tool)
    refuse(problems)

    def work(parallel: Parallel) -> None:
        with opened(flags, argv, parallel, quiet=True) as run:
            measured = measure(run, *steps)
            if parallel.is_main:
                result.write_text(json.dumps(measured))

    return on_devices(placed(flags, world), environment, work)


def for_several_devices(argv: Sequence[str]) -> list[str]:
    """The command line as one of several devices, so that their flags are known whatever the world is."""
    return [*argv, "--multi-gpu", "ddp"]


def placed(flags: Flags, world: World) -> Flags:
    """The flags for a world on the first devices of those that they name."""
    assert flags.multi is not None
    chosen = flags.multi.gpu_ids
    if world.mode == "ddp":
        return flags
    if world.mode == "dp":
        ids = (chosen or tuple(range(torch.cuda.device_count())))[: world.num_devices]
        return dataclasses.replace(flags, multi=dataclasses.replace(flags.multi, multi_gpu="dp", gpu_ids=ids))
    devices = flags.devices
    if chosen and devices.device != "cpu":
        devices = dataclasses.replace(devices, device=f"cuda:{chosen[0]}")
    return dataclasses.replace(flags, multi=None, devices=devices)


def num_usable_devices(flags: Flags) -> int:
    """GPUs that the flags name, or cores where it is the CPU that trains."""
    if flags.devices.device == "cpu" or not torch.cuda.is_available():
        return num_cores()
    chosen = flags.multi.gpu_ids if flags.multi is not None else None
    return len(chosen) if chosen is not None else torch.cuda.device_count()


def trains_on_gpus(flags: Flags) -> bool:
    """Whether runs of these flags use GPUs."""
    return flags.devices.device != "cpu" and torch.cuda.is_available()
