"""usage: profiler.py COMMAND [flags]

Measures the time and memory of training, and checks this machine. All commands except check take the flags of training
(main_multi_gpu.py --help) and run the trainer's own loop, without writing to --save-dir.

{commands}

  python profiler.py COMMAND --help        shows the flags and examples of a command

In Python, for any model: from profiler import PerformanceProfiler, compare_amp_performance
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from trainer.commands.build import start_strategy
from trainer.commands.flags import Flags
from trainer.commands.parse import names_several_devices, parse
from trainer.common import forms
from trainer.common.errors import UserError
from trainer.common.process import prepare_streams
from trainer.config import FlagGroup, parse_flags, refuse
from trainer.flags import MultiDeviceFlags
from trainer.logs.console import say
from trainer.parallel.environment import RankEnvironment, one_process_problems, read_rank_environment
from trainer.parallel.launch import launch, num_processes
from trainer.profiling import batch_size, check, scaling, step
from trainer.profiling.processes import FOR_SEVERAL_DEVICES, exit_status, in_use
from trainer.profiling.report import unwritable_targets
from trainer.registry import Registry, hand_in, workloads


def main(argv: Sequence[str], environment: RankEnvironment | None = None, tasks: Registry | None = None) -> int:
    """Runs one command line and returns the exit status.

    environment: rank environment of a process started by `launch`; None reads it from environment variables. tasks:
    workloads for `--task`; None keeps the current workloads.

    The exit status is 0 if the measurement is complete, 1 after an unexpected failure or if `check` found a defect, and
    2 after an error in the command line or the data.
    """
    prepare_streams()
    if tasks is not None:
        hand_in(tasks)
    name = argv[0] if argv else ""
    if name in ("-h", "--help"):
        summaries = {name: command.about[0].splitlines()[0] for name, command in COMMANDS.items()}
        commands = "\n".join(f"  {name:<12} {summary}" for name, summary in summaries.items())
        say((__doc__ or "").format(commands=commands))
        return 0

    def work() -> int:
        if name not in COMMANDS:
            given = f"{name}: no such command" if name else "no command given"
            raise UserError(f"{given}; give one of {', '.join(COMMANDS)}, or --help")
        command = COMMANDS[name]
        return command.run(command, argv, environment)

    # Ranks under a launcher share a console, so one rank reports for all; ranks started by hand all report.
    rank, _ = identified(environment, MultiDeviceFlags(forms.USUAL))
    return exit_status(work, reports=rank is None or rank.local_rank in (None, 0))


def identified(rank: RankEnvironment | None, multi: MultiDeviceFlags) -> tuple[RankEnvironment | None, list[str]]:
    """Returns the process's rank environment (None for a single process) and error messages. rank: None detects it."""
    return read_rank_environment(os.environ, multi) if rank is None else (rank, [])


@dataclass(frozen=True)
class Command:
    """Command of profiler.py.

    run: `on_devices`, `in_worlds` or `on_this_machine`, which calls `measure`. tool: the command's own flags. text:
    text for `--help`. problems: function that checks flags and command line, and returns messages.
    """

    run: Callable[["Command", Sequence[str], RankEnvironment | None], int]
    tool: type[FlagGroup]
    text: str | None
    measure: Callable[..., Any]
    problems: Callable[[Flags, Sequence[str]], list[str]] = lambda flags, argv: []

    @property
    def about(self) -> tuple[str, str]:
        """Splits `text` into a description, whose first line is a summary, and examples."""
        description, _, examples = (self.text or "").partition("\nexamples:")
        return description, f"examples:{examples}"


def on_devices(command: Command, argv: Sequence[str], environment: RankEnvironment | None) -> int:
    """Calls `measure` on the devices that flags choose, in one or several processes; returns the exit status."""
    flags, problems = parse(argv[1:], names_several_devices(argv), command.tool, command.about, command=argv[0])
    if flags.multi is not None:
        environment, contradictions = identified(environment, flags.multi)
        problems += contradictions
    refuse([*problems, *not_measured(flags), *command.problems(flags, argv[1:])])
    if flags.multi is not None and flags.multi.has_processes and environment is None:
        return launch(partial(main, list(argv), tasks=workloads()), num_processes(flags.multi, flags.devices.device))
    strategy = start_strategy(flags, environment)
    with in_use(strategy.group):
        strategy.group.together(lambda: refuse(unwritable_targets(flags.tool, strategy.group.is_main)))
        command.measure(flags, argv[1:], strategy)
    return 0


def in_worlds(command: Command, argv: Sequence[str], environment: RankEnvironment | None) -> int:
    """Calls `measure`, which starts processes for each number of devices; returns the exit status."""
    flags, problems = parse([*argv[1:], *FOR_SEVERAL_DEVICES], True, command.tool, command.about, command=argv[0])
    if one_process_problems(os.environ):
        problems.append(f"{argv[0]}: starts its own processes; run it without torchrun or srun")
    if flags.multi is not None and flags.multi.nproc is not None:
        problems.append(f"--nproc {flags.multi.nproc}: {argv[0]} chooses the number of processes; omit --nproc")
    problems += [*not_measured(flags), *command.problems(flags, argv[1:]), *unwritable_targets(flags.tool)]
    refuse(problems)
    command.measure(flags, argv[1:])
    return 0


def on_this_machine(command: Command, argv: Sequence[str], environment: RankEnvironment | None) -> int:
    """Calls `measure` without a task or training flags; returns the exit status."""
    (tool,), problems = parse_flags([command.tool], argv[1:], *command.about, command=argv[0])
    environment, contradictions = identified(environment, tool.multi())
    is_main = environment is None or environment.rank == 0
    refuse([*problems, *contradictions, *unwritable_targets(tool, is_main)])
    return command.measure(tool, environment)


def not_measured(flags: Flags) -> list[str]:
    """Returns a message for each flag that requests anything other than training a new run."""
    given = {
        "--eval-only": flags.checkpoint.eval_only,
        "--resume-from": flags.checkpoint.resume_from,
        "--predict": flags.prediction.predict,
        "--export": flags.exporting.export,
        "--print-config": flags.files.print_config,
        flags.several.as_given: flags.several.wanted,
    }
    advice = "profiler.py measures a training run from its start; leave it out"
    return [f"{name}: {advice}" for name, value in given.items() if value]


COMMANDS = {
    "step": Command(on_devices, step.StepFlags, step.__doc__, step.profile_step),
    "scaling": Command(in_worlds, scaling.ScalingFlags, scaling.__doc__, scaling.profile_scaling, scaling.problems),
    "batch-size": Command(
        on_devices, batch_size.BatchSizeFlags, batch_size.__doc__, batch_size.profile_batch_sizes, batch_size.problems
    ),
    "check": Command(on_this_machine, check.CheckFlags, check.__doc__, check.check),
}
