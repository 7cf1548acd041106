"""Derives a run's batch sizes, optimizer steps and learning rate from flags."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from trainer.commands.flags import Flags
from trainer.loading.streams import KeyedStream
from trainer.loop.plan import (
    EPOCHS_KEPT,
    BatchSplit,
    Plan,
    SampleOrder,
    ShuffledOrder,
    StreamOrder,
    TaskOrder,
    split_batch,
)
from trainer.loop.schedule import LearningRate, device_scaling_factor
from trainer.parallel.strategy import Strategy
from trainer.task import Task, validation_sets

BATCH_FLAGS = ("--batch-size", "--grad-accum-steps", "--global-batch-size", "--scale-lr", "--parts")


def arrange_batches(
    flags: Flags, values: Mapping[str, Any], sizes: Sequence[int], strategy: Strategy, before: Mapping[str, Any] | None
) -> tuple[tuple[BatchSplit, ...], float]:
    """Splits each phase's global batch into micro-batches; also returns the learning rate factor of `--scale-lr`.

    sizes: samples per device per forward pass, by phase. before: facts of the run to resume; if the batch flags are
    unchanged, its global batch sizes and factor are kept. Raises UserError for batches that `--parts` cannot split.
    """
    batch, devices = flags.batch, (strategy.num_devices, strategy.group.world_size, strategy.num_parts)
    if strategy.num_parts:
        asked, least, size = batch.global_batch_size, strategy.num_parts, batch.batch_size
        if least % strategy.num_devices:
            raise flags.refusal(f"--parts {least}: must be divisible by {devices[0]}, the number of devices")
        if asked is not None and not least <= asked <= least * size:
            raise flags.refusal(
                f"--global-batch-size {asked}: must be from {least} to {least * size}, because each of {least} parts "
                f"(--parts) contains 1 to {size} samples (--batch-size); change one of the three flags"
            )
    if (
        before is not None
        and all({"--parts": 0, **before["config"]}.get(name) == values[name] for name in BATCH_FLAGS)
        and before["batch_sizes"] == sizes
    ):
        pairs = zip(sizes, before["global_batch_sizes"], strict=True)
        return tuple(split_batch(size, 1, whole, *devices) for size, whole in pairs), before["lr_factor"]
    asked = batch.global_batch_size
    wholes = [asked and max(1, round(asked * size / batch.batch_size)) for size in sizes]
    splits = tuple(
        split_batch(size, batch.grad_accum_steps, whole, *devices) for size, whole in zip(sizes, wholes, strict=True)
    )
    one_device = sizes[0] * batch.grad_accum_steps
    return splits, device_scaling_factor(flags.learning.scale_lr, splits[0].global_batch_size, one_device)


def build_plan(flags: Flags, task: Task, batches: Sequence[BatchSplit]) -> Plan:
    """Plans the run's optimizer steps. Raises UserError if `--drop-last` drops all samples of a data set."""
    given, has_validation = flags.run, bool(validation_sets(task.splits()))
    return Plan(
        0 if task.fitted else given.epochs,
        tuple(build_order(flags, task, phase, split.global_batch_size) for phase, split in enumerate(batches)),
        task.turns,
        given.eval_every if has_validation else None,
        None if task.fitted else given.max_steps,
        given.eval_every_steps if has_validation else None,
    )


def build_order(flags: Flags, task: Task, phase: int, global_batch_size: int) -> SampleOrder:
    """Builds the order of a phase's samples. Raises UserError if `--drop-last` cannot be applied."""
    name = task.phases[phase]
    num_samples = task.num_samples(name)
    batches = lru_cache(EPOCHS_KEPT)(lambda epoch: task.order(name, epoch, global_batch_size))
    if batches(0) is not None:
        source = f"{type(task).__name__}.order({name!r})"
        if "--drop-last" in flags.given and flags.batch.drop_last:
            raise flags.refusal(f"--drop-last: {source} makes the batches, so nothing is dropped; leave the flag out")
        return TaskOrder(source, batches, global_batch_size, num_samples, len(task.training_data(name)))
    rest = num_samples % global_batch_size if flags.batch.drop_last else 0
    if rest == num_samples:
        raise flags.refusal(
            f"--drop-last: drops all {num_samples} samples, because a global batch has {global_batch_size}; lower "
            "--batch-size or leave the flag out"
        )
    dataset = task.training_data(name)
    kind = StreamOrder if isinstance(dataset, KeyedStream) else ShuffledOrder
    return kind(flags.run.seed, phase, max(num_samples, len(dataset)), global_batch_size, num_samples - rest)


def build_learning_rate(flags: Flags, task: Task, plan: Plan, factor: float) -> LearningRate:
    """Builds the learning rate schedule. Raises UserError if warm-up is too long or `--min-lr` too high."""
    learning = flags.learning
    peak = learning.lr * factor
    if learning.min_lr > peak * (1 + 1e-9) and not flags.checkpoint.eval_only:
        raise flags.refusal(
            f"--min-lr {learning.min_lr:g}: must not exceed {peak:g}, which is --lr after --scale-lr; lower --min-lr"
        )
    return LearningRate(
        peak=peak,
        floor=learning.min_lr,
        warmup=min(build_warmup(flags, plan), plan.total),
        total=plan.total,
        schedule=learning.schedule,
        num_steps=plan.num_steps,
        drop=learning.plateau_factor,
        patience=learning.plateau_patience,
        factor_of_step=task.lr_factor if type(task).lr_factor is not Task.lr_factor else None,
    )


def build_warmup(flags: Flags, plan: Plan) -> float:
    """Returns the warm-up length in the schedule's unit, epochs or steps. Raises UserError if it exceeds the run."""
    epochs, num_steps = flags.learning.warmup_epochs, flags.learning.warmup_steps
    per_epoch: float = plan.steps_per_epoch
    if epochs is None and num_steps is None:
        return plan.total / 10
    if plan.total == 0:
        return 0.0
    if epochs is not None and plan.max_steps is None:
        return epochs
    given, length = f"--warmup-steps {num_steps}", float(num_steps or 0)
    if epochs is not None:
        length = epochs * per_epoch
        given = f"--warmup-epochs {epochs:g}, which are {length:g} steps"
    if length > plan.num_steps:
        raise flags.refusal(
            f"{given}: exceeds the {plan.num_steps} steps of the run; lower the warm-up or raise "
            f"{flags.run.length_flag}"
        )
    if plan.max_steps is not None:
        return length
    if len(plan.orders) == 1:  # steps_per_epoch counts a smaller last batch as a whole step
        per_epoch = plan.samples_per_epoch / plan.orders[0].global_batch_size
    return length / per_epoch
