"""Evaluates the model, and calls the task's methods at the start of an epoch and after an evaluation."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.checkpoint.format import brief
from trainer.common.errors import UserError
from trainer.common.files import plain
from trainer.common.tensors import is_sharded, map_tensors
from trainer.loading.batches import of_dtype
from trainer.loading.order import SampleKeys
from trainer.loading.workers import BatchLoader
from trainer.logs.run_log import RunLog, SilentLog
from trainer.loop.contract import checked_metrics
from trainer.loop.learner import Learner
from trainer.loop.module_state import persistent_buffers
from trainer.loop.precision import Precision
from trainer.loop.run import Run
from trainer.loop.totals import PerSampleOutputs, Totals, require_sums, without_counting
from trainer.loop.windows import agree_ahead
from trainer.parallel.group import Group
from trainer.parallel.strategy import Strategy
from trainer.task import Objective, Picture, Sums, Task, validation_sets

NUM_EXAMPLES = 6


def validate(run: Run) -> dict[str, Sums]:
    """Evaluates every validation set; returns the results of `evaluate` by the set's name."""
    return {name: evaluate(run, name) for name in validation_sets(run.task.splits())}


@torch.no_grad()
def evaluate(run: Run, split: str) -> Sums:
    """Evaluates each sample of a data set once; returns the objective's sums over all samples, in float64 on the CPU.

    On rank 0 the result includes `PerSample` outputs of shape (num_samples, ...), in the order of the data set.

    Raises StopRequested if any process was asked to stop, and UserError if batches differ in output names or shapes.
    """
    learner, totals, per_sample = run.learner, run.progress.new_totals(), PerSampleOutputs()
    run.strategy.sync_tensors(persistent_buffers(learner.objective))
    net = run.strategy.evaluation_module(learner.net)
    num_samples, size = len(run.task.splits()[split]), run.eval_batch_size
    batches = run.prepared.pop(split, None) or run.evaluation_batches(split)
    net.eval()
    with learner.ema.applied(), run.memory.refusing_lack(size, f"use --eval-batch-size {-(-size // 2)}"):
        start_evaluation(learner.objective, learner.precision, run.strategy)
        learner.begin_evaluation()
        for (batch, weight, num_counted), _ in agree_ahead(batches, run.group, run.stop):
            run.group.activity.enter("evaluation")
            outputs = learner.evaluate(net, batch)
            require_sums(outputs, learner.objective, None)
            sums = {name: value for name, value in outputs.items() if isinstance(value, Tensor)}
            totals.add(sums if num_counted > 0 else without_counting(sums), weight)
            per_sample.add(batch["index"], outputs)
    net.train()
    sums = totals.reduced(run.group)
    return sums | per_sample.gathered(run.group, num_samples)


def metrics_of(task: Task, group: Group, sums: Mapping[str, Sums]) -> dict[str, float]:
    """Returns metrics such as "val/accuracy", computed on rank 0. sums: results of `evaluate` by data set."""
    return {
        f"{split}/{name}": value
        for split, own in sums.items()
        for name, value in group.on_main(partial(_summarised, task, split, own)).items()
    }


def _summarised(task: Task, split: str, sums: Sums) -> dict[str, float]:
    task.at = task.at._replace(split=split)
    return checked_metrics(task, "summarise", task.summarise(sums))


def after_validation(
    task: Task, group: Group, metrics: Mapping[str, float], state: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns rank 0's result of `Task.after_validation`. Raises UserError if a checkpoint cannot store the result."""

    def told() -> dict[str, Any]:
        name, found = f"{type(task).__name__}.after_validation", task.after_validation(dict(metrics), dict(state))
        try:
            if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
                raise ValueError(f"must return a mapping with strings as keys, not {brief(found)}")
            return {key: plain(value, key) for key, value in found.items()}
        except ValueError as error:
            raise UserError(f"{name}: {error}") from None

    return group.on_main(told)


def training_metrics(task: Task, group: Group, totals: Mapping[str, Totals]) -> dict[str, float]:
    """Returns metrics such as "train/loss", computed on rank 0.

    totals: each phase's sums since the last report of metrics. All processes must call this function.
    """
    reduced = {phase: totals[phase].reduced(group) for phase in task.phases}
    is_own = type(task).summarise_training is not Task.summarise_training
    method = "summarise_training" if is_own else "summarise"

    def summarise() -> dict[str, float]:
        return {
            of_phase(f"train/{name}", phase, task.phases): value
            for phase, sums in reduced.items()
            if sums
            for name, value in checked_metrics(task, method, task.summarise_training(sums, phase)).items()
        }

    return group.on_main(summarise)


def of_phase(metric: str, phase: str, phases: Sequence[str]) -> str:
    """Returns the full name of a training metric: "train/loss", or "train/generator/loss" with several phases."""
    folder, _, name = metric.rpartition("/")
    return "/".join(filter(None, [folder, phase, name])) if len(phases) > 1 else metric


def start_evaluation(objective: Objective, precision: Precision, strategy: Strategy) -> None:
    """Calls `Objective.start_evaluation`, which computes values that all batches of an evaluation share."""
    if type(objective).start_evaluation is Objective.start_evaluation:
        return
    strategy.group.activity.enter("the start of the evaluation")
    with strategy.unsharded(objective), precision.autocast(strategy.device.type):
        objective.start_evaluation()


# --- pictures ----------------------------------------------------------------------------------------------------


def log_pictures(run: Run, sums: Mapping[str, Sums]) -> None:
    """Draws the task's pictures of finished evaluations on rank 0, and logs them.

    All processes must call this function.
    """
    task, learner, strategy = run.task, run.learner, run.strategy
    has_examples = type(task).example_pictures is not Task.example_pictures

    def draw() -> None:
        pictures: dict[str, Picture] = {}
        for split, own in sums.items():
            found = dict(task.pictures(own))
            if has_examples:
                num_samples = len(task.splits()[split])
                found |= example_pictures(task, learner, run.loaders[split], num_samples)
            pictures |= {f"{split}/{name}": picture for name, picture in found.items()}
        run.log.pictures(run.progress.step, pictures)

    with ExitStack() as weights:
        if has_examples:
            weights.enter_context(learner.ema.applied())
            weights.enter_context(strategy.unsharded(learner.objective))
        strategy.group.on_main(draw)


@torch.no_grad()
def example_pictures(task: Task, learner: Learner, loader: BatchLoader, num_samples: int) -> Mapping[str, Picture]:
    """Draws pictures of up to `NUM_EXAMPLES` samples, spread evenly over the data set, without side effects."""
    keys = SampleKeys(np.unique(np.linspace(0, num_samples - 1, NUM_EXAMPLES).astype(np.int64)), epoch=0)
    objective, precision, strategy = learner.objective, learner.precision, learner.strategy
    batch = of_dtype({name: tensor.to(strategy.device) for name, tensor in loader.one(keys).items()}, precision.dtype)
    was_training = objective.training
    objective.eval()
    try:
        with strategy.preserving_rng_states(), precision.autocast(strategy.device.type):
            return task.example_pictures(objective, batch)
    finally:
        objective.train(was_training)


# --- the start of an epoch ---------------------------------------------------------------------------------------


def start_epoch(task: Task, learner: Learner, epoch: int, log: RunLog | SilentLog) -> None:
    """Calls `Task.on_epoch_start` on every process. epoch: number of completed epochs.

    Raises UserError if the method changes which parameters require gradients, or if weights or buffers then differ
    between processes.
    """
    method, strategy = type(task).on_epoch_start, learner.strategy
    if method is Task.on_epoch_start:
        return
    strategy.group.activity.enter("the start of the epoch")
    with torch.no_grad(), strategy.unsharded(learner.objective), learner.precision.autocast(strategy.device.type):
        before = {p: p.requires_grad for p in learner.objective.parameters()}
        task.on_epoch_start(learner.objective, epoch, log.progress)
        now = learner.objective.named_parameters()
        changed = [name for name, p in now if p.requires_grad != before.get(p, p.requires_grad)]
    if changed:
        raise UserError(
            f"{method.__qualname__} changes requires_grad of {changed[0]}, which a resumed run would not repeat; to "
            "freeze a part for some epochs, disable gradients in its forward (docs/own_task.md, Fine-tuning)"
        )
    if strategy.group.world_size > 1:
        digest = digest_of(learner.objective.state_dict().values())[:16]
        facts = {f"the digest of the model after {method.__qualname__}": digest}
        strategy.group.require_same(facts, "the method must depend only on the model and the epoch")


def digest_of(values: Iterable[Any]) -> str:
    """Hashes the elements of unsharded tensors, such as the values of a module's state dict; ignores other values."""
    digest = blake2b()

    def add(value: Tensor) -> Tensor:
        if value.layout != torch.strided:  # pickle divides a sparse tensor into dense tensors
            map_tensors(value.__reduce_ex__(2)[1], add)
        elif not is_sharded(value):  # each process has a different shard
            digest.update(value.detach().cpu().resolve_conj().contiguous().flatten().view(torch.uint8).numpy().data)
        return value

    map_tensors([*values], add)
    return digest.hexdigest()
