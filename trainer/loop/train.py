"""The training loop. Read this first, top to bottom.

It does not know which task it trains, on how many devices, or in which precision.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import partial

import torch
from torch import Tensor, nn

from trainer.loading.batches import Batch
from trainer.loading.order import SampleKeys, epoch_permutation, evaluation_keys, num_micro_batches, split_global_batch
from trainer.logs.pictures import log_pictures
from trainer.loop.memory import OPTIMIZER, evaluate_within_memory, train_within_memory
from trainer.loop.nonfinite import prepare, went_back
from trainer.loop.plan import Position
from trainer.loop.precision import Precision
from trainer.loop.run import Run
from trainer.loop.step_results import Attempt
from trainer.loop.totals import Totals
from trainer.parallel.base import Parallel
from trainer.task import Sums

WeightedBatch = tuple[Batch, float]


class Outcome(Enum):
    """How training went on: to the end of the epoch or phase, until a request to stop, or back to a checkpoint."""

    DONE = "done"
    STOPPED = "stopped"
    WENT_BACK = "went back"


def train(run: Run) -> bool:
    """Trains from the run's position to its end. Returns False if it was asked to stop, with all progress saved."""
    prepare(run)
    while not run.is_complete:
        outcome = train_epoch(run)
        if outcome is Outcome.WENT_BACK:
            continue
        if outcome is Outcome.STOPPED:
            return stopped(run)
        num_epochs = run.progress.position.epoch + 1
        validation = evaluate(run, "val") if run.plan.validates_after(num_epochs) else {}
        if validation is None:
            return stopped(run)
        finish_epoch(run, validation)
    run.finish_saving()
    return True


def stopped(run: Run) -> bool:
    """Saves everything before a stop is reported. Returns False."""
    run.save()
    run.finish_saving()
    return False


def train_epoch(run: Run) -> Outcome:
    """Trains what is left of the current epoch."""
    progress, plan = run.progress, run.plan
    if progress.position.at_epoch_start:
        progress.start_totals()
        run.task.on_epoch_start(run.objective, progress.position.epoch)
    consumed = sum(plan.phase_sizes[: progress.position.phase]) + progress.position.samples
    run.log.start_epoch(progress.position, plan.epochs, plan.samples_per_epoch, consumed)
    run.net.train()
    for phase in range(progress.position.phase, len(plan.phase_sizes)):
        if progress.position.phase < phase:
            progress.position = Position(progress.position.epoch, phase, 0)
        outcome = train_phase(run)
        if outcome is not Outcome.DONE:
            break
    run.log.end_training()
    return outcome


def train_phase(run: Run) -> Outcome:
    """Trains what is left of the current phase of the current epoch. Raises BadInput if it diverges."""
    progress, plan = run.progress, run.plan
    epoch, phase = progress.position.epoch, progress.position.phase
    phase_name = run.task.phases[phase]
    optimizer = run.optimizers[phase_name]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for end, window, total_weight, stop in agree_ahead(run, training_windows(run)):
        if stop:
            return Outcome.WENT_BACK if went_back(run, wait=True) else Outcome.STOPPED
        start = progress.position.samples
        middle = Position(epoch, phase, start + (end - start) // 2)
        learning_rate = run.learning_rate.at(plan.epochs_done(middle))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        run.parallel.phase.step = progress.step + 1
        if total_weight > 0:
            run.running_statistics.keep()
            step = partial(
                train_step, run.net, total_weight=total_weight, phase=phase_name, optimizer=optimizer, params=params,
                parallel=run.parallel, precision=run.precision, max_grad_norm=run.max_grad_norm,
                dropout_key=(run.seed, epoch, phase, start),
            )  # fmt: skip
            sums, grad_norm, alarm = train_within_memory(run, window, step)
            run.running_statistics.undo_unless_finite(grad_norm)
            run.average.update(grad_norm)
            progress.totals.add(sums, total_weight if run.parallel.is_main else 0.0, grad_norm)
            run.watch.add(Attempt(progress.step + 1, progress.position, end, sums["loss"], alarm))
        progress.position = Position(epoch, phase, end)
        progress.step += 1
        progress.skipped_steps += not window
        run.log.advance(end - start)
        logs = progress.step % run.log_interval == 0 and total_weight > 0
        saves = run.save_every_steps > 0 and progress.step % run.save_every_steps == 0
        if went_back(run, wait=logs or saves):
            return Outcome.WENT_BACK
        if logs:
            log_step(run, learning_rate, grad_norm)
        if saves:
            run.save()
    return Outcome.WENT_BACK if went_back(run, wait=True) else Outcome.DONE


def train_step(
    net: nn.Module,
    window: Sequence[WeightedBatch],
    total_weight: float,
    *,
    phase: str,
    optimizer: torch.optim.Optimizer,
    params: Sequence[Tensor],
    parallel: Parallel,
    precision: Precision,
    max_grad_norm: float,
    dropout_key: tuple[int, ...],
) -> tuple[Sums, Tensor, Tensor]:
    """One optimizer step over a window of micro-batches; exact for any split of the samples.

    window: each micro-batch with its weight, the number of its loss terms; one of weight 0 adds nothing.
    total_weight: the loss terms of the window over all processes, above 0. Every micro-batch contributes its sum of
    losses divided by it, so that the gradient is that of one mean over all terms, however they are spread.

    Returns this process's sums, the norm of the whole gradient before clipping, and the alarm (see `Precision.step`),
    all on the device. If the norm is not finite, the step was not applied.
    """
    sums: Sums = {}
    here = parallel.phase
    for i, (batch, weight) in enumerate(window):
        parallel.seed_dropout(*dropout_key, i)
        with parallel.gradient_sync(net, enabled=i == len(window) - 1):
            here.enter("forward")
            part = counted(net(parallel.to_device(batch), phase), weight)
            here.enter("backward")
            precision.backward(part["loss"], parallel.gradient_divisor / total_weight)
        for name, value in part.items():
            value = value.detach()
            sums[name] = sums[name] + value if name in sums else value
    here.enter(OPTIMIZER)
    return sums, *precision.step(optimizer, params, max_grad_norm)


def counted(sums: Sums, weight: float) -> Sums:
    """The sums of a micro-batch, or zeros for one of weight 0: a process's placeholder where it has no samples.

    They are replaced, not multiplied: zero times infinity is NaN, on all ranks.
    """
    if weight > 0:
        return sums
    return {name: torch.where(torch.zeros_like(value, dtype=torch.bool), value, 0) for name, value in sums.items()}


def training_windows(run: Run) -> Iterator[tuple[int, list[WeightedBatch]]]:
    """For each global batch left in the phase: the position after it, and this process's micro-batches of it.

    There are none of a global batch that a rollback left out: its weight is 0, so no process takes a step.
    """
    position, world_size = run.progress.position, run.parallel.shard[1]
    micro_batch_size = run.batches.micro_batch_size
    bounds = list(run.plan.rest_of_phase(position))
    left_out = [run.progress.leaves_out(position.epoch, position.phase, *bound) for bound in bounds]
    order = epoch_permutation(run.seed, position.epoch, position.phase, run.plan.phase_sizes[position.phase])
    batches = run.loaders["train"](
        keys
        for (start, end), leave_out in zip(bounds, left_out, strict=True)
        if not leave_out
        for keys in split_global_batch(
            order[start:end], run.parallel.shard, micro_batch_size, position.epoch, position.phase
        )
    )
    for (start, end), leave_out in zip(bounds, left_out, strict=True):
        num_batches = 0 if leave_out else num_micro_batches(end - start, world_size, micro_batch_size)
        run.parallel.phase.enter("data loading")
        started = time.perf_counter()
        window = [weighted(next(batches)) for _ in range(num_batches)]
        run.log.data_wait_seconds += time.perf_counter() - started
        yield end, window


def weighted(batch: Batch) -> WeightedBatch:
    """A batch, still in host memory, with the number of its loss terms."""
    return batch, float(batch["weight"].sum())


def agree_ahead(
    run: Run, windows: Iterator[tuple[int, list[WeightedBatch]]]
) -> Iterator[tuple[int, list[WeightedBatch], float, bool]]:
    """Adds to each window its weight over all processes, and whether any of them was asked to stop.

    The exchange starts one window ahead of its use, so that nobody waits for it; a request to stop is therefore
    honoured within two windows.
    """
    waiting = None
    for end, window in windows:
        pending = run.parallel.start_sum([sum(weight for _, weight in window), bool(run.stop)])
        if waiting is not None:
            yield _agreed(*waiting)
        waiting = (end, window, pending.wait)
    if waiting is not None:
        yield _agreed(*waiting)


def _agreed(
    end: int, window: list[WeightedBatch], wait: Callable[[], Sequence[float]]
) -> tuple[int, list[WeightedBatch], float, bool]:
    total_weight, num_stop_requests = wait()
    return end, window, total_weight, num_stop_requests > 0


@torch.no_grad()
def evaluate(run: Run, split: str) -> Sums | None:
    """The statistics of a data set over all processes, float64 on the CPU, every sample counted once.

    None if the run was asked to stop meanwhile.
    """
    run.parallel.sync_buffers(run.objective)
    net = run.parallel.evaluation_module(run.net)
    dataset_size = len(run.task.splits()[split])
    keys = evaluation_keys(dataset_size, run.parallel.shard, run.eval_micro_batch_size)
    windows = ((0, [batch]) for batch in evaluation_batches(run, split, keys))
    totals = Totals()

    def forward(batch: Batch, weight: float) -> Sums:
        return counted(net(run.parallel.to_device(batch)), weight)

    net.eval()
    with run.average.applied():
        for _, (batch,), _, stop in agree_ahead(run, windows):
            if stop:
                return None
            run.parallel.phase.enter("evaluation")
            for sums, weight in evaluate_within_memory(run, batch, forward):
                totals.add(sums, weight)
    net.train()
    return totals.reduced(run.parallel)


def evaluation_batches(run: Run, split: str, keys: Iterable[SampleKeys]) -> Iterator[WeightedBatch]:
    """This process's batches of a data set."""
    here, batches = run.parallel.phase, iter(run.loaders[split](keys))
    while True:
        here.enter("data loading of the evaluation")
        batch = next(batches, None)
        if batch is None:
            return
        yield weighted(batch)


def log_step(run: Run, learning_rate: float, grad_norm: Tensor) -> None:
    """Logs the mean loss since the last report; the one place in the step that waits for the device."""
    run.report_saving()
    progress = run.progress
    totals = progress.totals.reduced(run.parallel)
    loss, weight = float(totals["loss"]), float(totals["weight"])
    new_weight = weight - progress.reported_weight
    mean_loss = (loss - progress.reported_loss) / new_weight if new_weight else math.nan  # all steps were skipped
    progress.reported_loss, progress.reported_weight = loss, weight
    run.log.step(
        progress.step,
        progress.position,
        {"train/loss": mean_loss, "learning_rate": learning_rate, "grad_norm": float(grad_norm)},
    )


def finish_epoch(run: Run, validation: Sums) -> None:
    """Moves on to the next epoch, decides about "best", logs and saves.

    validation: the statistics of the validation set; {} if it was not scored after this epoch.
    """
    progress = run.progress
    metrics = run.metrics("train", progress.totals.reduced(run.parallel)) | run.metrics("val", validation)
    if progress.skipped_steps:
        metrics["train/skipped_steps"] = progress.skipped_steps
    progress.position = Position(progress.position.epoch + 1)
    value = metrics[run.task.monitor[0]] if validation else None
    is_best = value is not None and run.judge(value)
    run.log.epoch(progress.step, progress.position, metrics)
    if validation:
        log_pictures(run, "val", validation)
    progress.start_totals()
    run.save(value, is_best)
