"""Trains in a run directory: builds or resumes a run, trains and evaluates it, and records how it ended.

state.json distinguishes a stop after saving, a user error and a crash, unlike torchrun's exit status.
"""

import os
import shlex
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.manifest import CONFIG, RESULTS, STATE, State, read_config, read_json, read_state, retention_of
from trainer.commands.baselines import find_baselines
from trainer.commands.build import build_run, open_run, start_loading
from trainer.commands.evaluate import better_can_be_scored, score
from trainer.commands.flags import Flags
from trainer.commands.resume import (
    brings_another_run,
    changed_since_last_start,
    differences,
    has_other_data,
    starts_over,
)
from trainer.common.errors import UserError
from trainer.common.files import DISK_FULL, refusing_disk_errors
from trainer.common.process import command_of_main
from trainer.failure.errors import EXIT_BAD_INPUT, EXIT_FINISHED, EXIT_INTERRUPTED, Failure
from trainer.flags import RunFlags
from trainer.logs.background import BackgroundLogger, build_loggers
from trainer.logs.console import say
from trainer.loop.memory import MEMORY
from trainer.loop.progress import Progress
from trainer.loop.rescue import LastStep, rescue
from trainer.loop.run import Run
from trainer.loop.train import train
from trainer.loop.windows import StopRequested, TimeIsUp
from trainer.parallel.devices import queue_of
from trainer.parallel.environment import torchrun_agent
from trainer.parallel.strategy import Strategy
from trainer.registry import SCRIPT
from trainer.task import Baseline, Task


def train_in_directory(flags: Flags, argv: Sequence[str], task: Task, strategy: Strategy) -> int:
    """Trains in `--save-dir` and returns the exit status. Raises UserError.

    The status is 0 if the run is finished or paused by `--max-minutes`, and 128 + n if it is stopped by signal n. With
    a launcher such as torchrun, which treats other statuses as failures, it is 0 for a stopped run too.
    """
    directory = RunDirectory(flags.checkpoint.save_dir, retention_of(flags.checkpoint, task), say)
    loggers: list[BackgroundLogger] = []
    strategy.group.on_main(lambda: loggers.extend(build_loggers(flags.run.logger or ())))
    agents = sorted({agent for agent in strategy.group.all_gather_object(torchrun_agent()) if agent is not None})
    advice = "earlier checkpoints are intact; free some space and run the same command again"
    refusing_full_disk = partial(refusing_disk_errors, f"--save-dir {directory.path}", advice, DISK_FULL)
    loading = start_loading(flags, task, strategy, trains=True)
    # a full disk may also stop run.close, which writes the last log lines
    with refusing_full_disk(), ExitStack() as at_the_end:
        at_the_end.callback(loading[0].close)
        at_the_end.callback(directory.release)
        directory.token_of_rank_0 = strategy.group.on_main(lambda: directory.acquire(agents))
        with recorded(directory, strategy) as state, refusing_full_disk():
            run, notes = build_run(flags, task, strategy, directory, loading)
            if (end := _end_without_training(run, flags)) is not None:
                state.run = run
                state.enter(*end)
                return EXIT_FINISHED
            # closing takes time, so it comes after error reports, for which other processes wait
            at_the_end.callback(run.close)
            open_run(run, notes, flags, argv, agents, loggers)
            baselines = find_baselines(task, strategy.group, flags.run, run.log, run.plan.num_steps)
            run.watches.insert(0, state.last_step)  # before watches whose collectives may fail
            run.learner.watches = [state.last_step]
            run.stop.install()
            strategy.group.diagnosis.flags_signals = True
            state.run = run  # from here on, a failure saves the completed steps
            return _train_to_end(state, flags.run, baselines, agents)


def _train_to_end(state: "RunState", flags: RunFlags, baselines: Mapping[str, Baseline], agents: Sequence[str]) -> int:
    """Trains and scores a run, records how it ended, and returns the exit status. agents: the torchrun agents."""
    run = state.run
    assert run is not None
    state.enter("running")
    try:
        with run.learner.launching():
            train(run)
            score(run, flags.no_test, baselines)
    except TimeIsUp:
        message = _time_is_up(flags.max_minutes, run.progress)
        state.enter("paused", message)
        run.log.say(f"{message}. Everything is saved.")
        return EXIT_FINISHED
    except StopRequested:
        state.enter("preempted")
    else:
        state.enter("finished")
        for line in _closing_lines(run.directory.path, run.task, flags.task, run.progress):
            run.log.say(line)
        return EXIT_FINISHED
    run.log.say("Stopped as asked; everything is saved. The same command resumes from here.")
    if len(agents) > 1:
        # When a node joins, one agent stops its processes first. For the other agents an exit with status 0 would end
        # the job, so their processes wait for their own signal.
        run.stop.await_own()
    return run.stop.exit_status if run.group.exits_with_signal else EXIT_FINISHED


def _end_without_training(run: Run, flags: Flags) -> tuple[State, str | None] | None:
    """Returns the final state, and a message for state.json, of a run that has nothing to do; None for other runs.

    Prints why: the run is trained and evaluated as requested, or its time is up. Raises UserError if the run was
    finished with other data.
    """
    progress, directory, given = run.progress, run.directory, flags.checkpoint
    if not run.is_complete:
        if not 0 < 60 * flags.run.max_minutes <= progress.train_seconds:
            return None
        message = _time_is_up(flags.run.max_minutes, progress)
        if run.group.is_main:
            say(message)
        return "paused", message
    if run.group.on_main(lambda: starts_over(directory, given) or brings_another_run(directory, given.resume_from)):
        return None
    results = run.group.on_main(lambda: read_json(directory.path / RESULTS))
    is_scored = results.get("scored") == "test" or flags.run.no_test or "test" not in run.task.splits()
    if not is_scored or results.get("step") != progress.step:
        return None
    if run.plan.has_validation and run.group.on_main(lambda: better_can_be_scored(directory, results)):
        return None
    in_epochs = flags.run.max_steps is None
    length = f"{progress.position.epoch} epochs" if in_epochs else f"{progress.step} optimizer steps"
    bounds = [flags.run.length_flag] if run.is_through else []
    bounds += ["--early-stopping-patience"] if run.is_out_of_patience else []
    raised = f"To continue training, raise {' and '.join(bounds)}"
    train_on = raised if run.plan.total else "Its model is fitted, not trained"
    run.group.on_main(lambda: _say_finished(directory.path, run.facts, length, train_on))
    return "finished", None


def _say_finished(path: Path, facts: Mapping[str, Any], length: str, train_on: str) -> None:
    others = differences(changed_since_last_start(path, facts["config"]))
    others = f", with {others}" if others else ""
    if has_other_data(read_config(path), facts):
        raise UserError(
            f"--save-dir {path}: contains a finished run on other data or with another helper{others}; choose another "
            "--save-dir, or start over with --fresh"
        )
    say(
        f"This run is finished: {path} contains its results after {length}{others}. {train_on}; to start over, add "
        "--fresh; for another run, choose another --save-dir."
    )


def _closing_lines(folder: Path, task: Task, task_name: str, progress: Progress) -> list[str]:
    """Returns lines that name the run's folder, the best epoch and the commands to run next."""
    best, epochs = progress.best, ""
    if best is not None and best.epoch:
        epochs = f"; its best epoch is {best.epoch} of {progress.position.epoch}, {task.monitor[0]} {best.value:.4f}"
    command = f"{command_of_main()} --save-dir {shlex.quote(str(folder))}"
    command += f" --task {shlex.quote(task_name)}" * (":" in task_name)  # a run's record cannot choose a task's file
    predicts = type(task).new_data is not Task.new_data
    uses = f"{command} --predict FILE (or --eval-only)" if predicts else f"{command} --eval-only"
    curves = f"show curves with tensorboard --logdir {shlex.quote(str(folder))}"
    is_script = task_name.endswith(f":{SCRIPT}")  # no command can load a script's model
    return [f"The run is in {folder}{epochs}.", f"Next: {curves if is_script else f'{uses}; {curves}'}"]


def _time_is_up(minutes: float, progress: Progress) -> str:
    return (
        f"--max-minutes {minutes:g}: time is up after {progress.train_seconds / 60:.3g} minutes and {progress.step} "
        "optimizer steps of training; to continue, raise --max-minutes or leave it out"
    )


class RunState:
    """Writes state.json of a locked run directory. last_step: observer of steps, to be added to `Run.watches`."""

    def __init__(self, directory: RunDirectory, strategy: Strategy) -> None:
        self._directory = directory
        self._strategy = strategy
        self.run: Run | None = None
        self.last_step = LastStep(queue_of(strategy.device))

    def enter(self, state: State, message: str | None = None) -> None:
        """Records a state; skips a repeated "finished". All processes must call it. Raises UserError on disk errors."""
        own = self.run.stop.signal_number if self.run is not None else None
        received = next((number for number in self._strategy.group.all_gather_object(own) if number is not None), None)
        self._strategy.group.on_main(lambda: self._write(state, message, received))

    def record_failure(self, error: BaseException) -> None:
        """Saves the state of the last step, if possible, and records the failure.

        Writes nothing if the directory is not locked or contains no run.
        """
        run, directory, message = self.run, self._directory, str(error) or None
        status = error.status if isinstance(error, Failure) else None
        status = EXIT_BAD_INPUT if isinstance(error, UserError) else status
        state: State = "refused" if status == EXIT_BAD_INPUT else "failed"
        if not isinstance(error, UserError | Failure):
            message = None  # the message of an unexpected error is not for users
        elif run is not None:
            ends_well = self._strategy.has_full_state and not run.group.exits_with_signal
            if isinstance(error, Failure) and status == EXIT_INTERRUPTED and ends_well:
                error.status = EXIT_FINISHED
            rescue(run, self.last_step, error)
        if directory.lock is None:
            return
        newest = directory.entries[-1].step if directory.entries else 0
        if run is not None and status == EXIT_INTERRUPTED and newest >= run.progress.step:
            state, message, run.stop.signal_number = "preempted", None, signal.SIGINT
        with suppress(UserError):
            if run is not None or directory.has_checkpoint or (directory.path / CONFIG).exists():
                self._write(state, message)
        with suppress(UserError):
            if isinstance(error, Failure) and error.memory_limit is not None:
                directory.write_json(MEMORY, dict(error.memory_limit))

    def fail(self, failure: Failure) -> None:
        """Records another process's failure while the main thread hangs; called in a separate thread."""
        if self.run is not None:
            self.run.saver.end()  # completes a pending write
        self.record_failure(failure)

    def _write(self, state: State, message: str | None, received: int | None = None) -> None:
        """Writes state.json. received: number of the stop signal that a process received, if the caller knows it."""
        run, path = self.run, self._directory.path / STATE
        if run is not None:
            run.log.state = state
        if state == "finished" == read_state(path.parent):
            return
        self._directory.write_json(
            STATE,
            {
                "state": state,
                "epoch": run.progress.position.epoch if run is not None else None,
                "step": run.progress.step if run is not None else None,
                "signal": received or (run.stop.signal_number if run is not None else None),
                "message": message,
                "host": socket.gethostname(),
                "process": os.getpid(),
                "time": datetime.now(UTC).isoformat(timespec="seconds"),
            },
        )


@contextmanager
def recorded(directory: RunDirectory, strategy: Strategy) -> Iterator[RunState]:
    """Records in state.json of the locked directory any exception that leaves the context."""
    state = RunState(directory, strategy)
    strategy.group.diagnosis.before_forced_end(state.fail)
    try:
        with strategy.group.diagnosis.explaining():
            yield state
    except KeyboardInterrupt:
        raise  # raised only before training, when nothing has changed
    except BaseException as error:  # includes a second Ctrl-C, which ends the run without a save
        state.record_failure(error)
        raise
