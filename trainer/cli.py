"""Runs command lines: reads the flags, runs the requested command, and returns an exit status."""

import atexit
import dataclasses
import faulthandler
import functools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeGuard

from trainer.commands.build import build_task, set_up_torch, start_strategy
from trainer.commands.config_files import with_origins
from trainer.commands.evaluate import check_only, evaluate_only
from trainer.commands.export import export_model
from trainer.commands.flags import Flags
from trainer.commands.parse import parse
from trainer.commands.predict import label_new_data, print_output, write_sample
from trainer.commands.several import train_several
from trainer.commands.train import train_in_directory
from trainer.common.errors import UserError
from trainer.common.process import prepare_streams, to_stderr
from trainer.config import flag_name, refuse
from trainer.failure.errors import EXIT_BAD_INPUT, EXIT_FINISHED, Failure, exit_at_once, print_refusal
from trainer.failure.signals import ignore_until_exit
from trainer.flags import LearningFlags, MultiDeviceFlags
from trainer.logs.background import some_are_left
from trainer.logs.console import say
from trainer.parallel.devices import keep_freed_memory
from trainer.parallel.environment import RankEnvironment, read_rank_environment
from trainer.parallel.launch import launch, num_processes
from trainer.parallel.strategy import Strategy
from trainer.registry import Registry, hand_in
from trainer.task import Task

TOLD_WITHIN_S = 3.0
"""Seconds that a rank waits while another rank prints an error, since torchrun kills all ranks when one exits."""


def run_process(
    argv: Sequence[str],
    several_devices: bool,
    environment: RankEnvironment | None = None,
    task_type: type[Task] | None = None,
    tasks: Registry | None = None,
) -> int:
    """Runs `main` in a process that does nothing else. Unresponsive loggers do not delay the exit of this process.

    If a library crashes, for example with a segmentation fault, the Python stack is printed to standard error.
    """
    if sys.stderr is not None:
        faulthandler.enable(file=2)
    prepare_streams()
    status = main(argv, several_devices, environment, task_type, tasks)
    ignore_until_exit()
    if some_are_left():
        exit_at_once(status)
    if status != EXIT_FINISHED:
        # After a failure, threads may still wait in C++ for other processes. A thread that returns while the
        # interpreter finalises would abort the process.
        atexit._run_exitfuncs()
        exit_at_once(status)
    return status


def main(
    argv: Sequence[str],
    several_devices: bool,
    environment: RankEnvironment | None = None,
    task_type: type[Task] | None = None,
    tasks: Registry | None = None,
) -> int:
    """Runs one command line and returns the exit status.

    tasks: workloads for `--task`; None keeps the current workloads.

    The exit status is 0 after success, 1 after an unexpected failure in any process, 2 after an error in the command
    line, data or run directory, 75 if new processes can resume the failed run, and 128 + n after signal n. Under a
    launcher, a run saved after signal n exits with 0, because launchers treat other statuses as failures.
    """
    if tasks is not None:
        hand_in(tasks)
    run = functools.partial(run_process, tasks=tasks)
    try:
        flags, environment = read_command_line(argv, several_devices, environment, task_type)
        if flags.files.print_config:
            if environment is None or environment.tells_user:
                print_output(f"{flags.as_toml()}\n")
            return EXIT_FINISHED
        if flags.several.wanted:
            return train_several(flags, argv, functools.partial(run, several_devices=several_devices))
        if starts_processes(flags.multi, environment):
            return start_processes(flags.multi, flags.devices.device, argv, run)
        strategy = start_strategy(flags, environment)
        if strategy.device.type == "cpu":
            keep_freed_memory()
        with strategy.group.in_use():
            return run_command(flags, argv, strategy)
    except Failure as failure:
        return failure.status
    except UserError as error:
        print_refusal(error)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        to_stderr("interrupted before training began; nothing was changed")
        return 128 + signal.SIGINT


def read_command_line(
    argv: Sequence[str],
    several_devices: bool,
    environment: RankEnvironment | None = None,
    task_type: type[Task] | None = None,
    problems: Sequence[str] = (),
) -> tuple[Flags, RankEnvironment | None]:
    """Returns the flags, and the rank and world size from this process's launcher, if there is one.

    environment: rank and world size if `start_processes` has started this process; None reads them from environment
    variables. task_type: the class of `--task`, if the caller knows it. problems: problems already found by the caller.

    Raises UserError with all problems, or Failure if another process prints the problems.
    """
    flags, found = parse(argv, several_devices, task_type=task_type)
    problems = [*problems, *found]
    if environment is None:
        environment, contradictions = read_rank_environment(os.environ, flags.multi)
        problems += [with_origins(problem, flags.origins) for problem in contradictions]
    if flags.several.wanted and environment is not None:
        problems.append(f"{flags.several.as_given}: starts its own processes; run it without torchrun or srun")
    if environment is not None and environment.local_world_size != environment.world_size:
        problems = [f"rank {environment.rank} on {socket.gethostname()}: {problem}" for problem in problems]
    if problems and environment is not None and not environment.tells_user:
        time.sleep(TOLD_WITHIN_S)
        raise Failure("\n".join(problems), EXIT_BAD_INPUT)
    refuse(problems)
    return flags, environment


def starts_processes(
    multi: MultiDeviceFlags | None, environment: RankEnvironment | None
) -> TypeGuard[MultiDeviceFlags]:
    """Returns whether this process must start the ranks because no launcher has started them."""
    return multi is not None and multi.has_processes and environment is None


def start_processes(multi: MultiDeviceFlags, device: str, argv: Sequence[str], run: Callable[..., int]) -> int:
    """Trains in new processes, one per rank, and returns the exit status.

    argv: the complete command line. run: `run_process`, or a picklable function with the same positional arguments.
    """
    world_size = num_processes(multi, device)
    if world_size == 1 and multi.nproc is None:
        say("Starting one process, because at most one device is visible; --nproc N starts more.")
    # with --fresh, a restart would move away the run that it should resume
    again = [*argv, "--fresh=false"]
    start, start_again = (functools.partial(run, arguments, True) for arguments in (list(argv), again))
    return launch(start, world_size, start_again)


def run_command(flags: Flags, argv: Sequence[str], strategy: Strategy) -> int:
    """Trains, evaluates, predicts or exports, and returns the exit status. Raises UserError."""
    set_up_torch(flags, strategy.group)
    if strategy.group.is_main and flags.prediction.predict is None:  # --predict may print its table to standard output
        for remark in flags.from_run.remarks:
            say(remark)
    if flags.prediction.predict is not None:
        label_new_data(flags, strategy)
        return EXIT_FINISHED
    if flags.exporting.export is not None:
        export_model(flags, strategy)
        return EXIT_FINISHED
    task = strategy.group.together(lambda: build_task(flags))
    if (done := strategy.group.on_main(task.other_work)) is not None:
        if strategy.group.is_main:
            say(done)
    elif (sample := flags.prediction.sample) is not None:
        strategy.group.on_main(lambda: write_sample(task, sample))
    elif flags.run.check_task:
        check_only(flags, task, strategy)
    elif flags.checkpoint.eval_only or not task.trains:
        refuse([] if task.trains else _idle(flags))
        evaluate_only(flags, task, strategy)
    else:
        refuse(_idle(flags) if task.fitted else [])
        return train_in_directory(flags, argv, task, strategy)
    return EXIT_FINISHED


def _idle(flags: Flags) -> list[str]:
    """For a command that runs no training steps, returns a message for each given flag that affects only training."""
    names = ["epochs", "max_steps", *(field.name for field in dataclasses.fields(LearningFlags))]
    given = sorted(flags.given.intersection(map(flag_name, names)))
    return [f"{name}: has no effect, because the other flags train nothing; leave it out" for name in given]
