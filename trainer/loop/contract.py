"""Checks that a task fulfils the contract of `Task`; error messages name the offending method."""

import inspect
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainer.checkpoint.file import error_of_model
from trainer.common.errors import UserError, printable
from trainer.common.tensors import is_sharded
from trainer.common.torch_private import BATCH_NORMS, num_writes
from trainer.loading.batches import Batch
from trainer.loading.order import split_global_batch
from trainer.loop.learner import Learner
from trainer.loop.module_state import Change, leaving_no_trace
from trainer.loop.plan import BatchSplit, SampleOrder, ShuffledOrder
from trainer.loop.totals import OWN_METRICS, forward_name, require_sums
from trainer.parallel.group import Group
from trainer.parallel.rows import require_equal_exchanges
from trainer.parallel.strategy import Strategy
from trainer.task import Objective, Task, validation_sets


def check_signatures(own: object, base: type) -> None:
    """Raises UserError if an overriding method cannot be called like the method of the base class."""
    for name, method in vars(base).items():
        if not inspect.isfunction(method) or getattr(type(own), name) is method or name.startswith("_"):
            continue
        parameters = [*inspect.signature(method).parameters.values()][1:]
        try:
            found = inspect.signature(getattr(own, name))
        except (TypeError, ValueError):  # not callable, or without a signature
            continue
        taken = [each for each in parameters if each.name != "at" or "at" in found.parameters]
        fewest = [each.name for each in taken if each.default is inspect.Parameter.empty]
        for names in (fewest, [each.name for each in taken]):
            try:
                found.bind(*names)
            except TypeError:
                shown = ", ".join(str(each.replace(annotation=inspect.Parameter.empty)) for each in parameters)
                raise UserError(
                    f"{type(own).__name__}.{name}({', '.join(found.parameters)}): the trainer calls it as "
                    f"{name}({', '.join(names)}), which these parameters do not allow; write "
                    f"`def {name}({', '.join(filter(None, ['self', shown]))})`"
                ) from None


def check_constructor(task_type: type[Task], arguments: Sequence[Any]) -> None:
    """Raises UserError if a task's `__init__` cannot be called with `arguments`."""
    try:
        inspect.signature(task_type).bind(*arguments)
    except TypeError as error:
        raise UserError(
            f"{task_type.__name__}.__init__: {error}; write `def __init__(self, config, seed, cache_dir)`, and call "
            "super().__init__ with the three arguments"
        ) from None


def check_task(task: Task) -> None:
    """Checks a task's attributes and data sets before a model is built. Raises UserError if any is invalid."""
    check_signatures(task, Task)
    name, phases, turns = type(task).__name__, task.phases, task.turns
    are_names = isinstance(phases, tuple | list) and all(isinstance(phase, str) for phase in phases)
    if not are_names or not phases or len(set(phases)) < len(phases):
        raise UserError(f'{name}.phases {phases!r}: must be distinct names, such as ("train",)')
    if turns and (len(turns) != len(phases) or min(turns) < 1):
        raise UserError(f"{name}.turns {turns}: must be empty, or a number of steps (at least 1) for each of {phases}")
    monitor: Any = getattr(task, "monitor", None)
    is_pair = isinstance(monitor, tuple | list) and len(monitor) == 2
    if not (is_pair and isinstance(monitor[0], str) and monitor[1] in ("max", "min")):
        raise UserError(f"{name}.monitor {monitor}: must be a metric and 'max' or 'min', like ('val/accuracy', 'max')")
    headline: Any = task.headline
    if not isinstance(headline, tuple | list) or any(re.match("(train|val|test)/", str(each)) for each in headline):
        raise UserError(f"{name}.headline {headline!r}: must be metrics without a split, such as ('loss', 'accuracy')")
    splits = task.splits()
    if not isinstance(splits, Mapping):
        raise UserError(f"{name}.splits: must return a mapping from names to data sets, not a {type(splits).__name__}")
    if "train" not in splits:
        raise UserError(f"{name}.splits: returns {', '.join(map(str, splits)) or 'nothing'}, but must include 'train'")
    for split in splits:
        if not (isinstance(split, str) and re.fullmatch("train|test|val(/[^/]+)?", split)):
            raise UserError(
                f"{name}.splits: the name {split!r} must be 'train', 'test', 'val' or 'val/NAME', without another slash"
            )
    validated, metric = validation_sets(splits), monitor[0]
    if validated and metric.startswith("val/") and not any(metric.startswith(f"{split}/") for split in validated):
        raise UserError(f"{name}.monitor {metric!r}: must be a metric of a validation set ({', '.join(validated)})")


def check_batch(task: Task, batch: object, size: int) -> None:
    """Checks the batch that `Task.collate` returns for `size` samples. Raises UserError if it is invalid.

    Tensors must have equal lengths, because DataParallel splits them along dim 0 and silently drops unmatched chunks.
    """

    def refuse(problem: str) -> NoReturn:
        if getattr(type(task), "collate", None) is Task.collate:  # fit, for example, has no class that the user knows
            raise UserError(f"the data set {problem}; change the data, or make batches with `collate`")
        raise UserError(f"{type(task).__name__}.collate {problem}")

    if not isinstance(batch, dict):
        refuse(f"must return a dict of tensors, not a {type(batch).__name__}")
    for name in ("index", "weight"):
        if name not in batch:
            refuse(f"must put {name!r} into the batch")
    for name, value in batch.items():
        if not isinstance(name, str):
            refuse(f"must name its values by strings, not by {name!r}")
        if not isinstance(value, Tensor):
            refuse(f"must return a tensor for batch[{name!r}], not a {type(value).__name__}")
        if value.dim() == 0 or len(value) != size:
            refuse(f"must put the {size} samples on dim 0 of batch[{name!r}], whose shape is {tuple(value.shape)}")
    weight = batch["weight"]
    if weight.dim() > 1 or not weight.is_floating_point():
        found = f"{weight.dtype} of shape {tuple(weight.shape)}"
        refuse(f"must give batch['weight'] one floating-point number per sample, not {found}")


def check_blocks(task: Task, model: nn.Module) -> None:
    """Raises UserError if blocks of `Task.blocks` are outside the model, or share modules or parameters."""
    name, own = f"{type(task).__name__}.blocks", set(model.modules())
    seen: set[nn.Module | Tensor] = set()
    for block in task.blocks(model):
        kind = type(block).__name__
        if block not in own:
            raise UserError(f"{name}: returns a {kind} that is not a submodule of the model; return submodules")
        parts: set[nn.Module | Tensor] = {*block.modules(), *block.parameters()}
        if parts & seen:
            raise UserError(f"{name}: returns a {kind} that shares modules or parameters with another block; omit one")
        seen |= parts


def check_tensors(model: nn.Module, where: str) -> None:
    """Raises UserError if a model has lazy parameters or buffers, or state that a checkpoint cannot store."""
    lazy = [name for name, value in [*model.named_parameters(), *model.named_buffers()] if is_lazy(value)]
    if lazy:
        raise UserError(f"{where}: {lazy[0]} has no shape yet; run a forward pass on zeros in build_objective")
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise UserError(
                f"{where}: {name} is a {type(value).__name__}, but checkpoints hold only tensors; make it a tensor"
            )
    is_outline = torch.empty(0).is_meta  # fsdp first builds the model on the meta device
    wrong = None if is_outline else error_of_model(model.state_dict())
    if wrong is not None:
        raise UserError(
            f"{where}: {wrong}; give it another type, or register the buffer with persistent=False if building "
            "the model restores it"
        )


def check_helpers(objective: Objective, where: str, num_replicas: int) -> None:
    """Raises UserError if `Objective.helpers` share parameters with the model, or if DataParallel would copy them."""
    own = {*objective.model.parameters()}
    for name, helper in objective.helpers.items():
        if own.intersection(helper.parameters()):
            raise UserError(
                f"{where}: the helper {name!r} shares parameters with the model, but helpers are frozen; pass a "
                "copy (copy.deepcopy)"
            )
        if num_replicas > 1:
            raise UserError(f"{where}: --multi-gpu dp cannot copy the helper module {name!r}; use --multi-gpu ddp")


def check_same_parameters(objective: nn.Module, group: Group, where: str) -> None:
    """Raises UserError if the names, shapes or order of parameters differ between processes."""
    own = [(name, tuple(p.shape)) for name, p in objective.named_parameters()]
    if group.agrees(own):
        return
    models = group.all_gather_object(own)
    rank = next(rank for rank, model in enumerate(models) if model != models[0])
    expected, found = next(pair for pair in zip_longest(models[0], models[rank]) if pair[0] != pair[1])
    raise UserError(
        f"{where}: makes different parameters on rank {rank} and rank 0, or orders them differently: rank {rank} "
        f"has {found}, but rank 0 has {expected}; build the same model on all ranks, without iterating over a set"
    )


def try_phase(learner: Learner, phase: str, example: Batch) -> tuple[bool, float]:
    """Tries a phase's forward and backward pass, without side effects. All processes must call this function.

    Returns whether the forward pass itself runs collectives, and its CPU time in seconds. example: a batch with weights
    of 0. Raises UserError if the objective breaks the contract of `Objective`.

    DistributedDataParallel rebuilds its buckets after its first backward pass, which changes the order of summation.
    Without a trial, a resumed run would add its first step's gradients in another order than an uninterrupted run.
    """
    net, objective, strategy = learner.enter(phase), learner.objective, learner.strategy
    with _leaving_no_trace(learner, net) as changes:
        before = {
            name: (parameter, num_writes(parameter))
            for name, parameter in objective.named_parameters()
            if not is_sharded(parameter) and parameter.layout == torch.strided
        }
        drawn, num_before = strategy.rng_positions(), strategy.group.num_exchanges
        started = time.process_time()
        sums = net(strategy.to_device(example), phase)
        strategy.draws_on_host |= strategy.rng_positions() != drawn
        told = strategy.group.num_exchanges > num_before, time.process_time() - started
        require_sums(sums, objective, phase)
        if not sums["loss"].requires_grad:
            raise UserError(
                f"{forward_name(objective, phase)} returns a loss that depends on no parameter to train; compute it "
                "from the model's outputs, without `detach`, `argmax` or comparisons"
            )
        now = dict(objective.named_parameters())
        changed = (
            name for name, (p, version) in before.items() if now.get(name, p) is not p or num_writes(p) != version
        )
        if (name := next(changed, None)) is not None:
            raise UserError(
                f"{forward_name(objective, phase)} changes the parameter {name}, but each rank would change it "
                "differently; change parameters only in the optimizer, or in `after_step` of a task's objective"
            )
        learner.buffers.learn(changes(), objective, strategy.group)
        (sums["loss"] * 0).backward()
        if all(parameter.grad is None for parameter in learner.params[phase]):
            raise UserError(
                f"{forward_name(objective, phase)} returns a loss that depends on no trained parameter of the model "
                "that it receives, a copy of the given model; compute the loss from that model"
            )
    strategy.build_buckets(net)
    return told


def check_exchanges(learner: Learner, phase: str, order: SampleOrder, example: Batch) -> None:
    """Raises UserError if the collectives of a forward pass depend on its number of samples.

    In a step, processes may get different numbers of samples. All processes must call this function.
    """
    size, strategy, group = len(example["weight"]), learner.strategy, learner.strategy.group
    if size == 1 or strategy.exchanges_in_forward or not any(each % group.world_size for each in order.step_sizes):
        return
    counted = {**example, "weight": torch.ones_like(example["weight"])}
    batch = {name: tensor[: size if group.is_main else 1].to(strategy.device) for name, tensor in counted.items()}
    where = forward_name(learner.objective, phase)
    with _leaving_no_trace(learner, learner.net):
        require_equal_exchanges(where, group, partial(learner.net, batch, phase))


def check_single_samples(learner: Learner, phase: str, order: SampleOrder, split: BatchSplit, example: Batch) -> None:
    """Raises UserError if a training forward pass would get a single sample, which a batch norm of the model rejects.

    Runs a trial, because BatchNorm2d accepts a single sample of several pixels. All processes must call this function.
    """
    if not any(isinstance(module, BATCH_NORMS) for module in learner.objective.modules()):
        return
    refused = sorted(
        size for size in order.step_sizes if leaves_a_single_sample(learner.strategy, size, split.micro_batch_size)
    )
    if not refused:
        return
    try:
        single = {name: tensor[:1].to(learner.strategy.device) for name, tensor in example.items()}
        with _leaving_no_trace(learner, learner.net):
            learner.net(single, phase)
    except ValueError as error:
        if not str(error).startswith("Expected more than 1 value per channel"):
            raise
        only_the_rest = isinstance(order, ShuffledOrder) and refused[-1] < order.global_batch_size
        step = "the last step" if only_the_rest else "a step"
        advice = "drop this step with --drop-last, or use another --batch-size" if only_the_rest else "use another size"
        raise UserError(
            f"--batch-size {split.batch_size}: {step} of an epoch, with {refused[-1]} sample(s), runs a forward "
            f"pass on a single sample, but a batch norm of the model needs at least two; {advice}"
        ) from None


def leaves_a_single_sample(strategy: Strategy, global_batch_size: int, micro_batch_size: int) -> bool:
    """Returns whether the first or last rank has a one-sample forward pass in a step of `global_batch_size` samples."""
    num_shards, samples = strategy.num_parts or strategy.group.world_size, np.arange(global_batch_size)
    shares = [split_global_batch(samples, (shard, num_shards), micro_batch_size, 0) for shard in (0, num_shards - 1)]
    trained = [keys for share in shares for keys in share if not (strategy.num_parts and keys.placeholder)]
    parts = [torch.from_numpy(keys.index).chunk(strategy.num_replicas) for keys in trained]
    return any(len(part[-1]) == 1 for part in parts)


@contextmanager
def _leaving_no_trace(learner: Learner, net: nn.Module) -> Iterator[Callable[[], list[Change]]]:
    """Context for trial forward passes in train mode; yields a function that lists changes; undoes them on exit."""
    net.train()
    with leaving_no_trace(learner.objective) as changes, learner.strategy.preserving_rng_states():
        yield changes
    learner.objective.zero_grad(set_to_none=True)


def checked_metrics(task: Task, method: str, metrics: object) -> dict[str, float]:
    """Returns the metrics of `method` as Python numbers. Raises UserError if they are not a dict of numbers."""
    name = f"{type(task).__name__}.{method}"
    if not isinstance(metrics, dict):
        raise UserError(f"{name}: must return a dict of numbers, not a {type(metrics).__name__}")
    for metric, value in metrics.items():
        if not isinstance(value, int | float):
            raise UserError(f"{name}: must return a number for {metric!r}, not a {type(value).__name__}; use float()")
        if isinstance(value, int) and abs(value) > sys.float_info.max:
            raise UserError(f"{name}: returns a whole number for {metric!r} that is too large for a float")
        if metric in OWN_METRICS:
            raise UserError(f"{name}: returns {metric!r}, the name of a metric of the trainer; rename it")
    return {
        printable(str(metric)): value if type(value) in (int, float) else float(value)
        for metric, value in metrics.items()
    }


def monitored(task: Task, metrics: Mapping[str, float]) -> float:
    """Returns the value of the metric that `Task.monitor` names. Raises UserError if `metrics` lacks the metric."""
    name, _ = task.monitor
    if printable(name) not in metrics:
        raise UserError(f"{type(task).__name__}.monitor: {name!r} must be one of the metrics {', '.join(metrics)}")
    return metrics[printable(name)]
