"""Builds a run from a command line, at the position where it goes on."""

import os
import platform
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from trainer.checkpoint.background import BackgroundSaver
from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.records import CONFIG, RESULTS, delete, write_json
from trainer.commands.code_identity import identify_code
from trainer.commands.flags import Flags
from trainer.commands.resume import (
    choose_run_id,
    choose_start,
    recorded_global_batches,
    resume,
    starts_over,
    take_over,
    take_weights,
)
from trainer.commands.weights import initialise
from trainer.loading.batches import Batch, BatchLoader, PhaseDatasets, Workers
from trainer.loading.errors import BadInput
from trainer.loading.files import refusing_disk_errors
from trainer.loading.order import SampleKeys
from trainer.loading.torch_datasets import require_keyed
from trainer.logs.background import BackgroundLogger
from trainer.logs.logger import LoggedRun
from trainer.logs.run_log import RunLog
from trainer.loop.contract import check_batch, check_blocks, check_single_samples, check_task, try_phase
from trainer.loop.ema import ExponentialMovingAverage
from trainer.loop.learner import Learner
from trainer.loop.memory import rehearse
from trainer.loop.memory_limit import MemoryLimit
from trainer.loop.optimizers import build_optimizers, completed_groups, moments_of
from trainer.loop.orders import EPOCHS_KEPT, SampleOrder, ShuffledOrder, TaskOrder
from trainer.loop.plan import BatchSplit, Plan, split_batch
from trainer.loop.precision import choose_precision, in_precision
from trainer.loop.run import LoopSettings, Run
from trainer.loop.schedule import LearningRate, device_scaling_factor
from trainer.loop.step_results import StepResults
from trainer.parallel.base import Parallel, SingleDevice
from trainer.parallel.data_parallel import start_data_parallel
from trainer.parallel.ddp import Distributed
from trainer.parallel.devices import pick_device, set_num_threads
from trainer.parallel.environment import RankEnvironment
from trainer.task import Task, validation_sets

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
BATCH_FLAGS = ("--batch-size", "--grad-accum-steps", "--global-batch-size", "--scale-lr")


def start_parallel(flags: Flags, environment: RankEnvironment | None) -> Parallel:
    """The devices of this process. Raises BadInput."""
    if flags.multi is None:
        return SingleDevice(pick_device(flags.devices.device))
    if flags.multi.multi_gpu == "dp":
        return start_data_parallel(flags.devices, flags.multi)
    assert environment is not None
    return Distributed(environment, flags.multi, flags.devices)


def set_up_torch(flags: Flags, parallel: Parallel) -> None:
    """Threads and determinism of this process."""
    set_num_threads(flags.devices.num_threads, parallel.local_world_size)
    if flags.precision.deterministic or parallel.device.type == "cpu":
        if parallel.device.type == "cuda":
            os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
        # As torch.use_deterministic_algorithms(True), which also imports torch's compiler: seconds of every start.
        torch.set_deterministic_debug_mode("error")
        # Filling fresh memory with NaN finds bugs in kernels, and costs every step a pass over its tensors.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    else:
        torch.backends.cudnn.benchmark = True


def build_task(flags: Flags) -> Task:
    """The task with its data loaded. Raises BadInput."""
    assert flags.task_type is not None
    task = flags.task_type(flags.task, seed=flags.run.seed, cache_dir=flags.run.cache_dir.expanduser())
    check_task(task)
    splits = task.splits()
    phases = {f"of the phase {phase!r}": task.training_data(phase) for phase in task.phases}
    for name, dataset in {**{repr(name): dataset for name, dataset in splits.items()}, **phases}.items():
        require_keyed(dataset, f"--task {flags.run.task}: its data set {name}")
        if len(dataset) == 0:
            raise BadInput(f"--task {flags.run.task}: its data set {name} is empty")
    patience = flags.learning.early_stopping_patience
    if patience and not validation_sets(splits):
        raise flags.refusal(f"--early-stopping-patience {patience}: there is no validation set to be patient with")
    return task


def build_run(flags: Flags, task: Task, parallel: Parallel, directory: RunDirectory) -> tuple[Run, list[str]]:
    """A run at its start or where it goes on, and what the user should know about that; nothing is written yet.

    All processes call it; a BadInput is raised on all of them.
    """
    state = parallel.on_main(lambda: choose_start(directory, flags))
    before = state or parallel.on_main(lambda: directory.earlier_attempt)
    run = assemble_run(flags, task, parallel, directory, before)
    run.facts["code"] = parallel.on_main(lambda: identify_code(type(task)))
    run.facts["run_id"] = parallel.on_main(lambda: choose_run_id(directory, flags, state))
    unknown = run.memory_limit
    limit = parallel.on_main(lambda: unknown if starts_over(directory, flags) else unknown.remembered(directory.path))
    run.memory_limit, run.batches = limit, limit.applied(run.batches, parallel.num_devices, parallel.shard[1])
    if state is None:
        notes = initialise(run, flags)
        prepare_training(run, flags)
    else:
        take_weights(run, state)
        prepare_training(run, flags)
        notes = resume(run, state)
    return run, [*notes, *limit.note()]


def open_run(
    run: Run,
    notes: Sequence[str],
    flags: Flags,
    argv: Sequence[str],
    agents: Sequence[str] = (),
    loggers: Sequence[BackgroundLogger] = (),
) -> None:
    """Makes the directory this run's and opens its log: everything that is left before training.

    agents: the torchrun agents of this job. loggers: those of the user's own; on the main process alone.
    """
    facts = {"command_line": list(argv), "torchrun_agents": list(agents), **run.facts}
    run.parallel.on_main(lambda: _claim_directory(run, flags, facts, loggers))
    for line in [*describe_run(run, flags), *notes]:
        run.log.say(line)
    if run.parallel.device.type == "cuda" and not run.is_complete:  # a host has no such limit
        rehearse(run)
    source, step = flags.checkpoint.resume_from, run.progress.step
    if source is not None and run.parallel.on_main(lambda: all(entry.step != step for entry in run.directory.entries)):
        take_over(run, source)


def prepare_training(run: Run, flags: Flags) -> None:
    """Spreads the model over the run's devices, for each phase by what it trains, and makes the optimizers.

    All processes call it, with weights that they have alike. Raises BadInput for what does not keep the contract.
    """
    task, learner = run.task, run.learner
    check_blocks(task, learner.objective.model)
    groups = {
        phase: completed_groups(task, learner.objective, phase, flags.learning.weight_decay) for phase in task.phases
    }
    learner.set_trained({phase: [p for group in own for p in group["params"]] for phase, own in groups.items()})
    for index, phase in enumerate(task.phases):
        example = example_batch(task, index, 2 * run.parallel.num_replicas)
        learner.nets[phase] = run.parallel.wrap(learner.enter(phase))
        check_single_samples(learner, run.parallel, phase, run.plan.orders[index], run.batches[index], example)
        try_phase(learner, run.parallel, phase, example)
        learner.optimizers[phase] = build_optimizers(flags.learning, task, learner.objective, phase, groups[phase])


def assemble_run(
    flags: Flags,
    task: Task,
    parallel: Parallel,
    directory: RunDirectory | None = None,
    before: Mapping[str, Any] | None = None,
) -> Run:
    """The parts, with fresh weights and a silent log; nothing is read or written.

    directory: for a run that trains. before: `facts` of the checkpoint to go on from, or of an attempt that saved none.
    """
    directory = directory or RunDirectory(flags.checkpoint.save_dir, flags.checkpoint.retention(task), print)
    values = flags.values()
    sizes = [task.batch_size(phase, flags.batch.batch_size) for phase in task.phases]
    batches, lr_factor = arrange_batches(flags, values, sizes, parallel, before)
    plan = build_plan(flags, task, batches)
    learning_rate = build_learning_rate(flags, task, plan, lr_factor)
    return Run(
        task=task,
        parallel=parallel,
        learner=build_learner(flags, task, parallel),
        plan=plan,
        batches=batches,
        memory_limit=MemoryLimit.unknown(flags.batch, parallel.device),
        learning_rate=learning_rate,
        loaders=build_loaders(task, flags.run.num_workers, parallel),
        directory=directory,
        saver=BackgroundSaver(directory),
        settings=LoopSettings(
            seed=flags.run.seed,
            on_nonfinite=flags.learning.on_nonfinite,
            patience=flags.learning.early_stopping_patience,
            save_every_steps=flags.checkpoint.save_every_steps,
            save_every_s=60 * flags.checkpoint.save_every_minutes,
            max_s=60 * flags.run.max_minutes,
            log_interval=flags.run.log_interval,
        ),
        step_results=StepResults(at_once=parallel.device.type == "cpu"),
        facts={
            "task": flags.run.task,
            "config": values,
            "batch_sizes": sizes,
            "global_batch_sizes": [split.global_batch_size for split in batches],
            "lr_factor": lr_factor,
            "phase_sizes": plan.phase_sizes,
            "environment": describe_environment(parallel),
        },
    )


def _claim_directory(run: Run, flags: Flags, facts: Mapping[str, Any], loggers: Sequence[BackgroundLogger]) -> None:
    """Records what is about to run, and opens its log. Raises BadInput when there is no room for checkpoints."""
    directory = run.directory
    weights = sum(value.nbytes for value in run.learner.objective.state_dict().values())
    moments = sum(p.nbytes for several in run.learner.optimizers.values() for p in moments_of(several))
    directory.require_space(weights * (2 if run.learner.ema.enabled else 1) + moments)
    if starts_over(directory, flags):
        directory.start_over()
    delete(directory.path / RESULTS)
    write_json(directory.path / CONFIG, facts)
    with refusing_disk_errors(f"--save-dir {directory.path}: cannot write its logs"):
        run.log = RunLog(_logged(run), run.task.headline, loggers)


def _logged(run: Run) -> LoggedRun:
    config = {name.lstrip("-"): value for name, value in run.facts["config"].items()}
    progress = run.progress
    return LoggedRun(run.facts["run_id"], run.directory.path, config, progress.step, progress.last_report)


# --- the parts ---------------------------------------------------------------------------------------------------


def arrange_batches(
    flags: Flags, values: Mapping[str, Any], sizes: Sequence[int], parallel: Parallel, before: Mapping[str, Any] | None
) -> tuple[tuple[BatchSplit, ...], float]:
    """How the batches of each phase are cut, and the factor of `--scale-lr`.

    sizes: of each phase, samples per device per forward. A resumed run whose batch sizes are asked for as before keeps
    its global batches and factor, whatever the devices are now.
    """
    batch, devices = flags.batch, (parallel.num_devices, parallel.shard[1])
    if (
        before is not None
        and all(before["config"].get(name) == values[name] for name in BATCH_FLAGS)
        and before.get("batch_sizes", sizes) == sizes
    ):
        pairs = zip(sizes, recorded_global_batches(before), strict=True)
        return tuple(split_batch(size, 1, whole, *devices) for size, whole in pairs), before["lr_factor"]
    asked = batch.global_batch_size
    wholes = [asked and max(1, round(asked * size / batch.batch_size)) for size in sizes]
    splits = tuple(
        split_batch(size, batch.grad_accum_steps, whole, *devices) for size, whole in zip(sizes, wholes, strict=True)
    )
    one_device = sizes[0] * batch.grad_accum_steps
    return splits, device_scaling_factor(flags.learning.scale_lr, splits[0].global_batch_size, one_device)


def build_plan(flags: Flags, task: Task, batches: Sequence[BatchSplit]) -> Plan:
    """Length, phases and global batches. Raises BadInput for a data set that `--drop-last` leaves nothing of."""
    given, has_validation = flags.run, bool(validation_sets(task.splits()))
    return Plan(
        given.epochs,
        tuple(build_order(flags, task, phase, split.global_batch_size) for phase, split in enumerate(batches)),
        task.turns,
        given.eval_every if has_validation else None,
        given.max_steps,
        given.eval_every_steps if has_validation else None,
    )


def build_order(flags: Flags, task: Task, phase: int, global_batch_size: int) -> SampleOrder:
    """The samples of a phase in global batches. Raises BadInput."""
    name = task.phases[phase]
    num_samples = task.num_samples(name)
    batches = lru_cache(EPOCHS_KEPT)(partial(task.order, name, global_batch_size=global_batch_size))
    if batches(0) is not None:
        return TaskOrder(f"{type(task).__name__}.order({name!r})", batches, global_batch_size, num_samples)
    rest = num_samples % global_batch_size if flags.batch.drop_last else 0
    if rest == num_samples:
        raise flags.refusal(
            f"--drop-last: a global batch of {global_batch_size} samples leaves nothing of {num_samples}; lower "
            "--batch-size or leave it out"
        )
    return ShuffledOrder(flags.run.seed, phase, num_samples, global_batch_size, num_samples - rest)


def build_learning_rate(flags: Flags, task: Task, plan: Plan, factor: float) -> LearningRate:
    """The schedule. Raises BadInput for a warm-up longer than the run."""
    learning = flags.learning
    return LearningRate(
        peak=learning.lr * factor,
        floor=learning.min_lr,
        warmup=min(build_warmup(flags, plan), plan.total),
        total=plan.total,
        schedule=learning.schedule,
        num_steps=plan.num_steps,
        factor_of_step=task.lr_factor if type(task).lr_factor is not Task.lr_factor else None,
    )


def build_warmup(flags: Flags, plan: Plan) -> float:
    """Its length in the unit of the schedule. Raises BadInput for one longer than the run."""
    epochs, num_steps = flags.learning.warmup_epochs, flags.learning.warmup_steps
    per_epoch: float = plan.steps_per_epoch
    if epochs is None and num_steps is None:
        return plan.total / 10
    if epochs is not None and plan.max_steps is None:
        return epochs
    given, length = f"--warmup-steps {num_steps}", float(num_steps or 0)
    if epochs is not None:
        length = epochs * per_epoch
        given = f"--warmup-epochs {epochs:g}, which are {length:g} steps"
    if length > plan.num_steps:
        raise flags.refusal(
            f"{given}: the whole run has {plan.num_steps} steps; warm up for fewer or raise {flags.run.length_flag}"
        )
    if plan.max_steps is not None:
        return length
    if len(plan.orders) == 1:  # whose short last batch counts as a step too
        per_epoch = plan.samples_per_epoch / plan.orders[0].global_batch_size
    return length / per_epoch


def build_learner(flags: Flags, task: Task, parallel: Parallel) -> Learner:
    """The model with its loss on this process's device, initialised alike on every process."""
    precision = choose_precision(flags.precision, parallel.device)
    torch.manual_seed(flags.run.seed)
    objective = task.build_objective()
    stray = set(objective.state_dict()) - {f"model.{name}" for name in objective.model.state_dict()}
    if stray:
        raise BadInput(f"--task {flags.run.task}: {sorted(stray)} must be part of the objective's `model`")
    objective = objective.to(parallel.device, precision.dtype)
    return Learner(
        objective,
        in_precision(objective, precision),
        precision,
        flags.learning.max_grad_norm,
        ExponentialMovingAverage(objective.model, flags.learning.ema_decay),
    )


def build_loaders(task: Task, num_workers: int, parallel: Parallel) -> dict[str, BatchLoader]:
    """Of each data set. Evaluation has workers of its own: those of training hold what is loaded ahead."""
    training, evaluation = (Workers(num_workers, pin_memory=parallel.device.type == "cuda") for _ in range(2))
    phases = PhaseDatasets([task.training_data(phase) for phase in task.phases])
    evaluated = {name: dataset for name, dataset in task.splits().items() if name != "train"}
    return {
        "train": BatchLoader(phases, task.collate, training),
        **{name: BatchLoader(dataset, task.collate, evaluation) for name, dataset in evaluated.items()},
    }


def example_batch(task: Task, phase: int, size: int) -> Batch:
    """A checked batch of a phase, of so many samples if there are, that does not count."""
    dataset = task.training_data(task.phases[phase])
    keys = SampleKeys(np.arange(min(size, len(dataset))), epoch=0, phase=phase, placeholder=True)
    batch = task.collate(dataset.__getitems__(keys), keys)
    check_batch(task, batch, len(keys.index))
    return batch | {"weight": torch.zeros_like(batch["weight"])}


# --- what the user is told ---------------------------------------------------------------------------------------


def describe_environment(parallel: Parallel) -> dict[str, Any]:
    """All that identity to the bit depends on, besides the flags."""
    return {
        "world_size": parallel.shard[1],
        "num_devices": parallel.num_devices,
        "num_threads_per_rank": torch.get_num_threads(),
        "device_type": parallel.device.type,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def describe_run(run: Run, flags: Flags) -> list[str]:
    """The lines at the start of every run."""
    parallel, batches = run.parallel, run.batches[0]
    world_size, num_devices = parallel.shard[1], parallel.num_devices
    lines = [
        f"Devices: {parallel.describe()}",
        *describe_batches(run),
        f"Workers: {flags.run.num_workers} per rank, {flags.run.num_workers * world_size} in all"
        f"{', and as many for evaluation' if flags.run.num_workers else ''}. "
        f"Threads: {torch.get_num_threads()} per rank. Precision: {run.learner.precision}.",
        f"Data: {', '.join(f'{len(d)} {name}' for name, d in run.task.splits().items())} samples. "
        f"Model: {run.learner.num_parameters} parameters.",
    ]
    scaled = run.learning_rate.peak
    if scaled != flags.learning.lr:
        one_device = flags.batch.batch_size * flags.batch.grad_accum_steps
        why = f"{num_devices} devices"
        if batches.global_batch_size != one_device * num_devices:
            why = f"a global batch of {batches.global_batch_size} samples instead of {one_device}"
        lines.append(f"Scaling learning rate from {flags.learning.lr:g} to {scaled:g} for {why}")
    return lines


def describe_batches(run: Run) -> list[str]:
    """A line for each phase about how its batches are cut."""
    lines, num_devices = [], run.parallel.num_devices
    for phase, split in zip(run.task.phases, run.batches, strict=True):
        exact = split.batch_size * num_devices * split.grad_accum_steps == split.global_batch_size
        lines.append(
            f"Batch{f' of phase {phase}' if len(run.batches) > 1 else ''}: {split.global_batch_size} samples per "
            f"optimizer step, from {split.batch_size} per device per forward (--batch-size is per device) x "
            f"{num_devices} device(s) x {split.grad_accum_steps} accumulation step(s)"
            + ("" if exact else ", the last ones smaller")
        )
    return lines
