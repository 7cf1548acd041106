"""The training loop. Read this first, top to bottom.

It does not know which task it trains, on how many devices, or in which precision.
"""

import math
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from trainer.loading.order import Position
from trainer.loop.checkpointing import finish_saving, report_saving, save
from trainer.loop.evaluate import evaluate
from trainer.loop.learner import Learner
from trainer.loop.memory import OPTIMIZER, train_within_memory
from trainer.loop.nonfinite import check_steps
from trainer.loop.pictures import log_pictures
from trainer.loop.run import Run
from trainer.loop.step_results import StepRecord, StepResult
from trainer.loop.totals import counted
from trainer.loop.windows import StopRequested, WeightedBatch, agree_ahead, training_windows
from trainer.parallel.base import Parallel
from trainer.task import Sums


def train(run: Run) -> None:
    """Trains from the run's position to its end; when it returns, everything is on the disk.

    Raises StopRequested, with all progress saved, if the run was asked to stop; BadInput if training diverges.
    """
    try:
        while not run.is_complete:
            train_epoch(run)
            finish_epoch(run)
    except StopRequested:
        check_steps(run, wait=True)
        save(run)
        finish_saving(run)
        raise
    finish_saving(run)


def train_epoch(run: Run) -> None:
    """Trains what is left of the current epoch, phase by phase."""
    progress = run.progress
    if progress.position.at_epoch_start:
        progress.start_totals()
        run.task.on_epoch_start(run.learner.objective, progress.position.epoch)
    run.log.start_epoch(
        progress.position, run.plan.epochs, run.plan.samples_per_epoch, run.plan.consumed(progress.position)
    )
    run.learner.net.train()
    for phase in range(progress.position.phase, len(run.task.phases)):
        if phase > progress.position.phase:
            progress.position = Position(progress.position.epoch, phase, 0)
        train_phase(run)
    run.log.end_training()


def train_phase(run: Run) -> None:
    """Trains what is left of the current phase of the current epoch: one optimizer step for each global batch."""
    progress, learner = run.progress, run.learner
    epoch, phase = progress.position.epoch, progress.position.phase
    phase_name = run.task.phases[phase]
    for window, total_weight in agree_ahead(run, training_windows(run)):
        start = progress.position
        run.parallel.phase.step = progress.step + 1
        # The rate is that of the middle of the global batch: the schedule's mean over it, up to curvature.
        middle = Position(epoch, phase, (start.samples + window.end) // 2)
        learning_rate = run.learning_rate.at(run.plan.epochs_done(middle), progress.step)
        if total_weight > 0:
            learner.set_learning_rate(phase_name, learning_rate)
            step = partial(
                train_step, learner, run.parallel, phase_name, total_weight=total_weight,
                dropout_key=(run.settings.seed, epoch, phase, start.samples),
            )  # fmt: skip
            result = train_within_memory(run, window.micro_batches, step)
            progress.totals.add(result.sums, window.weight, result.applied)
            run.step_results.add(StepRecord(progress.step + 1, start, window.end, result))
        progress.advance(window.end)
        run.log.advance(window.end - start.samples)
        logs = total_weight > 0 and progress.step % run.settings.log_interval == 0
        saves = run.settings.save_every_steps > 0 and progress.step % run.settings.save_every_steps == 0
        check_steps(run, wait=logs or saves)
        if logs:
            log_step(run, learning_rate, result.grad_norm)
        if saves:
            save(run)
    check_steps(run, wait=True)


def train_step(
    learner: Learner,
    parallel: Parallel,
    phase: str,
    window: Sequence[WeightedBatch],
    total_weight: float,
    dropout_key: tuple[int, ...],
) -> StepResult:
    """One optimizer step over a window of micro-batches; exact for any split of the samples.

    window: each micro-batch with its weight, the number of its loss terms; one of weight 0 adds nothing.
    total_weight: the loss terms of the window over all processes, above 0. Every micro-batch contributes its sum of
    losses divided by it, so that the gradient is that of one mean over all terms, however they are spread.
    """
    sums: Sums = {}
    learner.batch_norm.keep()
    for i, (batch, weight) in enumerate(window):
        parallel.seed_dropout(*dropout_key, i)
        # Gradients travel to the other processes in the last backward of the window only.
        with parallel.gradient_sync(learner.net, enabled=i == len(window) - 1):
            parallel.phase.enter("forward")
            part = counted(learner.net(parallel.to_device(batch), phase), weight)
            parallel.phase.enter("backward")
            learner.precision.backward(part["loss"], parallel.gradient_divisor / total_weight)
        for name, value in part.items():
            value = value.detach() if value.requires_grad else value
            sums[name] = sums[name] + value if name in sums else value
    parallel.phase.enter(OPTIMIZER)
    outcome = learner.precision.step(learner.optimizers[phase], learner.params[phase], learner.max_grad_norm)
    learner.batch_norm.undo_unless(outcome.applied)
    learner.ema.update(outcome.applied)
    return StepResult(sums, *outcome)


def log_step(run: Run, learning_rate: float, grad_norm: Tensor) -> None:
    """Logs the mean loss since the last report; the one place in the step that waits for the device."""
    report_saving(run)
    progress = run.progress
    totals = progress.totals.reduced(run.parallel)
    loss, weight = float(totals["loss"]), float(totals["weight"])
    new_weight = weight - progress.reported_weight
    mean_loss = (loss - progress.reported_loss) / new_weight if new_weight else math.nan  # all steps were skipped
    progress.reported_loss, progress.reported_weight = loss, weight
    metrics = {"train/loss": mean_loss, "learning_rate": learning_rate, "grad_norm": float(grad_norm)}
    run.log.step(progress.step, progress.position, metrics)


def finish_epoch(run: Run) -> None:
    """Scores the validation set where it is due, moves on to the next epoch, decides about "best", logs and saves."""
    progress = run.progress
    num_epochs = progress.position.epoch + 1
    validation = evaluate(run, "val") if run.plan.validates_after(num_epochs) else {}
    metrics = run.metrics("train", progress.totals.reduced(run.parallel)) | run.metrics("val", validation)
    if progress.skipped_steps:
        metrics["train/skipped_steps"] = progress.skipped_steps
    progress.position = Position(num_epochs)
    name, mode = run.task.monitor
    value = metrics[name] if validation else None
    is_best = value is not None and progress.judge(value, mode)
    run.log.epoch(progress.step, progress.position, metrics)
    if validation:
        log_pictures(run, "val", validation)
    progress.start_totals()
    save(run, value, is_best)
