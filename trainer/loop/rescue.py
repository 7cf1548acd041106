"""What is left of a run that failed or lost a process: the state after the last step, saved without the others.

No exchange is made, for there may be nobody to make it with. The main process saves, or if it is gone, a process of its
machine that has taken over the lock of the run directory. A process that lost the others in the middle of a step still
has what the step before left (Gupta et al., Just-In-Time Checkpointing, EuroSys 2024).
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.background import snapshot
from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.lock import LockTaken
from trainer.checkpoint.manifest import newest_best
from trainer.common.errors import DiskError, UnfitState, UserError, reason
from trainer.common.process import to_stdout
from trainer.failure.errors import EXIT_BAD_INPUT, EXIT_RESTART, Failure, print_error
from trainer.loop.checkpointing import Outline, diverged, refuse_another_model, state_of
from trainer.loop.learner import Learner
from trainer.loop.progress import Progress
from trainer.loop.run import Run
from trainer.loop.watch import Log, Place, StepRecord, Watch
from trainer.parallel.devices import DeviceQueue
from trainer.parallel.strategy import Strategy

COPY_WITHIN_S = 15.0
"""Of the 30 s that a launcher waits for the others once a process has died."""
LOCK_WITHIN_S = 20.0
DRAINS_WITHIN_S = 2.0
"""How long the device may take for work that waits for no other process."""
_one_at_a_time = threading.Lock()

Mark = Callable[[], bool]
"""Whether a moment in the work of the device has come."""


@dataclass(eq=False)
class AppliedStep:
    """progress: as it was after the step. applied: when the device had done it.

    Of the next one: forward, when it began; changes, when its optimizer began to change the weights.
    """

    progress: Progress
    applied: Mark
    forward: Mark | None = None
    changes: Mark | None = None


class LastStep(Watch):
    """Knows the last optimizer step that the device has done. Set by the thread that trains, and read by any.

    On a GPU the host has gone ahead, and the steps that it has enqueued wait behind an exchange that never ends. So a
    step leaves marks among the kernels. first: the optimizer steps done when training began.
    """

    def __init__(self, queue: DeviceQueue) -> None:
        self.queue = queue
        self._steps: deque[AppliedStep] = deque(maxlen=None if queue.lag else 1)
        self.first = 0

    def begin(self, progress: Progress) -> None:
        self.first = progress.step
        self._steps.clear()
        self._steps.append(AppliedStep(progress.copied(), self.queue.mark()))

    def at(self, place: Place) -> None:
        if not self._steps:
            return
        mark = self.queue.mark() if self.queue.lag else _it_has_come
        if place == "forward":
            self._steps[-1].forward = mark
        else:
            self._steps[-1].changes = mark

    def after_step(self, progress: Progress, record: StepRecord | None, log: Log) -> None:
        mark = self.queue.mark() if self.queue.lag else _it_has_come
        self._steps.append(AppliedStep(progress.copied(), mark))
        while len(self._steps) > 1 and self._steps[1].applied():
            self._steps.popleft()

    def find(self) -> tuple[AppliedStep, bool] | None:
        """The step whose weights and moments the device has now, and whether the forward of the next one has begun.

        None before training, and while an optimizer is at work.
        """
        self.queue.drain(DRAINS_WITHIN_S)
        done = [step for step in list(self._steps) if step.applied()]
        if not done or _has_come(done[-1].changes):
            return None
        return done[-1], _has_come(done[-1].forward)


def _it_has_come() -> bool:
    """The mark of a device that is never behind the host."""
    return True


def _has_come(mark: Mark | None) -> bool:
    return mark is not None and mark()


def rescue(run: Run, last: LastStep, end: Failure | UserError) -> None:
    """Saves what came since the newest checkpoint, where this process has it and is to do so, after a run has ended so.

    Where other processes were missed, and the directory now holds more than this start began with, the status of the
    failure becomes EXIT_RESTART: without that, what ends a run again and again ends it for good.
    """
    if isinstance(end, Failure):
        # Of data that are refused the main process has the UserError itself; a user who leaves at once does not wait.
        is_left = end.status == EXIT_BAD_INPUT or not str(end)
    else:
        is_left = isinstance(end, DiskError | LockTaken | UnfitState)
    if is_left:
        return
    lost = end.lost if isinstance(end, Failure) else None
    with _one_at_a_time:
        came_further = False
        try:
            came_further = run.group.can_replace_rank0(lost or (), run.strategy.has_full_state) and _save_last_step(
                run, last
            )
        except (UserError, OSError, RuntimeError) as error:  # of the device too, which may be what failed
            why = error if isinstance(error, UserError) else reason(error)
            print_error(f"the state after the last optimizer step could not be saved: {why}")
        if isinstance(end, Failure):
            end.status = EXIT_RESTART if lost is not None and came_further else end.status
            run.group.diagnosis.exit_status = end.status


def _save_last_step(run: Run, last: LastStep) -> bool:
    """Whether the newest checkpoint is of a later step than the one that this start began with. Raises UserError."""
    run.saver.end()  # a write under way is to be complete
    directory, say = run.directory, run.log.say if run.group.is_main else to_stdout
    if not directory.is_held:
        _take_over(directory)
    num_saved = directory.entries[-1].step if directory.entries else 0
    copied = partial(_copied, run.learner, run.strategy, last, num_saved, run.model_outline, run.facts)
    state = _in_time(copied) if run.strategy.has_full_state else None
    # The best checkpoint of which the state speaks may have died with whoever was writing it.
    saved = newest_best(directory.entries)
    if state is not None and (state["best"] is None or (saved is not None and saved.value == state["best"]["value"])):
        directory.save(state)
        num_saved = state["step"]
        say(f"The state after optimizer step {num_saved} is saved; the same command resumes from there.")
    elif run.progress.step > num_saved:
        why = "" if run.strategy.has_full_state else ", for no process has all of the parameters"
        say(f"The steps after optimizer step {num_saved}, the newest checkpoint, could not be saved{why}.")
    return num_saved > last.first


def _take_over(directory: RunDirectory) -> None:
    """Raises UserError when other survivors hold the directory for too long, or when it is not there any more."""
    deadline = time.monotonic() + LOCK_WITHIN_S
    while True:
        try:
            return directory.acquire(creates=False)
        except UserError:
            if time.monotonic() > deadline or not directory.path.exists():
                raise
        time.sleep(0.05)


def _in_time(copied: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
    """A copy of the state, or None where there is none or it takes too long."""
    found: list[dict[str, Any] | None] = []
    errors: list[Exception] = []

    def attempt() -> None:
        try:
            found.append(copied())
        except Exception as error:  # raised again where somebody waits for it
            errors.append(error)

    # By another thread, for the driver of a GPU may keep it for ever.
    thread = threading.Thread(target=attempt, name="rescue", daemon=True)
    thread.start()
    thread.join(COPY_WITHIN_S)
    if errors:
        raise errors[0]
    return found[0] if found else None


def _copied(
    learner: Learner, strategy: Strategy, last: LastStep, num_saved: int, outline: Outline, facts: dict[str, Any]
) -> dict[str, Any] | None:
    """The state after the last step, of more steps than were saved; None where there is no such state.

    outline, facts: see `Run`.
    """
    before = last.find()
    if before is None or before[0].progress.step <= num_saved or learner.ema.is_applied:
        return None
    step, is_in_next = before
    # What the run's own stream has still to do waits for the lost process, and is garbage once that is given up.
    with torch.no_grad(), last.queue.aside():
        if is_in_next:
            learner.buffers.undo()
        weights = strategy.full_state(learner.objective, learner.optimizers)
        learner.ema.put_into(weights, strategy.full_weights)
        lacks_totals = last.queue.lag > 0 or (strategy.num_parts > 0 and strategy.group.world_size > 1)
        state = state_of(learner, weights, *_own(step.progress, lacks_totals)) | facts
        # Locking pages may wait for the device.
        copied = snapshot(state, page_locked=False)
    # A thread that trains may have gone on meanwhile.
    is_whole = last.find() == before and not learner.ema.is_applied
    if not is_whole or diverged(learner.objective.model, copied["model"]):
        return None
    refuse_another_model(copied["model"], outline, step.progress.step)
    return copied | {"value": None, "is_best": False}


def _own(progress: Progress, lacks_totals: bool) -> tuple[Progress, dict[str, dict[str, Tensor]]]:
    """The progress with this process's own totals, and these.

    lacks_totals: the device may be behind the host, and nothing says which of the sums are done; or the samples of the
    parts that this process has summed are not counted.
    """
    totals = {phase: {} if lacks_totals else own.unreduced() for phase, own in progress.totals.items()}
    samples = 0 if lacks_totals else progress.own_samples
    reported = {
        phase: (float(sums["loss"]), float(sums["weight"])) if sums else (0.0, 0.0) for phase, sums in totals.items()
    }
    misses_samples = progress.misses_samples or samples < progress.samples
    own = replace(progress, reported=reported, samples=samples, misses_samples=misses_samples)
    own.read_clock()
    return own, totals
