"""The command line of profiler.py: what to measure, then flags as in training."""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from trainer.commands.flags import Flags, parse
from trainer.config import FlagGroup, flag_name, names_given, parse_flags, refuse
from trainer.parallel.base import Parallel
from trainer.parallel.devices import DeviceFlags, MultiDeviceFlags
from trainer.parallel.environment import RankEnvironment, one_process_problems, read_rank_environment
from trainer.parallel.errors import EXIT_BAD_INPUT
from trainer.parallel.launch import launch, num_processes
from trainer.profiling import batch_size, check, prediction, scaling, step
from trainer.profiling.flags import BatchSizeFlags, CheckFlags, PredictFlags, ScalingFlags, StepFlags
from trainer.profiling.processes import exit_status, for_several_devices, on_devices
from trainer.profiling.targets import unusable_targets

OVERVIEW = """usage: profiler.py COMMAND [flags]

Measures where time and memory of a training run go, and what this machine can do. Every command takes the flags of
training (main_multi_gpu.py --help) and measures the trainer's own loop with them; none touches --save-dir.

  step         where the time of a training step goes, phase by phase; a trace on request
  scaling      throughput, speed-up, efficiency and memory on 1, 2, 4 ... devices
  batch-size   the largest batch that fits, and the fastest one
  predict      the speed to expect of more devices than there are here
  check        is this machine ready: GPUs, exchange between processes, disk, data loading

  python profiler.py COMMAND --help        its flags, and examples

As a library, for any model: from profiler import PerformanceProfiler, compare_amp_performance
"""

MEASURES_ONE_RUN = "profiler.py measures a training run from its start; leave it out"


def main(argv: Sequence[str], environment: RankEnvironment | None = None) -> int:
    """Runs one command line; returns the exit status.

    environment: who this process is, when it was started by `launch`; otherwise read from the environment.

    0: measured. 1: something failed that nobody foresaw, or `check` found something broken. 2: something in the command
    line or the data has to be changed first.
    """
    name = argv[0] if argv else ""
    if name in ("-h", "--help"):
        print(OVERVIEW)
        return 0
    if name not in COMMANDS:
        given = f"{name}: no such command" if name else "nothing to measure"
        if speaks(environment):
            print(f"error: {given}; give one of {', '.join(COMMANDS)}, or --help", file=sys.stderr)
        return EXIT_BAD_INPUT
    status = 0

    def work() -> None:
        nonlocal status
        status = COMMANDS[name](argv, environment)

    return exit_status(work, speaks(environment)) or status


def speaks(environment: RankEnvironment | None) -> bool:
    """Whether this process tells of mistakes: those of one launcher share a console and are wrong alike.

    environment: as `main` gets it. Processes started by hand have a terminal each, and all of them speak.
    """
    if environment is None:
        environment, _ = read_rank_environment(os.environ, MultiDeviceFlags("ddp"))
    return environment is None or environment.local_rank in (None, 0)


# --- commands that measure on the devices of one world -----------------------------------------------------------


@dataclass(frozen=True)
class OnDevices:
    """A command that runs on the devices that its flags name, in one process or in several.

    problems: of its flags and its command line, besides those of any command.
    """

    tool: type[FlagGroup]
    about: tuple[str, str]
    measure: Callable[[Flags, Sequence[str], Parallel], None]
    problems: Callable[[Flags, Sequence[str]], list[str]] = lambda flags, argv: []

    def __call__(self, argv: Sequence[str], environment: RankEnvironment | None) -> int:
        """argv: begins with the name of the command. Raises BadInput."""
        several = names_several_devices(argv)
        flags, problems = parse(argv[1:], several, self.tool, self.about, command=argv[0])
        if flags.multi is not None and environment is None:
            environment, contradictions = read_rank_environment(os.environ, flags.multi)
            problems += contradictions
        refuse([*problems, *not_measured(flags), *self.problems(flags, argv[1:])])
        if flags.multi is not None and flags.multi.multi_gpu == "ddp" and environment is None:
            return launch(functools.partial(main, list(argv)), num_processes(flags.multi, flags.devices.device))

        def work(parallel: Parallel) -> None:
            parallel.together(lambda: refuse(unusable_targets(flags.tool, parallel.is_main)))
            self.measure(flags, argv[1:], parallel)

        return on_devices(flags, environment, work)


@dataclass(frozen=True)
class OverWorlds:
    """A command that starts processes for each of the worlds that it compares."""

    tool: type[FlagGroup]
    about: tuple[str, str]
    measure: Callable[[Flags, Sequence[str]], None]
    problems: Callable[[Flags], list[str]]

    def __call__(self, argv: Sequence[str], environment: RankEnvironment | None) -> int:
        """argv: begins with the name of the command. Raises BadInput."""
        flags, problems = parse(for_several_devices(argv[1:]), True, self.tool, self.about, command=argv[0])
        if one_process_problems(os.environ):
            problems.append(f"{argv[0]}: starts its processes by itself; leave the launcher out")
        assert flags.multi is not None
        if flags.multi.nproc is not None:
            problems.append(f"--nproc {flags.multi.nproc}: {argv[0]} chooses the number of processes; leave it out")
        refuse([*problems, *not_measured(flags), *self.problems(flags), *unusable_targets(flags.tool)])
        self.measure(flags, argv[1:])
        return 0


def names_several_devices(argv: Sequence[str]) -> bool:
    """Whether a command line, or a launcher, is about several devices. `--help` shows their flags too."""
    own = {flag_name(field.name) for field in fields(MultiDeviceFlags)} | {"--help"}
    return bool(own & names_given(argv)) or "-h" in argv or bool(one_process_problems(os.environ))


def not_measured(flags: Flags) -> list[str]:
    """Flags of training that ask for something else than a run from its start."""
    given = {
        "--eval-only": flags.checkpoint.eval_only,
        "--resume-from": flags.checkpoint.resume_from,
        "--predict": flags.prediction.predict,
        flags.several.as_given: flags.several.wanted,
    }
    return [f"{name}: {MEASURES_ONE_RUN}" for name, value in given.items() if value]


# --- check -------------------------------------------------------------------------------------------------------


def run_check(argv: Sequence[str], environment: RankEnvironment | None) -> int:
    """`profiler.py check`, which needs no task. Raises BadInput."""
    (tool,), problems = parse_flags([CheckFlags], argv[1:], *check.ABOUT, command=argv[0])
    multi = MultiDeviceFlags("ddp", tool.gpu_ids, tool.nproc, tool.backend)
    problems += [*DeviceFlags(tool.device).problems(), *multi.problems()]
    if environment is None:
        environment, contradictions = read_rank_environment(os.environ, multi)
        problems += contradictions
    refuse([*problems, *unusable_targets(tool, environment is None or environment.rank == 0)])
    return check.check(tool, environment)


COMMANDS: dict[str, Callable[[Sequence[str], RankEnvironment | None], int]] = {
    "step": OnDevices(StepFlags, step.ABOUT, step.profile_step),
    "scaling": OverWorlds(ScalingFlags, scaling.ABOUT, scaling.profile_scaling, scaling.problems),
    "batch-size": OnDevices(BatchSizeFlags, batch_size.ABOUT, batch_size.profile_batch_sizes, batch_size.problems),
    "predict": OverWorlds(PredictFlags, prediction.ABOUT, prediction.predict_scaling, prediction.problems),
    "check": run_check,
}
