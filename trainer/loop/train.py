"""The training loop, independent of task, devices and precision."""

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from trainer.common.errors import UserError
from trainer.loading.batches import WeightedBatch
from trainer.loading.order import Position
from trainer.loop.checkpointing import report_saving, save, try_saving
from trainer.loop.contract import monitored
from trainer.loop.evaluate import (
    after_validation,
    log_pictures,
    metrics_of,
    of_phase,
    start_epoch,
    training_metrics,
    validate,
)
from trainer.loop.learner import Learner
from trainer.loop.memory import OPTIMIZER, MemoryGuard, resplit
from trainer.loop.plan import Plan
from trainer.loop.precision import StepOutcome
from trainer.loop.progress import Progress
from trainer.loop.run import Run
from trainer.loop.watch import Log, StepRecord, Watch, settle
from trainer.loop.windows import Agreed, StopRequested, Window, agree_ahead
from trainer.parallel.group import Group
from trainer.task import Sums


def train(run: Run) -> None:
    """Trains from the run's position to the run's end. All checkpoints are on disk when this function returns.

    Raises StopRequested, after saving, if a user or `--max-minutes` stops the run, and UserError if training diverges.
    """
    progress = run.progress
    progress.read_clock()
    for watch in run.watches:
        watch.begin(progress)
    try:
        was_scored = progress.best is not None or progress.evaluations_since_best > 0  # also after a NaN score
        is_scored_first = run.settings.eval_start and run.plan.has_validation
        if (is_scored_first or run.plan.total == 0) and progress.step == 0 and not was_scored:
            report(run, at_start=True)
        while not run.is_complete:
            train_epoch(run)
            if not run.is_complete:  # early stopping may end the run within an epoch
                run.prepare_next_epoch()
                report(run)
    except StopRequested:
        settle(run.watches, run.log)
        # At an epoch's start, a resume calls `on_epoch_start` again, so the saved model must not have seen the call.
        if not (progress.position.at_epoch_start and progress.last_save == progress.step > 0):
            save(run)
        run.await_saver(run.saver.finish)
        raise
    run.await_saver(run.saver.finish)


def train_epoch(run: Run) -> None:
    """Trains to the end of the current epoch or of the run, with one optimizer step per global batch.

    A report due after a step is made just before the next step; if the run stops in between, the resumed run makes it.
    """
    progress, plan = run.progress, run.plan
    if progress.position.at_epoch_start:
        progress.start_epoch(progress.position.epoch, run.task.phases)
        run.task.at = progress.where(plan, run.group)
        start_epoch(run.task, run.learner, progress.position.epoch, run.log)

    def clock() -> tuple[bool, bool]:
        """Returns whether the time of `--max-minutes` is up, and whether a checkpoint is due."""
        since_save, lock = progress.seconds_since_reading, run.directory.lock
        is_lost = lock is not None and lock.is_lost  # another process has the lock; the next save raises
        saves = is_lost or 0 < 60 * run.saving.save_every_minutes <= since_save
        return 0 < 60 * run.settings.max_minutes <= progress.train_seconds + since_save, saves

    windows = run.prepared.pop("train", None) or run.windows(progress)
    start_segment(run.learner, run.watches, run.log, plan, progress.position)
    if plan.validates_after(progress.position.epoch + 1, progress.step):
        run.prepare_validation()
    for window, agreed in agree_ahead(windows, run.group, run.stop, clock if run.group.is_main else None):
        if progress.last_report < progress.step and plan.reports_after(progress.step):
            end_segment(run.watches, run.log)
            report(run)
            if run.is_complete:
                return
            start_segment(run.learner, run.watches, run.log, plan, progress.position)
        train_window(run, window, agreed)
    end_segment(run.watches, run.log)


def start_segment(learner: Learner, watches: Sequence[Watch], log: Log, plan: Plan, position: Position) -> None:
    """Prepares the log, the model and the observers for training until the next report."""
    log.start_segment(position, plan.epochs, plan.samples_per_epoch, plan.consumed(position))
    learner.train()
    for watch in watches:
        watch.resume()


def end_segment(watches: Sequence[Watch], log: Log) -> None:
    """Waits for the device and pauses the observers before a report."""
    settle(watches, log)
    for watch in watches:
        watch.pause()
    log.end_training()


def train_window(run: Run, window: Window, agreed: Agreed) -> None:
    """Runs one optimizer step, then logs and saves if either is due. agreed: values summed over all processes."""
    group, plan, progress = run.strategy.group, run.plan, run.progress
    step, phase, record = window.step, run.task.phases[window.step.phase], None
    num_samples = step.end - step.start
    group.activity.step = progress.step + 1
    if agreed.weight > 0:
        run.task.at = run.learner.where = progress.where(plan, group, phase, step.progress)
        learning_rate = run.learning_rate.at(step.progress, run.task.at.step, progress.rate_drops)
        key = run.settings.seed, step.epoch, step.phase, step.start
        sums, outcome = train_within_memory(
            run.memory,
            step.phase,
            window.micro_batches,
            lambda parts: train_step(run.learner, phase, parts, agreed.weight, key, learning_rate, run.watches),
            run.log,
        )
        progress.totals[phase].add(sums, window.weight, outcome.applied)
        progress.advance(step.after, num_samples, window.num_samples)
        record = StepRecord(progress.step, step, plan.orders[step.phase], sums, outcome)
    else:
        progress.advance(step.after)
    for watch in run.watches:
        watch.after_step(progress, record, run.log)
    run.log.advance(0 if plan.turns and step.phase > 0 else num_samples)  # in turns, phase 0 defines the epoch
    logs = record is not None and plan.logs_after(progress.step, step, run.settings.log_interval)
    # The clock may have asked before the last save. A report saves anyway, after its validation.
    asked = agreed.save > 0 and progress.step > progress.last_save + 2
    interval = run.saving.save_every_steps
    is_due = asked or (interval > 0 and progress.step % interval == 0)
    saves = is_due and not plan.reports_after(progress.step)
    if logs or saves:
        settle(run.watches, run.log)
    if logs:
        report_saving(run.saver, run.log)
        log_step(phase, run.task.phases, learning_rate, outcome.grad_norm, progress, group, run.log)
    if record is not None and phase not in run.tried_saving:
        try_saving(run.learner, run.model_outline, run.facts, progress, run.learning_rate.peak)
        run.tried_saving.add(phase)
    if saves:
        save(run)


def train_within_memory(
    memory: MemoryGuard,
    phase: int,
    micro_batches: Sequence[WeightedBatch],
    train: Callable[[Sequence[WeightedBatch]], tuple[Sums, StepOutcome]],
    log: Log,
) -> tuple[Sums, StepOutcome]:
    """Calls `train` with a step's micro-batches, split until they fit. Raises UserError if no split can help."""
    while True:
        if memory.limit.batch_size is not None:  # which may be lower than when the batches were loaded
            micro_batches = resplit(micro_batches, memory.splits[phase].micro_batch_size)
        try:
            return train(micro_batches)
        except RuntimeError as error:
            memory.require_hope(error)
        # Frees memory outside the handler, because the exception's frames refer to tensors.
        memory.make_room(phase, log.say)


def train_step(
    learner: Learner,
    phase: str,
    window: Sequence[WeightedBatch],
    total_weight: float,
    dropout_key: tuple[int, ...],
    learning_rate: float,
    watches: Sequence[Watch] = (),
) -> tuple[Sums, StepOutcome]:
    """Runs one optimizer step over this process's micro-batches; returns its sums, and the result of the update.

    window: micro-batches, each with its number of loss terms, 0 for a placeholder batch. total_weight: number of loss
    terms in the step over all processes, above 0. Each micro-batch's summed loss is divided by total_weight, so
    gradients add up to the gradient of the mean over all loss terms.
    """
    strategy, buffers = learner.strategy, learner.buffers if learner.buffers.is_active else None
    if buffers is not None:
        buffers.keep()
    for watch in watches:
        watch.at("forward")
    factor = strategy.gradient_divisor / total_weight
    sums = learner.accumulate_window(phase, window, factor, dropout_key)
    if buffers is not None:
        buffers.agree(strategy)
    strategy.exchange(learner.params[phase])
    strategy.group.activity.enter(OPTIMIZER)
    for watch in watches:
        watch.at("update")
    return sums, learner.update(phase, learning_rate, strategy.global_norm)


def log_step(
    phase: str,
    phases: Sequence[str],
    learning_rate: float,
    grad_norm: Tensor,
    progress: Progress,
    group: Group,
    log: Log,
) -> None:
    """Logs the mean loss since the last call, the learning rate and the gradient norm. Waits for the device."""
    totals = progress.totals[phase].reduced(group)
    loss, weight = float(totals["loss"]), float(totals["weight"])
    old_loss, old_weight = progress.reported[phase]
    mean_loss = (loss - old_loss) / (weight - old_weight) if weight > old_weight else math.nan  # all steps were skipped
    progress.reported[phase] = loss, weight
    values = {"train/loss": mean_loss, "learning_rate": learning_rate, "grad_norm": float(grad_norm)}
    named = {of_phase(name, phase, phases): value for name, value in values.items()}
    log.step(progress.step, progress.position, named)


def report(run: Run, at_start: bool = False) -> None:
    """Reports metrics at an epoch's end or between steps; validates if due, updates the best score, logs and saves.

    at_start: whether this report precedes the first step; its score is then the best until training improves on it.
    """
    task, group, plan, progress = run.task, run.group, run.plan, run.progress
    if at_start:
        progress.start_epoch(0, task.phases)
    ends_epoch = not at_start and plan.is_end_of_epoch(progress.position)
    num_epochs = progress.position.epoch + ends_epoch
    task.at = progress.where(plan, group)
    validation = validate(run) if at_start or plan.validates_after(num_epochs, progress.step) else {}
    try:
        metrics = {} if at_start else training_metrics(task, group, progress.totals)
        if ends_epoch and not metrics:
            run.log.say(f"Epoch {num_epochs} trained nothing: the weights of all samples are 0.")
        metrics |= metrics_of(task, group, validation)
        value = monitored(task, metrics) if validation else None
        if validation:
            progress.task_state = after_validation(task, group, metrics, progress.task_state)
    except UserError:
        if not at_start:  # an error in the task's metrics must not lose the steps since the last checkpoint
            save(run)
            run.await_saver(run.saver.finish)
        raise
    if progress.misses_samples:
        metrics["train/covered_samples"] = progress.samples
    if progress.skipped_steps:
        metrics["train/skipped_steps"] = progress.skipped_steps
    if ends_epoch:
        progress.start_epoch(num_epochs, task.phases)
    elif not at_start:
        progress.start_segment(task.phases)
    is_best = value is not None and progress.judge(value, task.monitor[1])
    if validation and run.learning_rate.drops_after(progress.evaluations_since_best):
        progress.rate_drops += 1
    if is_best or not plan.has_validation:
        progress.scores = metrics
    run.log.report(progress.step, progress.position, plan.epochs_done(progress.position), metrics)
    if validation:
        log_pictures(run, validation)
    save(run, value, is_best)
