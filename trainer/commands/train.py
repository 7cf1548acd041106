"""Training in a run directory: builds the run or finds it finished, trains, scores, and records how it ended.

state.json says what became of the run. Launchers such as torchrun exit alike after a stop with everything saved, a
mistake of the user and a crash; this file tells them apart.
"""

import os
import shlex
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.manifest import CONFIG, RESULTS, STATE, State, read_json, read_state, retention_of
from trainer.commands.baselines import find_baselines
from trainer.commands.build import build_run, open_run, start_loading
from trainer.commands.evaluate import better_can_be_scored, score
from trainer.commands.flags import Flags
from trainer.commands.resume import brings_another_run, changed_since_last_start, differences
from trainer.common.errors import UserError
from trainer.common.files import DISK_FULL, refusing_disk_errors
from trainer.failure.errors import EXIT_BAD_INPUT, EXIT_FINISHED, EXIT_INTERRUPTED, Failure
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
from trainer.task import Task


def train_in_directory(flags: Flags, argv: Sequence[str], task: Task, strategy: Strategy) -> int:
    """Trains in `--save-dir`; returns the exit status. Raises UserError.

    0: finished, or paused by `--max-minutes`, or stopped where a launcher would take anything else for a failure.
    128 + n: stopped by signal n.
    """
    directory = RunDirectory(flags.checkpoint.save_dir, retention_of(flags.checkpoint, task), say)
    loggers: list[BackgroundLogger] = []
    strategy.group.on_main(lambda: loggers.extend(build_loggers(flags.run.logger or ())))
    agents = sorted({agent for agent in strategy.group.gather(torchrun_agent()) if agent is not None})
    advice = "earlier checkpoints are intact; free some space and run the same command again"
    refusing_full_disk = partial(refusing_disk_errors, f"--save-dir {directory.path}", advice, DISK_FULL)
    loading = start_loading(flags, task, strategy, trains=True)
    # Also around closing: it writes the log lines that a full disk held back.
    with refusing_full_disk(), ExitStack() as at_the_end:
        at_the_end.callback(loading[0].close)
        at_the_end.callback(directory.release)
        strategy.group.on_main(lambda: directory.acquire(agents))
        with recorded(directory, strategy) as state, refusing_full_disk():
            run, notes = build_run(flags, task, strategy, directory, loading)
            if _is_finished(run, flags):
                state.run = run
                state.enter("finished")
                return EXIT_FINISHED
            if not run.is_complete and 0 < 60 * flags.run.max_minutes <= run.progress.train_seconds:
                message = _time_is_up(flags.run.max_minutes, run.progress)
                if strategy.group.is_main:
                    say(message)
                state.run = run
                state.enter("paused", message)
                return EXIT_FINISHED
            # Closing takes time, and comes when what went wrong has been told: the others wait until they know.
            at_the_end.callback(run.close)
            open_run(run, notes, flags, argv, agents, loggers)
            baselines = find_baselines(task, strategy.group, flags.run, run.log, run.plan.num_steps)
            run.watches.insert(0, state.last_step)  # before those that exchange something and may lose a process
            run.stop.install()
            strategy.group.diagnosis.flags_signals = True
            state.run = run  # not before: until here there is no step to rescue
            state.enter("running")
            try:
                with run.learner.launching():
                    train(run)
                    score(run, flags.run.no_test, baselines)
            except TimeIsUp:
                message = _time_is_up(flags.run.max_minutes, run.progress)
                state.enter("paused", message)
                run.log.say(f"{message}. Everything is saved.")
                return EXIT_FINISHED
            except StopRequested:
                state.enter("preempted")
            else:
                state.enter("finished")
                for line in _closing_lines(directory.path, task, flags.run.task, run.progress):
                    run.log.say(line)
                return EXIT_FINISHED
            run.log.say("Stopped as asked; everything is saved. The same command resumes from here.")
            if len(agents) > 1:
                # When a node joins, one agent is the first to ask. The others would take a good end for the job's.
                run.stop.await_own()
            return run.stop.exit_status if strategy.group.exits_with_signal else EXIT_FINISHED


def _is_finished(run: Run, flags: Flags) -> bool:
    """Whether nothing is left to do, with test scores if these are wanted; says so."""
    progress, path = run.progress, run.directory.path
    if not run.is_complete:
        return False
    if run.group.on_main(lambda: brings_another_run(run.directory, flags.checkpoint.resume_from)):
        return False
    results = run.group.on_main(lambda: read_json(path / RESULTS))
    is_scored = results.get("scored") == "test" or flags.run.no_test or "test" not in run.task.splits()
    is_finished = results.get("step") == progress.step and is_scored
    if is_finished and run.plan.has_validation:
        is_finished = not run.group.on_main(lambda: better_can_be_scored(run.directory, results))
    if is_finished and run.group.is_main:
        in_epochs = flags.run.max_steps is None
        length = f"{progress.position.epoch} epochs" if in_epochs else f"{progress.step} optimizer steps"
        bounds = [flags.run.length_flag] if run.is_through else []
        bounds += ["--early-stopping-patience"] if run.is_out_of_patience else []
        train_on = f"To train on raise {' and '.join(bounds)}" if run.plan.total else "Its model is fitted, not trained"
        others = differences(changed_since_last_start(path, run.facts["config"]))
        say(
            f"This run is finished: {path} holds its results after {length}{others and ', with '}{others}. {train_on}, "
            "to start over add --fresh, for another run choose another --save-dir."
        )
    return is_finished


def _closing_lines(folder: Path, task: Task, task_name: str, progress: Progress) -> list[str]:
    """Where a finished run lies, which epoch was best, and the next commands. task_name: the value of `--task`."""
    best, epochs = progress.best, ""
    if best is not None and best.epoch:
        epochs = f"; its best epoch is {best.epoch} of {progress.position.epoch}, {task.monitor[0]} {best.value:.4f}"
    command = f"python main.py --save-dir {shlex.quote(str(folder))}"
    command += f" --task {shlex.quote(task_name)}" * (":" in task_name)  # which no record may name for a user
    predicts = type(task).new_data is not Task.new_data
    uses = f"{command} --predict FILE (or --eval-only)" if predicts else f"{command} --eval-only"
    curves = f"curves by tensorboard --logdir {shlex.quote(str(folder))}"
    is_script = task_name.endswith(f":{SCRIPT}")  # whose model no command has
    return [f"The run is in {folder}{epochs}.", f"Next: {curves if is_script else f'{uses}; {curves}'}"]


def _time_is_up(minutes: float, progress: Progress) -> str:
    return (
        f"--max-minutes {minutes:g}: used up, after {progress.train_seconds / 60:.3g} minutes and {progress.step} "
        "optimizer steps of training; to train on raise it or leave it out, to score what there is add --eval-only"
    )


class RunState:
    """Writes the state of the run in a directory that is held. last_step: to be among the watches of that run."""

    def __init__(self, directory: RunDirectory, strategy: Strategy) -> None:
        self._directory = directory
        self._strategy = strategy
        self.run: Run | None = None
        self.last_step = LastStep(queue_of(strategy.device))

    def enter(self, state: State, message: str | None = None) -> None:
        """All processes call it. A file that says "finished" already stays. Raises UserError when the disk refuses."""
        self._strategy.group.on_main(lambda: self._write(state, message))

    def record_failure(self, error: BaseException) -> None:
        """Rescues what may be left of the last steps, and notes the reason, as far as the disk allows.

        Does nothing where there is no run to speak of.
        """
        known = isinstance(error, UserError | Failure)
        status = EXIT_BAD_INPUT if isinstance(error, UserError) else getattr(error, "status", None) if known else None
        state: State = "refused" if status == EXIT_BAD_INPUT else "failed"
        is_stop = status == EXIT_INTERRUPTED
        run, strategy, directory = self.run, self._strategy, self._directory
        if run is not None and isinstance(error, UserError | Failure):
            if (
                isinstance(error, Failure)
                and is_stop
                and strategy.has_full_state
                and not strategy.group.exits_with_signal
            ):
                error.status = EXIT_FINISHED
            rescue(run, self.last_step, error)
        if not directory.is_held:
            return
        newest = directory.entries[-1].step if directory.entries else 0
        if is_stop and run is not None and newest >= run.progress.step:
            state, run.stop.signal_number = "preempted", signal.SIGINT
        # Of whatever else ends it, such as the second Ctrl-C, there is nothing to tell.
        message = str(error) or None if known and state != "preempted" else None
        with suppress(UserError):
            if run is not None or directory.has_checkpoint or (directory.path / CONFIG).exists():
                self._write(state, message)
        with suppress(UserError):
            if isinstance(error, Failure) and error.memory_limit is not None:
                directory.write_json(MEMORY, dict(error.memory_limit))

    def fail(self, failure: Failure) -> None:
        """Another process failed, and this one is stuck. Called by another thread than the one that trains."""
        if self.run is not None:
            self.run.saver.end()  # what is being saved is to be complete
        self.record_failure(failure)

    def _write(self, state: State, message: str | None = None) -> None:
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
                "signal": run.stop.signal_number if run is not None else None,
                "message": message,
                "host": socket.gethostname(),
                "process": os.getpid(),
                "time": datetime.now(UTC).isoformat(timespec="seconds"),
            },
        )


@contextmanager
def recorded(directory: RunDirectory, strategy: Strategy) -> Iterator[RunState]:
    """Around all that happens while a directory is held: notes whatever ends it by an exception."""
    state = RunState(directory, strategy)
    strategy.group.diagnosis.before_forced_end(state.fail)
    try:
        with strategy.group.diagnosis.explaining():
            yield state
    except KeyboardInterrupt:
        raise  # before training began: nothing has changed
    except BaseException as error:  # the second Ctrl-C too, which does not wait for a save
        state.record_failure(error)
        raise
