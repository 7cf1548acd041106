"""Saves the state after the last finished step when a run fails or loses a process.

This rescue runs no collectives, because other processes may be gone. Rank 0 saves; if rank 0 is gone, a process on the
same machine takes over the lock of the run directory and saves. If other processes die in the middle of a step, this
process still has the state after the previous step (Gupta et al., Just-In-Time Checkpointing, EuroSys 2024).
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from copy import copy
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
from trainer.common.process import to_stdout, within
from trainer.failure.errors import EXIT_BAD_INPUT, EXIT_RESTART, Failure, print_error
from trainer.loop.checkpointing import Outline, diverged, refuse_another_model, state_of
from trainer.loop.learner import Learner
from trainer.loop.progress import Progress
from trainer.loop.run import Run
from trainer.loop.watch import Log, Place, StepRecord, Watch
from trainer.parallel.devices import DeviceQueue

COPY_WITHIN_S = 15.0
"""Maximum seconds for copying the state; a launcher such as torchrun kills processes 30 s after one has died."""
LOCK_WITHIN_S = 20.0
DRAINS_WITHIN_S = 2.0
"""Seconds for which a rescue waits for the device to finish work that does not depend on other processes."""
_one_at_a_time = threading.Lock()

Mark = Callable[[], bool]
"""Function that returns whether the device has reached a marked point in its queue of work."""


@dataclass(eq=False)
class AppliedStep:
    """A step that the host has submitted to the device. progress: the run's progress after the step.

    applied, forward, changes: tell whether the device has finished the step, has started the next step, and has begun
    to change weights in that step.
    """

    progress: Progress
    applied: Mark
    forward: Mark | None = None
    changes: Mark | None = None


class LastStep(Watch):
    """Finds the last optimizer step that the device has finished. Any thread may call `find`.

    On a GPU, the host runs ahead, and submitted steps may wait for a collective that never ends. CUDA events in the
    GPU's queue therefore show which steps it has finished. first: optimizer steps done when training began.
    """

    def __init__(self, queue: DeviceQueue) -> None:
        self.queue = queue
        self._steps: deque[AppliedStep] = deque(maxlen=None if queue.lag else 1)
        self.first = 0

    def begin(self, progress: Progress) -> None:
        self.first = progress.step
        self._steps.clear()
        self._steps.append(AppliedStep(copy(progress), self.queue.mark()))

    def at(self, place: Place) -> None:
        step, mark = self._steps[-1], self.queue.mark()
        if place == "update":
            step.changes = mark
        elif step.changes is None:
            step.forward = step.forward or mark
        else:  # the step has changed the weights and put them back
            self._steps.append(AppliedStep(step.progress, mark, mark))

    def after_step(self, progress: Progress, record: StepRecord | None, log: Log) -> None:
        self._steps.append(AppliedStep(copy(progress), self.queue.mark()))
        while len(self._steps) > 1 and self._steps[1].applied():
            self._steps.popleft()

    def find(self) -> tuple[AppliedStep, bool] | None:
        """Returns the last finished step, and whether the forward of the next step has started.

        Returns None before training, and while a step changes weights or has moved them.
        """
        self.queue.drain(DRAINS_WITHIN_S)
        done = [step for step in list(self._steps) if step.applied()]
        if not done or _has_come(done[-1].changes):
            return None
        return done[-1], _has_come(done[-1].forward)


def _has_come(mark: Mark | None) -> bool:
    return mark is not None and mark()


def rescue(run: Run, last: LastStep, end: Failure | UserError) -> None:
    """Saves the state after the last finished step, if no checkpoint contains it and this process may save.

    Sets the failure's exit status to EXIT_RESTART if other processes were lost and this launch saved a newer checkpoint
    than it resumed from. Without the second condition, a recurring failure would restart the run forever.
    """
    if isinstance(end, Failure):
        # After bad input, only rank 0 saves, as it gets a UserError. A Failure without message is a user's forced exit.
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
        except (UserError, OSError, RuntimeError) as error:  # a failed device raises RuntimeError
            why = error if isinstance(error, UserError) else reason(error)
            print_error(f"the state after the last optimizer step could not be saved: {why}")
        if isinstance(end, Failure):
            end.status = EXIT_RESTART if lost is not None and came_further else end.status
            run.group.diagnosis.exit_status = end.status


def _save_last_step(run: Run, last: LastStep) -> bool:
    """Saves the last finished step; returns whether this launch has saved a newer checkpoint than it resumed from."""
    run.saver.end()  # completes a pending write
    directory, say = run.directory, run.log.say if run.group.is_main else to_stdout
    if directory.lock is None:
        _take_over(directory)
    num_saved = directory.entries[-1].step if directory.entries else 0
    copied = partial(_copied, run.learner, last, num_saved, run.model_outline, run.facts)
    # limited, because the GPU driver may block forever
    state = within(COPY_WITHIN_S, copied) if run.strategy.has_full_state else None
    # A best checkpoint that is not yet on disk is lost with its writer; the saved state must not refer to it.
    saved = newest_best(directory.entries)
    if state is not None and (state["best"] is None or (saved is not None and saved.value == state["best"]["value"])):
        directory.save(state)
        num_saved = state["step"]
        say(f"The state after optimizer step {num_saved} is saved; the same command resumes from there.")
    elif run.progress.step > num_saved:
        why = "" if run.strategy.has_full_state else ", because no process has all parameters"
        say(f"The newest checkpoint is from optimizer step {num_saved}; later steps could not be saved{why}.")
    return num_saved > last.first


def _take_over(directory: RunDirectory) -> None:
    """Locks the run directory. Raises UserError if the directory is gone, or stays locked for `LOCK_WITHIN_S`."""
    deadline = time.monotonic() + LOCK_WITHIN_S
    while True:
        try:
            directory.acquire(gone=directory.token_of_rank_0)
            return
        except UserError:
            if time.monotonic() > deadline or not directory.path.exists():
                raise
        time.sleep(0.05)


def _copied(
    learner: Learner, last: LastStep, num_saved: int, outline: Outline, facts: dict[str, Any]
) -> dict[str, Any] | None:
    """Copies the state after the last finished step.

    Returns None if the state is already saved or changes during the copy. num_saved: step of the newest checkpoint.
    """
    before, strategy = last.find(), learner.strategy
    if before is None or before[0].progress.step <= num_saved or learner.ema.is_applied:
        return None
    step, is_in_next = before
    # The training stream may wait for a lost process forever, so another stream copies.
    with torch.no_grad(), last.queue.aside():
        if is_in_next:
            learner.buffers.undo()
        weights = strategy.full_state(learner.objective, learner.optimizers)
        learner.ema.put_into(weights, strategy.full_weights)
        lacks_totals = last.queue.lag > 0 or (strategy.num_parts > 0 and strategy.group.world_size > 1)
        state = state_of(learner, weights, *_own(step.progress, lacks_totals)) | facts
        # unpinned, because pinning memory may wait for the device
        copied = snapshot(state, pinned=False)
    # the training thread may have changed the state during the copy
    is_whole = last.find() == before and not learner.ema.is_applied
    if not is_whole or diverged(learner.objective.model, copied["model"]):
        return None
    refuse_another_model(copied["model"], outline, step.progress.step)
    return copied | {"value": None, "is_best": False}


def _own(progress: Progress, lacks_totals: bool) -> tuple[Progress, dict[str, dict[str, Tensor]]]:
    """Returns the progress and the totals (metric sums), both counting only this process's samples.

    lacks_totals: whether to drop the totals. On a GPU, totals may include unfinished steps; with `--parts`, they lack
    the parts of other ranks.
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
