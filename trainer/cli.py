"""From a command line to an exit status: reads the flags, and calls the command that they ask for."""

import functools
import os
import signal
import sys
from collections.abc import Sequence

from trainer.commands.build import build_task, set_up_torch, start_parallel
from trainer.commands.evaluate import evaluate_only
from trainer.commands.flags import Flags, parse
from trainer.commands.predict import label_new_data
from trainer.commands.several import train_several
from trainer.commands.train import EXIT_FINISHED, train_in_directory
from trainer.config import refuse
from trainer.loading.errors import BadInput
from trainer.logs.console import say
from trainer.parallel.base import Parallel
from trainer.parallel.environment import RankEnvironment, read_rank_environment
from trainer.parallel.errors import EXIT_BAD_INPUT, Failure, print_refusal
from trainer.parallel.launch import launch, num_processes


def main(argv: Sequence[str], several_devices: bool, environment: RankEnvironment | None = None) -> int:
    """Runs one command line; returns the exit status.

    environment: who this process is, when it was started by `launch`; otherwise read from the environment.

    0: finished. 1: something failed that nobody foresaw, here or in another process. 2: something in the command line,
    the data or the run directory has to be changed first. 128 + n: one process, or a self-launched group, stopped by
    signal n with everything saved; a process that somebody else launched then returns 0, because launchers take
    anything else for a failure.
    """
    reports = True  # whether this process, and not another one, tells the user of a mistake
    try:
        flags, problems = parse(argv, several_devices)
        if environment is None:
            environment, contradictions = read_rank_environment(os.environ, flags.multi)
            problems += contradictions
        # Ranks of one launcher share a console and are wrong alike; those started by hand have a terminal each.
        reports = environment is None or environment.local_rank in (None, 0)
        if flags.several.wanted and environment is not None:
            problems.append(f"{flags.several.as_given}: starts its runs by itself; leave the launcher out")
        refuse(problems)
        if flags.files.print_config:
            if reports:
                say(flags.as_toml())
            return EXIT_FINISHED
        if flags.several.wanted:
            return train_several(flags, argv, functools.partial(main, several_devices=several_devices))
        if flags.multi is not None and flags.multi.multi_gpu == "ddp" and environment is None:
            world_size = num_processes(flags.multi, flags.devices.device)
            if world_size == 1 and flags.multi.nproc is None:
                print("One process, because this machine shows at most one device; --nproc N starts more.")
            # What a second start is to go on from must not be moved aside.
            again = [*argv, "--fresh=false"]
            start, start_again = (functools.partial(main, arguments, True) for arguments in (list(argv), again))
            return launch(start, world_size, start_again)
        reports = True
        parallel = start_parallel(flags, environment)
        with parallel.in_use():
            return run_command(flags, argv, parallel)
    except Failure as failure:
        return failure.status
    except BadInput as error:
        if reports:
            print_refusal(error)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted before training began; nothing was changed", file=sys.stderr)
        return 128 + signal.SIGINT


def run_command(flags: Flags, argv: Sequence[str], parallel: Parallel) -> int:
    """Trains, evaluates or labels; returns the exit status. Raises BadInput."""
    set_up_torch(flags, parallel)
    if flags.prediction.predict is not None:
        label_new_data(flags, parallel)
        return EXIT_FINISHED
    task = parallel.together(lambda: build_task(flags))
    if flags.checkpoint.eval_only:
        evaluate_only(flags, task, parallel)
        return EXIT_FINISHED
    return train_in_directory(flags, argv, task, parallel)
