"""From a command line to an exit status: checks everything, builds everything, then calls train()."""

import functools
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from trainer.checkpoint.directory import RunDirectory
from trainer.commands.build import build_run, build_task, open_run, set_up_torch, start_parallel
from trainer.commands.evaluate import evaluate_only, score
from trainer.commands.flags import Flags, RunFlags, parse
from trainer.commands.predict import find_run, predict, rebuild_task
from trainer.commands.several import train_several
from trainer.commands.state import RunState, recorded
from trainer.config import refuse
from trainer.loading.errors import BadInput
from trainer.loading.files import DISK_FULL
from trainer.loop.precision import choose_precision
from trainer.loop.train import train
from trainer.parallel.base import Parallel
from trainer.parallel.environment import RankEnvironment, one_process_problems, read_rank_environment, torchrun_agent
from trainer.parallel.errors import EXIT_BAD_INPUT, Failure, print_refusal
from trainer.parallel.launch import launch, num_processes
from trainer.task import Task

EXIT_FINISHED = 0


def main(argv: Sequence[str], several_devices: bool, environment: RankEnvironment | None = None) -> int:
    """Runs one command line; returns the exit status.

    environment: who this process is, when it was started by `launch`; otherwise read from the environment.

    0: finished. 1: something failed that nobody foresaw, here or in another process. 2: something in the command line,
    the data or the run directory has to be changed first. 128 + n: one process, or a self-launched group, stopped by
    signal n with everything saved; a process that somebody else launched then returns 0, because launchers take
    anything else for a failure.
    """
    parallel: Parallel | None = None
    speaks = True
    try:
        flags, problems = parse(argv, several_devices)
        if flags.multi is not None and environment is None:
            environment, contradictions = read_rank_environment(os.environ, flags.multi)
            problems += contradictions
        elif flags.multi is None:
            problems += one_process_problems(os.environ)
        # Ranks of one launcher share a console and are wrong alike; those started by hand have a terminal each.
        speaks = environment is None or environment.local_rank in (None, 0)
        if flags.several.wanted and environment is not None:
            problems.append(f"{flags.several.as_given}: starts its runs by itself; leave the launcher out")
        refuse(problems)
        if flags.several.wanted:
            return train_several(flags, argv, functools.partial(main, several_devices=several_devices))
        if flags.multi is not None and flags.multi.multi_gpu == "ddp" and environment is None:
            world_size = num_processes(flags.multi, flags.devices.device)
            if world_size == 1 and flags.multi.nproc is None:
                print("One process, because this machine shows at most one device; --nproc N starts more.")
            # What a second start is to go on from must not be moved aside.
            again = [argument for argument in argv if argument != "--fresh"]
            start, start_again = (functools.partial(main, arguments, True) for arguments in (list(argv), again))
            return launch(start, world_size, start_again)
        speaks = True
        parallel = start_parallel(flags, environment)
        speaks = parallel.is_main
        with parallel.diagnosis.explaining():
            return run_command(flags, argv, parallel)
    except Failure as failure:
        return failure.status
    except BadInput as error:
        if speaks:
            print_refusal(error)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted before training began; nothing was changed", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        if parallel is not None:
            parallel.close()


def run_command(flags: Flags, argv: Sequence[str], parallel: Parallel) -> int:
    """Trains, evaluates or labels; returns the exit status. Raises BadInput."""
    set_up_torch(flags, parallel)
    if flags.prediction.predict is not None:
        label_new_data(flags, parallel)
        return EXIT_FINISHED
    task = parallel.together(lambda: build_task(flags))
    directory = RunDirectory(flags.checkpoint.save_dir, flags.checkpoint.keep_checkpoints, print)
    if flags.checkpoint.eval_only:
        evaluate_only(flags, task, parallel, directory)
        return EXIT_FINISHED
    agents = torchrun_agents(parallel)
    try:
        parallel.on_main(lambda: directory.acquire(flags.checkpoint.take_over_lock, agents))
        with recorded(directory, parallel) as state, refusing_full_disk(directory):
            return train_in(directory, flags, argv, task, parallel, state, agents)
    finally:
        directory.release()


@contextmanager
def refusing_full_disk(directory: RunDirectory) -> Iterator[None]:
    """Makes a BadInput of what the file system says when it has no room."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        advice = "earlier checkpoints are intact; free some space and run the same command again"
        raise BadInput(f"--save-dir {directory.path}: {error.strerror}; {advice}") from None


def label_new_data(flags: Flags, parallel: Parallel) -> None:
    """`--predict`. Standard output belongs to the table. Raises BadInput."""
    say = functools.partial(print, file=sys.stderr)
    directory = RunDirectory(flags.checkpoint.save_dir, flags.checkpoint.keep_checkpoints, say)
    trained = find_run(directory, flags.checkpoint.resume_from)
    task_name = flags.run.task if flags.run.task != RunFlags.task else None
    task = rebuild_task(trained, task_name, flags.task, flags.run.cache_dir.expanduser())
    precision = choose_precision(flags.precision, parallel.device)
    batch_size = flags.batch.eval_batch_size or flags.batch.batch_size
    predict(flags.prediction, trained, task, parallel, precision, batch_size)


def torchrun_agents(parallel: Parallel) -> list[str]:
    """The torchrun agents that started this run's processes; none without torchrun. All processes call it."""
    return sorted({agent for agent in parallel.gather(torchrun_agent()) if agent is not None})


def train_in(
    directory: RunDirectory,
    flags: Flags,
    argv: Sequence[str],
    task: Task,
    parallel: Parallel,
    state: RunState,
    agents: Sequence[str],
) -> int:
    """Trains in a directory that is held; returns the exit status."""
    run, notes = build_run(flags, task, parallel, directory)
    if run.is_complete and parallel.on_main(lambda: directory.has_results(run.progress.step, flags.run.test)):
        if parallel.is_main:
            print(
                f"This run is finished: {directory.path} holds its results after {run.progress.position.epoch} epochs. "
                "To train on raise --epochs, to start over add --fresh."
            )
        state.finished(run)
        return EXIT_FINISHED
    # What went wrong is told before this process takes the time to close, for the others wait until they know.
    with closing(run), parallel.diagnosis.explaining(), refusing_full_disk(directory):
        open_run(run, notes, flags, argv, directory, agents)
        run.stop.install()
        state.running(run)
        if train(run) and score(run, flags.run.test):
            state.finished(run)
            return EXIT_FINISHED
        state.preempted()
        run.log.say("Stopped as asked; everything is saved. The same command goes on from here.")
        if len(agents) > 1:
            # When a node joins, one agent is the first to ask. The others would take a good end for that of the job.
            run.stop.await_own()
        number = run.stop.signal_number
        return EXIT_FINISHED if parallel.is_launched or number is None else 128 + number
