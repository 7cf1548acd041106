"""The training loop. Read this first, top to bottom.

It does not know which task it trains, on how many devices, or in which precision.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from trainer.common.errors import UserError
from trainer.loading.batches import WeightedBatch
from trainer.loop.checkpointing import finish_saving, report_saving, save, try_saving
from trainer.loop.contract import monitored, require_sums
from trainer.loop.evaluate import log_pictures, start_epoch, validate
from trainer.loop.learner import Learner
from trainer.loop.memory import OPTIMIZER
from trainer.loop.run import Run
from trainer.loop.totals import add_sums, counted
from trainer.loop.watch import StepRecord, StepResult, Watch, settle
from trainer.loop.windows import Agreed, StopRequested, Window, agree_ahead, training_windows
from trainer.parallel.strategy import Strategy
from trainer.task import Sums


def train(run: Run) -> None:
    """Trains from the run's position to its end; when it returns, everything is on the disk.

    Raises StopRequested, with all progress saved, if the run was asked to stop or its time is up; UserError if training
    diverges.
    """
    progress = run.progress
    progress.read_clock()
    for watch in run.watches:
        watch.begin(progress)
    try:
        was_scored = progress.best is not None or progress.evaluations_since_best > 0  # as after a score that is NaN
        if run.settings.eval_start and run.plan.has_validation and progress.step == 0 and not was_scored:
            report_start(run)
        while not run.is_complete:
            train_epoch(run)
            if not run.is_complete:  # as early stopping within an epoch leaves it
                report(run)
    except StopRequested:
        settle(run.watches, run.log)
        # What an epoch's start does to the model is done again at the next start, to the model as it was before.
        if not (progress.position.at_epoch_start and progress.last_save == progress.step > 0):
            save(run)
        finish_saving(run.group, run.saver)
        raise
    finish_saving(run.group, run.saver)


def train_epoch(run: Run) -> None:
    """Trains what is left of the current epoch, or of the run: one optimizer step for each global batch.

    Where a report is due within the epoch it comes before the next step, so that a run which was stopped or killed
    meanwhile makes up for it.
    """
    progress = run.progress
    if progress.position.at_epoch_start:
        progress.start_epoch(progress.position.epoch, run.task.phases)
        start_epoch(run.task, run.learner, run.strategy, progress.position.epoch, run.log)
    start_segment(run)
    for window, agreed in agree_ahead(run, training_windows(run), is_training=True):
        if progress.last_report < progress.step and run.plan.reports_after(progress.step):
            end_stretch(run)
            report(run)
            if run.is_complete:
                return
            start_segment(run)
        train_window(run, window, agreed)
    end_stretch(run)


def start_segment(run: Run) -> None:
    """Begins what is trained between two reports."""
    position, plan = run.progress.position, run.plan
    run.log.start_segment(position, plan.epochs, plan.samples_per_epoch, plan.consumed(position))
    run.learner.train()
    for watch in run.watches:
        watch.resume()


def end_stretch(run: Run) -> None:
    """Waits until all steps so far are done."""
    settle(run.watches, run.log)
    for watch in run.watches:
        watch.pause()
    run.log.end_training()


def train_window(run: Run, window: Window, agreed: Agreed) -> None:
    """Trains on one global batch, and logs and saves what is due. agreed: what all processes say of it."""
    progress, step, phase = run.progress, window.step, run.task.phases[window.step.phase]
    start, total_weight = progress.position, agreed.weight
    run.group.activity.step = progress.step + 1
    learning_rate, record = run.learning_rate_of(step), None
    if total_weight > 0:
        result = run.memory.train(
            step.phase, window.micro_batches, partial(
                train_step, run.learner, run.strategy, phase, total_weight=total_weight,
                dropout_key=(run.settings.seed, step.epoch, step.phase, step.start), learning_rate=learning_rate,
                watches=run.watches,
            ), run.log.say,
        )  # fmt: skip
        progress.totals[phase].add(result.sums, window.weight, result.applied)
        progress.count(step.end - step.start, window.num_samples)
        record = StepRecord(progress.step + 1, step, run.plan.orders[step.phase], result)
    progress.advance(step.after)
    for watch in run.watches:
        watch.after_step(progress, record, run.log)
    run.log.advance(run.plan.consumed(step.after) - run.plan.consumed(start))
    logs = total_weight > 0 and run.plan.logs_after(progress.step, step, run.settings.log_interval)
    saves = saves_after_step(run, agreed)
    if logs or saves:
        settle(run.watches, run.log)
    if logs:
        log_step(run, phase, learning_rate, result.grad_norm)
    if total_weight > 0 and phase not in run.tried_saving:
        try_saving(run.learner, run.group, run.model_outline, progress, run.learning_rate.peak)
        run.tried_saving.add(phase)
    if saves:
        save(run)


def saves_after_step(run: Run, agreed: Agreed) -> bool:
    """Whether a checkpoint is due after the last step, and not made anyway by a report within the epoch.

    At an epoch's end there may be two: one before its validation, which may take long, and one with the score.
    """
    num_steps, interval = run.progress.step, run.settings.save_every_steps
    # What the clock asked for before the last checkpoint may be on its way for two more steps.
    clock_asks = agreed.save > 0 and num_steps > run.progress.last_save + 2
    return (clock_asks or (interval > 0 and num_steps % interval == 0)) and not run.plan.reports_after(num_steps)


def train_step(
    learner: Learner,
    strategy: Strategy,
    phase: str,
    window: Sequence[WeightedBatch],
    total_weight: float,
    dropout_key: tuple[int, ...],
    learning_rate: float,
    watches: Sequence[Watch] = (),
) -> StepResult:
    """One optimizer step over a window of micro-batches; exact for any split of the samples.

    window: each micro-batch with its weight, the number of its loss terms; a placeholder adds nothing.
    total_weight: the loss terms of the window over all processes, above 0. Every micro-batch contributes its sum of
    losses divided by it, so that the gradient is that of one mean over all terms, however they are spread.
    """
    sums: Sums = {}
    group, params = strategy.group, learner.params[phase]
    net, same_masks = learner.enter(phase), learner.objective.same_masks
    learner.buffers.keep()
    for watch in watches:
        watch.before_step()
    for i, (batch, _, num_samples) in enumerate(window):
        strategy.seed_dropout(*dropout_key, 0 if same_masks else i, same_everywhere=same_masks)
        is_last = i == len(window) - 1
        with strategy.gradient_sync(net, enabled=is_last), learner.buffers.of_samples(num_samples):
            group.activity.enter("forward")
            outputs = net(strategy.to_device(batch), phase)
            require_sums(outputs, learner.objective, phase)
            part = counted(outputs, num_samples > 0)
            if is_last:
                learner.buffers.start_agreement(group)
            group.activity.enter("backward")
            learner.precision.backward(part["loss"], strategy.gradient_divisor / total_weight)
        add_sums(sums, {name: value.detach() if value.requires_grad else value for name, value in part.items()})
    learner.buffers.agree(strategy)
    strategy.exchange(params)
    group.activity.enter(OPTIMIZER)
    for watch in watches:
        watch.before_update()
    learner.set_learning_rate(phase, learning_rate)  # not before, for a rescue saves it with the weights
    outcome = learner.precision.step(learner.optimizers[phase], params, learner.max_grad_norm, strategy.global_norm)
    learner.buffers.undo_unless(outcome.applied)
    if outcome.applied is not False:
        learner.after_step(phase)
    learner.ema.update(outcome.applied, phase, params)
    return StepResult(sums, *outcome)


def log_step(run: Run, phase: str, learning_rate: float, grad_norm: Tensor) -> None:
    """Logs the mean loss since the last time; the one place in the step that waits for the device."""
    report_saving(run.saver, run.log)
    progress = run.progress
    totals = progress.totals[phase].reduced(run.group)
    loss, weight = float(totals["loss"]), float(totals["weight"])
    old_loss, old_weight = progress.reported[phase]
    mean_loss = (loss - old_loss) / (weight - old_weight) if weight > old_weight else math.nan  # all steps were skipped
    progress.reported[phase] = loss, weight
    values = {"train/loss": mean_loss, "learning_rate": learning_rate, "grad_norm": float(grad_norm)}
    run.log.step(progress.step, progress.position, {run.of_phase(name, phase): value for name, value in values.items()})


def report_start(run: Run) -> None:
    """Scores the validation sets before the first step: what training does not improve is the best."""
    run.progress.start_epoch(0, run.task.phases)
    validation = validate(run)
    conclude(run, validation, run.metrics(validation))


def report(run: Run) -> None:
    """Scores the validation sets where that is due, decides about "best", logs and saves: what an epoch ends with.

    Within an epoch it changes nothing else, and training goes on as if it had not been.
    """
    progress, phases = run.progress, run.task.phases
    ends_epoch = run.plan.is_end_of_epoch(progress.position)
    num_epochs = progress.position.epoch + ends_epoch
    validation = validate(run) if run.plan.validates_after(num_epochs, progress.step) else {}
    with keeping_steps(run):
        metrics = run.training_metrics() | run.metrics(validation)
        if validation:
            monitored(run.task, metrics)
    if progress.misses_samples:
        metrics["train/covered_samples"] = progress.samples
    if progress.skipped_steps:
        metrics["train/skipped_steps"] = progress.skipped_steps
    if ends_epoch:
        progress.start_epoch(num_epochs, phases)
    else:
        progress.start_segment(phases)
    conclude(run, validation, metrics)


@contextmanager
def keeping_steps(run: Run) -> Iterator[None]:
    """A mistake in the task's metrics, which all processes raise, does not cost the steps since the last checkpoint."""
    try:
        yield
    except UserError:
        save(run)
        finish_saving(run.group, run.saver)
        raise


def conclude(run: Run, validation: Mapping[str, Sums], metrics: Mapping[str, float]) -> None:
    """Judges, logs and saves what a report found."""
    progress = run.progress
    value = monitored(run.task, metrics) if validation else None
    is_best = value is not None and progress.judge(value, run.task.monitor[1])
    run.log.report(progress.step, progress.position, run.plan.epochs_done(progress.position), metrics)
    if validation:
        log_pictures(run, validation)
    save(run, value, is_best)
