"""Training in a run directory: builds the run or finds it finished, trains, scores, and records how it ended."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.manifest import RESULTS, read_json, retention_of
from trainer.commands.build import build_run, open_run
from trainer.commands.evaluate import better_can_be_scored, score
from trainer.commands.flags import Flags
from trainer.commands.resume import brings_another_run, changed_since_last_start, differences
from trainer.commands.state import RunState, recorded
from trainer.common.files import DISK_FULL, refusing_disk_errors
from trainer.logs.background import BackgroundLogger, build_loggers
from trainer.logs.console import say
from trainer.loop.run import Run
from trainer.loop.train import train
from trainer.loop.windows import StopRequested, TimeIsUp
from trainer.parallel.base import Parallel
from trainer.parallel.environment import torchrun_agent
from trainer.parallel.errors import EXIT_FINISHED
from trainer.task import Task


def train_in_directory(flags: Flags, argv: Sequence[str], task: Task, parallel: Parallel) -> int:
    """Trains in `--save-dir`; returns the exit status. Raises UserError.

    0: finished, or paused by `--max-minutes`, or stopped where a launcher would take anything else for a failure.
    128 + n: stopped by signal n.
    """
    directory = RunDirectory(
        flags.checkpoint.save_dir,
        retention_of(flags.checkpoint, task),
        say,
    )
    loggers: list[BackgroundLogger] = []
    parallel.on_main(lambda: loggers.extend(build_loggers(flags.run.logger or ())))
    agents = sorted({agent for agent in parallel.gather(torchrun_agent()) if agent is not None})
    advice = "earlier checkpoints are intact; free some space and run the same command again"
    refusing_full_disk = partial(refusing_disk_errors, f"--save-dir {directory.path}", advice, DISK_FULL)
    # Once more around the end: closing a log writes what found no room before.
    with refusing_full_disk(), ExitStack() as at_the_end:
        at_the_end.callback(directory.release)
        parallel.on_main(lambda: directory.acquire(agents))
        with recorded(directory, parallel) as state, refusing_full_disk():
            run, notes = build_run(flags, task, parallel, directory)
            if _is_finished(run, flags):
                state.enter("finished", run)
                return EXIT_FINISHED
            if not run.is_complete and run.time_is_up:
                if parallel.is_main:
                    say(_time_is_up(run))
                state.enter("paused", run, _time_is_up(run))
                return EXIT_FINISHED
            # Closing takes time, and comes when what went wrong has been told: the others wait until they know.
            at_the_end.callback(run.close)
            open_run(run, notes, flags, argv, agents, loggers)
            return _train(run, flags, state, agents)


def _is_finished(run: Run, flags: Flags) -> bool:
    """Whether nothing is left to do, with test scores if these are wanted; says so."""
    progress, path = run.progress, run.directory.path
    if not run.is_complete:
        return False
    if run.parallel.on_main(lambda: brings_another_run(run.directory, flags.checkpoint.resume_from)):
        return False
    results = run.parallel.on_main(lambda: read_json(path / RESULTS))
    is_finished = results.get("step") == progress.step and (results.get("scored") == "test" or flags.run.no_test)
    if (
        is_finished
        and run.plan.has_validation
        and run.parallel.on_main(lambda: better_can_be_scored(run.directory, results))
    ):
        return False
    if is_finished and run.parallel.is_main:
        in_epochs = flags.run.max_steps is None
        length = f"{progress.position.epoch} epochs" if in_epochs else f"{progress.step} optimizer steps"
        bounds = [flags.run.length_flag] if run.is_through else []
        bounds += ["--early-stopping-patience"] if run.is_out_of_patience else []
        others = differences(changed_since_last_start(path, run.facts["config"]))
        say(
            f"This run is finished: {path} holds its results after {length}{others and ', with '}{others}. To train on "
            f"raise {' and '.join(bounds)}, to start over add --fresh, for another run choose another --save-dir."
        )
    return is_finished


def _time_is_up(run: Run) -> str:
    """As of the last checkpoint, which a pause makes."""
    limit, minutes = run.settings.max_s / 60, run.progress.train_seconds / 60
    return (
        f"--max-minutes {limit:g}: used up, after {minutes:.3g} minutes and {run.progress.step} optimizer steps of "
        "training; to train on raise it or leave it out, to score what there is add --eval-only"
    )


def _train(run: Run, flags: Flags, state: RunState, agents: Sequence[str]) -> int:
    run.stop.install()
    run.parallel.diagnosis.flags_signals = True
    state.enter("running", run)
    try:
        train(run)
        score(run, not flags.run.no_test)
    except TimeIsUp:
        state.enter("paused", run, _time_is_up(run))
        run.log.say(f"{_time_is_up(run)}. Everything is saved.")
        return EXIT_FINISHED
    except StopRequested:
        state.enter("preempted", run)
    else:
        state.enter("finished", run)
        return EXIT_FINISHED
    run.log.say("Stopped as asked; everything is saved. The same command goes on from here.")
    if len(agents) > 1:
        # When a node joins, one agent is the first to ask. The others would take a good end for that of the job.
        run.stop.await_own()
    return run.stop.exit_status if run.parallel.exits_with_signal else EXIT_FINISHED
