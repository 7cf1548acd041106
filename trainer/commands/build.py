"""Builds a new or resumed run from a command line."""

import os
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.checkpoint.background import BackgroundSaver
from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.format import LARGE
from trainer.checkpoint.manifest import CONFIG, RESULTS, read_config, retention_of
from trainer.commands.facts import (
    code_digests,
    describe_environment,
    digest_of_data,
    facts_of_data,
    facts_of_helpers,
    identify_code,
    remarks_on_weights,
)
from trainer.commands.flags import Flags
from trainer.commands.loaders import Loading, loaders_on_device, remarks_on_streams, start_loading, where_data_are
from trainer.commands.planning import arrange_batches, build_learning_rate, build_plan
from trainer.commands.resume import (
    Changes,
    brings_another_run,
    choose_run_id,
    choose_start,
    resume,
    starts_over,
    take_best_beside,
)
from trainer.commands.weights import initialise, resume_weights
from trainer.common.errors import UserError
from trainer.common.files import refusing_disk_errors
from trainer.loading.batches import Batch
from trainer.loading.on_device import DeviceLoader
from trainer.loading.order import SampleKeys
from trainer.loading.torch_datasets import require_keyed
from trainer.logs.background import BackgroundLogger
from trainer.logs.console import say
from trainer.logs.logger import LoggedRun
from trainer.logs.run_log import RunLog
from trainer.loop.blocks import prepare_blocks, refusing_compilation, settle_recomputed
from trainer.loop.checkpointing import restore_progress, restore_streams, save
from trainer.loop.contract import (
    check_batch,
    check_blocks,
    check_constructor,
    check_exchanges,
    check_helpers,
    check_same_parameters,
    check_signatures,
    check_single_samples,
    check_task,
    check_tensors,
    try_phase,
)
from trainer.loop.ema import ExponentialMovingAverage
from trainer.loop.joint import JointLearner, refuse_joint
from trainer.loop.law import check_sums
from trainer.loop.learner import Learner
from trainer.loop.lockstep import Lockstep
from trainer.loop.memory import MemoryGuard, MemoryLimit
from trainer.loop.optimizers import build_optimizers, completed_groups, moments_of
from trainer.loop.outcomes import StepOutcomes
from trainer.loop.parts import PartsLearner, totals_maker
from trainer.loop.plan import SampleOrder
from trainer.loop.precision import choose_precision, in_precision, module_in_dtype, with_dense_tensors
from trainer.loop.progress import Progress
from trainer.loop.rank_times import RankTimes
from trainer.loop.run import Run
from trainer.loop.sam import SamLearner, refuse_sam
from trainer.loop.watch import Remarks, Watch
from trainer.parallel.data_parallel import start_data_parallel
from trainer.parallel.ddp import Replicated
from trainer.parallel.devices import pick_device, set_num_threads
from trainer.parallel.environment import RankEnvironment
from trainer.parallel.group import Group
from trainer.parallel.process_group import ProcessGroup
from trainer.parallel.strategy import SingleDevice, Strategy
from trainer.registry import told, without_folder
from trainer.task import Objective, Task, method_name, validation_sets

TOO_LARGE = re.compile("overflow|not enough memory|allocate memory|out of memory|too big|dimension exceeded", re.I)
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def start_strategy(flags: Flags, environment: RankEnvironment | None) -> Strategy:
    """Creates the `Strategy` for this process's devices. Raises UserError for unusable devices."""
    num_parts = flags.batch.parts
    if flags.multi is None:
        return SingleDevice(pick_device(flags.devices.device), num_parts)
    if not flags.multi.has_processes:
        return start_data_parallel(flags.devices, flags.multi)
    assert environment is not None
    group = ProcessGroup(environment, flags.multi, flags.devices, facts_of_start(flags))
    if flags.multi.form is not None and flags.multi.form.shards:
        from trainer.parallel.fsdp import Sharded

        return Sharded(group, flags.multi.shard_size, reshards=flags.multi.reshard == "always")
    return Replicated(group, num_parts, flags.multi.sync_bn, flags.multi.find_unused_parameters)


def facts_of_start(flags: Flags) -> dict[str, Any]:
    """Returns the facts that all processes of a run must agree on before they read data."""
    assert flags.task_type is not None
    run_id = read_config(flags.checkpoint.save_dir).get("run_id")
    # detects a folder that is not on a shared disk, or a disk that does not show another machine's writes yet
    run = {"the run in --save-dir (must be on a shared disk)": run_id} if run_id is not None else {}
    return {
        "--task": without_folder(flags.run.task),
        **flags.values_alike(),
        "torch": torch.__version__,
        **code_digests(flags.task_type),
        **run,
    }


def set_up_torch(flags: Flags, group: Group) -> None:
    """Configures torch's threads, determinism and GPU libraries in this process."""
    assert flags.task_type is not None
    # With --parts, the number of threads, which affects the order of sums, must not depend on the number of processes.
    set_num_threads(flags.devices.num_threads, group.num_cores, group.device, takes_one=flags.batch.parts > 0)
    if flags.batch.parts and group.device.type == "cpu":
        group.require_same({"--num-threads": torch.get_num_threads()}, "--parts needs the same number on all ranks")
    is_gpu = group.device.type == "cuda"
    is_deterministic = flags.precision.deterministic or not is_gpu or flags.batch.parts > 0
    if is_deterministic:
        # Like torch.use_deterministic_algorithms(True), but does not import the compiler, which takes seconds.
        torch.set_deterministic_debug_mode("error" if flags.precision.deterministic else "warn")
        # Filling new memory with NaN finds bugs in kernels, but writes every tensor once more in every step.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if is_gpu:
        # Set in every run: cuBLAS reads it once per process, and a later run in this process may be deterministic.
        os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
        # Benchmarking saves time only if shapes recur, and may choose different algorithms in the next run.
        is_one_shape = flags.task_type.largest_samples is Task.largest_samples
        torch.backends.cudnn.benchmark = is_one_shape and not is_deterministic
        # cuDNN plans attention for each new shape, which takes as long as many steps; other backends do not plan.
        torch.backends.cuda.enable_cudnn_sdp(is_one_shape)
        torch.backends.cudnn.allow_tf32 = False  # convolutions in full float32 precision, as matrix products


def build_task(flags: Flags) -> Task:
    """Creates the task with its data. Raises UserError for invalid data."""
    assert flags.task_type is not None
    # so a task that splits its data with a global generator makes the same split in each process and restart
    random.seed(flags.run.seed)
    np.random.seed(flags.run.seed % 2**32)
    torch.manual_seed(flags.run.seed)
    with flags.telling_origins(), refusing_sizes(f"{told(flags.run.task)}: its data", "use less data"):
        task = _new_task(flags)
        check_task(task)
        splits = task.splits()
        phases = {f"of the phase {phase!r}": task.training_data(phase) for phase in task.phases}
        for name, dataset in {**{repr(name): dataset for name, dataset in splits.items()}, **phases}.items():
            require_keyed(dataset, f"{told(flags.run.task)}: its data set {name}")
            if len(dataset) == 0:
                raise UserError(f"{told(flags.run.task)}: its data set {name} is empty; give data with samples")
    patience = flags.learning.early_stopping_patience
    given = [f"--early-stopping-patience {patience}"] if patience else []
    given += ["--schedule plateau"] if flags.learning.schedule == "plateau" else []
    if given and not validation_sets(splits):
        raise flags.refusal(f"{given[0]}: needs a validation set; hold out validation data, or leave the flag out")
    return task


def _new_task(flags: Flags) -> Task:
    """Creates the task. Raises UserError if its `__init__` rejects the arguments or reads an unknown config field."""
    assert flags.task_type is not None
    arguments = flags.task, flags.run.seed, flags.run.cache_dir
    check_constructor(flags.task_type, arguments)
    try:
        return flags.task_type(*arguments)
    except AttributeError as error:
        if error.obj is not flags.task:
            raise
        name, own = flags.task_type.__name__, ", ".join(vars(flags.task)) or "none"
        raise UserError(
            f"{told(flags.run.task)}: {name} reads config.{error.name}, but the task has no such flag (it has "
            f"{own}); add a field to {name}.Config; config does not contain the trainer's own flags, such as --lr"
        ) from None


@contextmanager
def refusing_sizes(what: str, advice: str) -> Iterator[None]:
    """Converts errors of torch and NumPy about arrays larger than memory to UserError."""
    try:
        yield
    except UserError:
        raise
    except (MemoryError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        if not isinstance(error, MemoryError | OverflowError) and TOO_LARGE.search(str(error)) is None:
            raise
        reason = (str(error).splitlines() or ["out of memory"])[0]
        raise UserError(f"{what} would be larger than the memory of this machine ({reason}); {advice}") from None


def build_run(
    flags: Flags, task: Task, strategy: Strategy, directory: RunDirectory, loading: Loading | None = None
) -> tuple[Run, list[str]]:
    """Builds a new or resumed run; returns the run and notes for the user. Writes no files.

    loading: result of `start_loading`. All processes must call this function, and all raise UserError if one does.
    """
    given = flags.checkpoint
    state = strategy.load_on_main(lambda: choose_start(directory, given), LARGE)
    before = state or strategy.group.on_main(lambda: directory.earlier_attempt)
    run = assemble_run(flags, task, strategy, directory, before, state is None, loading)
    run.facts["code"] = strategy.group.on_main(lambda: identify_code(type(task)))
    run.facts |= facts_of_helpers(run.learner.objective.helpers, strategy.group)
    run.facts["run_id"] = strategy.group.on_main(lambda: choose_run_id(directory, given, state))
    unknown = run.memory.limit
    limit = strategy.group.on_main(
        lambda: unknown if starts_over(directory, given) else unknown.remembered(directory.path, say)
    )
    run.memory.apply(limit)
    if state is None:
        notes = initialise(run.learner, given, task.shipped_weights())
        first_s = prepare_training(flags, task, run.learner, run.plan.orders, run.memory)
        if not (task.fitted or flags.blocks.compile or strategy.exchanges_in_forward):
            with run.learner.launching():
                notes = [*notes, *check_sums(task, run.learner, first_s=first_s)]
    else:
        changes = Changes(state, run.facts, task)
        changes.refuse_another_run()
        changes.refuse_other_threads()
        advice = "choose another --save-dir, or start over with --fresh"
        resume_weights(run.learner, state, f"{changes.undo_hint()}, {advice}")
        prepare_training(flags, task, run.learner, run.plan.orders, run.memory)
        changes.refuse_reordered(run.learner.objective.model.state_dict())
        run.progress = restore_progress(run.learner, state)
        restore_streams(task, state)
        forget_values = partial(strategy.group.on_main, directory.forget_values)
        notes = resume(changes, run.plan, run.progress, run.is_complete, forget_values)
    return run, [*notes, *limit.note()]


def open_run(
    run: Run,
    notes: Sequence[str],
    flags: Flags,
    argv: Sequence[str],
    agents: Sequence[str] = (),
    loggers: Sequence[BackgroundLogger] = (),
) -> None:
    """Prepares the run directory for this run and opens its log, just before training.

    agents: the torchrun agents of this job. loggers: the user's loggers; empty except on rank 0.
    """
    given, strategy, directory = flags.checkpoint, run.strategy, run.directory
    facts = {"command_line": list(argv), "torchrun_agents": list(agents), **run.facts}

    def open_on_main() -> None:
        directory.require_space(size_of_checkpoint(run.learner))
        if starts_over(directory, given):
            directory.start_over()
        directory.delete(RESULTS)
        directory.write_json(CONFIG, facts)
        config = {name.lstrip("-"): value for name, value in run.facts["config"].items()}
        logged = LoggedRun(run.facts["run_id"], directory.path, config, run.progress.step, run.progress.last_report)
        with refusing_disk_errors(f"--save-dir {directory.path}: cannot write its logs"):
            run.log = RunLog(logged, run.task.headline, loggers)

    strategy.group.on_main(open_on_main)
    for line in [*describe_run(run, flags), *notes]:
        run.log.say(line)
    if strategy.device.type == "cuda" and not run.is_complete:  # on the CPU, memory is not a fixed limit
        with run.learner.launching():
            run.memory.dry_run(run.task, run.plan, run.log.say)
    source, step = given.resume_from, run.progress.step
    if source is not None and strategy.group.on_main(
        lambda: brings_another_run(directory, source) or step not in {entry.step for entry in directory.entries}
    ):
        best, run_id = run.progress.best, run.facts["run_id"]
        value, is_best, has_best = strategy.group.on_main(lambda: take_best_beside(source, best, directory, run_id))
        if best is not None and not has_best:
            run.log.say(f"{source.parent} lacks the best checkpoint (epoch {best.epoch}), so the best score is reset.")
            run.progress.best = None
        save(run, value, is_best)
        run.await_saver(run.saver.finish)


def size_of_checkpoint(learner: Learner) -> int:
    """Returns the size in bytes of the weights, their moving average, and the optimizer state."""
    weights = sum(value.nbytes for value in learner.objective.state_dict().values())
    moments = sum(p.nbytes for several in learner.optimizers.values() for p in moments_of(several))
    return weights * (2 if learner.ema.enabled else 1) + moments


def describe_run(run: Run, flags: Flags) -> list[str]:
    """Returns the lines that every run prints at its start."""
    task, strategy, batches, num_workers = run.task, run.strategy, run.memory.splits, run.workers.num_workers
    world_size, num_devices = strategy.group.world_size, strategy.num_devices
    places = [f"Devices: {strategy.describe()}."]
    for phase, split in zip(task.phases, batches, strict=True) if not task.fitted else ():
        exact = split.batch_size * num_devices * split.grad_accum_steps == split.global_batch_size
        factors = [f"x {num_devices} devices"] * (num_devices > 1)
        factors += [f"x {split.grad_accum_steps} accumulation steps"] * (split.grad_accum_steps > 1)
        places.append(
            f"Batch{f' of phase {phase}' if len(batches) > 1 else ''}: {split.global_batch_size} samples per step"
            f"{f' ({split.batch_size} ' if factors else ''}{' '.join(factors)}{')' if factors else ''}"
            f"{'' if exact else '; the last micro-batches are smaller'}."
        )
    trial = ", used only if the first steps show that they save time" if run.workers.on_trial else ""
    places.append(f"Workers: {num_workers} per rank{trial}. Threads: {torch.get_num_threads()} per rank.")
    lines = [" ".join([*places, f"Precision: {run.learner.precision}."])]
    if strategy.num_parts:
        own, total = len(strategy.shards), strategy.num_parts
        cost = f"each device runs {own} forward/backward pass(es) per step and stores {own.bit_length()} gradient(s)"
        lines.append(f"Parts: {total} per global batch. Results do not depend on the number of devices; {cost}.")
    lines += [
        f"Data: {', '.join(f'{len(d)} {name}' for name, d in task.splits().items())} samples. "
        f"Model: {'fitted, not trained' if task.fitted else f'{run.learner.num_parameters} parameters'}.",
        *where_data_are(task, run.loaders, flags.run.data_on, strategy.device),
        *remarks_on_streams(task, run.plan.turns, run.progress.position, world_size, num_workers),
        *task.remarks(),
        *remarks_on_weights(task),
        *flags.left_out,
        *[remark for watch in run.watches for remark in watch.remarks()],
        *run.learner.buffers.forward_state.remarks(world_size),
    ]
    if idle := strategy.group.num_idle_gpus:
        lines.append(f"Unused GPUs on the machine of rank 0: {idle}. To use all, start one rank per GPU.")
    is_gpu = strategy.device.type == "cuda"
    if flags.blocks.cuda_graphs == "on" and not is_gpu:
        lines.append("--cuda-graphs on: has no effect without a GPU.")
    elif flags.blocks.cuda_graphs != "off" and is_gpu and isinstance(run.learner, JointLearner | SamLearner):
        lines.append("CUDA graphs: steps with `joint_loss` or --sam-rho run without a graph.")
    if (peak := run.learning_rate.peak) != flags.learning.lr:
        whole, one_device = batches[0].global_batch_size, flags.batch.batch_size * flags.batch.grad_accum_steps
        why = f"{num_devices} devices"
        if whole != one_device * num_devices:
            why = f"a global batch of {whole} samples instead of {one_device}"
        lines.append(f"Scaling the learning rate from {flags.learning.lr:g} to {peak:g} for {why}")
    return lines


def prepare_training(
    flags: Flags, task: Task, learner: Learner, orders: Sequence[SampleOrder], memory: MemoryGuard
) -> float:
    """For each phase, builds the optimizers and wraps the model for the run's devices.

    All processes must call this function with equal weights. orders: sample order of each phase. Returns the CPU time
    in seconds of a trial forward pass (maximum over phases). Raises UserError if the task returns an invalid value.
    """
    strategy = learner.strategy
    check_same_parameters(learner.objective, strategy.group, method_name(task, "build_objective"))
    with strategy.unsharded(learner.objective):
        task.check_weights(learner.objective)
    if task.fitted:
        return 0.0
    prepare_blocks(flags.blocks, task, learner.objective)
    groups = {
        phase: completed_groups(task, learner.objective, phase, flags.learning.weight_decay) for phase in task.phases
    }
    learner.set_trained({phase: [p for group in own for p in group["params"]] for phase, own in groups.items()})
    for phase in task.phases:  # before any forward pass, so that out-of-memory messages include optimizer state
        learner.optimizers[phase] = build_optimizers(flags.learning, task, learner.objective, phase, groups[phase])
        strategy.check_optimizers(learner.optimizers[phase])
    learner.ema.leave_to([optimizer for several in learner.optimizers.values() for optimizer in several])
    first_s = 0.0
    for index, phase in enumerate(task.phases):
        per_forward = min(2, memory.splits[index].batch_size)
        example = example_batch(task, index, per_forward * strategy.num_replicas, strategy.device.type == "cuda")
        strategy.group.activity.enter("the first forward and backward pass")
        # DistributedDataParallel accumulates gradients on the stream on which it is built
        with learner.launching(), memory.refusing_lack(per_forward, "try --batch-size 1"):
            learner.nets[phase] = strategy.wrap(learner.enter(phase))
            check_single_samples(learner, phase, orders[index], memory.splits[index], example)
            with refusing_compilation() if flags.blocks.compile else nullcontext():
                exchanges, seconds = try_phase(learner, phase, example)
            first_s = max(first_s, seconds)
            if exchanges and not flags.blocks.compile:
                check_exchanges(learner, phase, orders[index], example)
    settle_recomputed(learner.objective, learner.buffers.forward_state.changes.values())
    return first_s


def assemble_run(
    flags: Flags,
    task: Task,
    strategy: Strategy,
    directory: RunDirectory | None = None,
    before: Mapping[str, Any] | None = None,
    is_new: bool = False,
    loading: Loading | None = None,
) -> Run:
    """Assembles a run with newly initialised weights and no log; writes no files.

    directory: run directory, if the run trains. before: facts in the checkpoint to resume, or in the config.json of a
    start that saved no checkpoint. is_new: whether to call `Task.initialise`. loading: result of `start_loading`.
    """
    workers, loaders = loading or start_loading(flags, task, strategy, trains=False)
    facts = start_facts(flags, task, strategy)
    batches, facts["lr_factor"] = arrange_batches(flags, facts["config"], facts["batch_sizes"], strategy, before)
    plan = build_plan(flags, task, batches)
    task.at = Progress().where(plan, strategy.group)  # for methods of the task that are called before the first step
    learning_rate = build_learning_rate(flags, task, plan, facts["lr_factor"])
    facts["global_batch_sizes"] = [split.global_batch_size for split in batches]
    facts["phase_sizes"] = plan.phase_sizes
    directory = directory or RunDirectory(flags.checkpoint.save_dir, retention_of(flags.checkpoint, task), say)
    learner = build_learner(flags, task, strategy, is_new)
    model = learner.objective.model
    limit = MemoryLimit(strategy.device_kind, flags.batch.batch_size)
    loaders = {**loaders, **loaders_on_device(task, flags.run.data_on, strategy.group)}
    if all(isinstance(loader, DeviceLoader) for loader in loaders.values()):
        workers.end()
    return Run(
        task=task,
        strategy=strategy,
        learner=learner,
        plan=plan,
        memory=MemoryGuard(batches, limit, learner, directory),
        learning_rate=learning_rate,
        workers=workers,
        loaders=loaders,
        directory=directory,
        saver=BackgroundSaver(directory.save),
        settings=flags.run,
        saving=flags.checkpoint,
        patience=flags.learning.early_stopping_patience,
        eval_batch_size=flags.batch.eval_batch_size or flags.batch.batch_size,
        progress=Progress(new_totals=totals_maker(strategy)),
        watches=[
            *([Remarks(workers.take_remarks)] if strategy.device.type == "cuda" or workers.num_workers > 0 else []),
            *build_watches(flags, task, learner, learning_rate.peak),
        ],
        model_outline={name: (weight.dtype, tuple(weight.shape)) for name, weight in model.state_dict().items()},
        facts=facts,
    )


# --- components -----------------------------------------------------------------------------------------------


def start_facts(flags: Flags, task: Task, strategy: Strategy) -> dict[str, Any]:
    """Describes a run's flags, data and environment for checkpoints. Raises UserError if ranks' data differ."""
    data_facts, digest = strategy.group.together(lambda: (facts_of_data(task), digest_of_data(task)))
    sizes = {f"data set {name!r}": len(dataset) for name, dataset in task.splits().items()}
    sizes |= {f"training data of phase {phase!r}": len(task.training_data(phase)) for phase in task.phases}
    advice = "start all ranks with the same flags and data; seed every generator that makes or splits data"
    strategy.group.require_same({**sizes, **data_facts, "the digest of the data": digest}, advice)
    return {
        "task": flags.run.task,
        "config": flags.values(),
        "batch_sizes": [task.batch_size(phase, flags.batch.batch_size) for phase in task.phases],
        "data_facts": data_facts,
        "environment": describe_environment(strategy),
        **({} if digest is None else {"data_digest": digest}),
    }


def build_watches(flags: Flags, task: Task, learner: Learner, learning_rate: float) -> list[Watch]:
    """Creates the observers (`Watch`) of a run's steps. learning_rate: peak learning rate."""
    strategy, advice = learner.strategy, learner.advice_if_diverged(learning_rate)
    watches: list[Watch] = []
    if flags.multi is not None and strategy.group.world_size > 1:
        watches = [Lockstep(learner.objective, strategy, flags.multi.lockstep_every), RankTimes(strategy.group)]
    own = [learner] if isinstance(learner, Watch) else []
    return [*watches, *own, StepOutcomes(strategy, task.phases, flags.learning.on_nonfinite, advice)]


def build_learner(flags: Flags, task: Task, strategy: Strategy, is_new: bool) -> Learner:
    """Builds the `Learner`, which runs training steps, with equal initial weights on every process."""
    precision, rho = choose_precision(flags.precision, strategy.device), flags.learning.sam_rho
    where = method_name(task, "build_objective")

    def build() -> Objective:
        torch.manual_seed(flags.run.seed)
        objective = task.build_objective()
        if not (isinstance(objective, Objective) and isinstance(objective.model, nn.Module)):
            raise UserError(f"{where} must return an Objective with a model, not a {type(objective).__name__}")
        check_signatures(objective, Objective)
        stray = set(objective.state_dict()) - {f"model.{name}" for name in objective.model.state_dict()}
        if stray:
            name = objective.given_as.get("forward", type(objective).__name__)
            raise UserError(
                f"{name} holds {', '.join(sorted(stray)[:3])} outside the model, but only the model is trained and "
                "saved; pass one model that holds everything to train, such as an nn.ModuleDict; frozen modules such "
                "as a teacher can be `helpers` of a task's objective (`super().__init__(model, helpers={...})`)"
            )
        check_helpers(objective, where, strategy.num_replicas)
        check_blocks(task, objective.model)
        check_tensors(objective.model, where)
        refuse_joint(objective, strategy, flags.blocks.compile)
        refuse_sam(rho, objective, strategy)
        return with_dense_tensors(module_in_dtype(objective, precision.dtype))

    def complete(objective: Objective) -> None:
        if is_new:
            task.initialise(objective)

    with refusing_sizes("the model", "lower the flags that set its size"):
        objective = strategy.place(build, task.blocks, complete)
    ema = ExponentialMovingAverage(objective.model, flags.learning.ema_decay)
    parts = objective, in_precision(objective, precision), strategy, precision, flags.learning.max_grad_norm, ema
    captures = flags.blocks.cuda_graphs != "off" and strategy.device.type == "cuda"
    if objective.is_joint or rho > 0:
        return JointLearner(*parts) if objective.is_joint else SamLearner(*parts, rho=rho)
    if not captures:
        return PartsLearner(*parts) if strategy.num_parts else Learner(*parts)
    from trainer.loop.graphs import GraphedInParts, GraphedLearner

    kind = GraphedInParts if strategy.num_parts else GraphedLearner
    return kind(*parts, only_if_faster=flags.blocks.cuda_graphs == "auto")


def example_batch(task: Task, phase: int, size: int, for_gpu: bool = False) -> Batch:
    """Builds and checks a batch of a phase with up to `size` samples, all with weight 0, to try a forward pass."""
    dataset = task.training_data(task.phases[phase])
    index = np.arange(min(size, len(dataset)))
    keys = SampleKeys(index, epoch=0, phase=phase, placeholder=True, few_lengths=for_gpu)
    batch = task.collate(dataset.__getitems__(keys), keys)
    check_batch(task, batch, len(keys.index))
    return batch | {"weight": torch.zeros_like(batch["weight"])}
