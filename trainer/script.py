"""Builds a task from the model, data and loss that a script passes to `trainer.fit`."""

import copy
import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from trainer.common.errors import UserError, shortened
from trainer.common.torch_private import copy_hooks
from trainer.config import FlagGroup, flag
from trainer.loading.batches import Batch, KeyedDataset, gathered, of_dtype
from trainer.loading.order import SampleKeys
from trainer.loading.torch_datasets import KeyedItems, from_dataset, is_keyed
from trainer.parallel.devices import pick_device
from trainer.registry import SCRIPT
from trainer.task import Objective, ParamGroup, Sums, Task

Loss = Callable[[nn.Module, Batch], Tensor | Mapping[str, Tensor]]
Outputs = Callable[[nn.Module, Batch], Tensor]
OF_NAMED_OPTIMIZERS = ("weight_decay", "betas", "eps", "momentum", "nesterov")
"""Settings of optimizers that `--optimizer` names; a given class or functools.partial has its own settings."""


@dataclass
class ScriptFlags(FlagGroup):
    """Task: a script"""

    loss: str = flag("", "loss function, with a checksum of its source code and numbers; set by fit", local=True)
    network: str = flag("", "class of the model, with a checksum of its structure; set by fit", local=True)
    given_optimizer: str = flag("", "functools.partial of an optimizer, with a checksum; set by fit", local=True)


@dataclass(frozen=True)
class Job:
    """Arguments of `trainer.fit`.

    helpers: frozen modules that the loss uses, by variable name. sources: data by split. remarks: sentences about
    settings taken from DataLoaders, and about helpers.
    """

    model: nn.Module
    loss: Loss
    helpers: Mapping[str, nn.Module]
    sources: Mapping[str, Any]
    names: Sequence[str] | None
    collate: Any
    build_optimizer: Callable[..., torch.optim.Optimizer] | None
    remarks: Sequence[str]


class Script(Task):
    """Task made from the arguments of `trainer.fit`; `task_of` creates a subclass for each call."""

    Config = ScriptFlags
    given_as: ClassVar = dict.fromkeys(("build_objective", "param_groups"), "fit, the model")
    given_as["build_optimizers"] = "fit, the optimizer"
    job: ClassVar[Job]

    def splits(self) -> Mapping[str, KeyedDataset]:
        return self._splits

    @cached_property
    def _splits(self) -> Mapping[str, KeyedDataset]:
        return {name: self.keyed(f"fit, {name}", source, self.job.names) for name, source in self.job.sources.items()}

    def keyed(self, where: str, source: Any, names: Sequence[str] | None, collate: Any = None) -> KeyedDataset:
        """Adapts data that the script gives. where: its name in messages. Raises UserError."""
        dataset, of_loader = _items(source)
        if is_keyed(dataset):
            return dataset
        try:
            keyed = from_dataset(dataset, collate or self.job.collate or of_loader, seed=self.seed, names=names)
            if isinstance(keyed, KeyedItems):
                keyed.source = f"{where}: its data set ({type(dataset).__name__})"
            return keyed
        except UserError as error:
            raise UserError(f"{where}: {error}".replace("from_dataset(", "its data set (", 1)) from None

    def remarks(self) -> Sequence[str]:
        return self.job.remarks

    def build_objective(self) -> Objective:
        return Rows(_copied(self.job.model), self.job.loss, self.job.helpers)

    def param_groups(self, objective: Objective, phase: str) -> list[ParamGroup]:
        groups = super().param_groups(objective, phase)
        # a given optimizer class ignores --weight-decay, which must not refuse sparse embeddings then
        return groups if self.job.build_optimizer is None else [group | {"weight_decay": 0.0} for group in groups]

    def build_optimizers(
        self, phase: str, groups: list[ParamGroup], lr: float
    ) -> Sequence[torch.optim.Optimizer] | None:
        own = [{"params": group["params"]} for group in groups]
        return None if self.job.build_optimizer is None else [self.job.build_optimizer(own, lr=lr)]


class Rows(Objective):
    """Objective of a model and a loss function that returns one number per sample."""

    given_as: ClassVar = {"forward": "fit: the loss"}

    def __init__(self, model: nn.Module, loss: Loss, helpers: Mapping[str, nn.Module]) -> None:
        super().__init__(model, helpers)
        self.loss = loss

    def forward(self, batch: Batch, phase: str = "train") -> Sums:
        found = self.loss(self.model, batch)
        rows = dict(found) if isinstance(found, Mapping) else {"loss": found}
        return {name: self._sum(name, value, len(batch["weight"])) for name, value in rows.items()}

    def _sum(self, name: str, row: object, num_samples: int) -> Tensor:
        """Sums a loss or metric over samples. Raises UserError unless `row` is a tensor with one number per sample."""
        if isinstance(row, Tensor) and row.shape == (num_samples,):
            return row.sum(dtype=torch.promote_types(row.dtype, torch.float32) if row.is_floating_point() else None)
        what = f"a tensor of shape {tuple(row.shape)}" if isinstance(row, Tensor) else f"a {type(row).__name__}"
        raise UserError(
            f"fit: the loss returned {what} for {name!r}, but must return one number for each of the {num_samples} "
            "samples of the batch; use reduction='none', and if a sample has several terms, return their mean, or "
            "return their sum and add the number of terms to the data as 'weight'"
        )


def task_of(model: nn.Module, train: Any, loss: Loss, settings: dict[str, Any]) -> type[Script]:
    """Creates a task class from the arguments of `trainer.fit`.

    settings: keyword arguments of `fit`, changed in place: those that are not flags are removed, and flags that other
    arguments determine, such as a DataLoader's batch size, are added. Raises UserError.
    """
    names, collate, optimizer = (settings.pop(name, None) for name in ("names", "collate", "optimizer"))
    others = {split: settings.pop(split, None) for split in ("val", "test")}
    sources = {"train": train} | {split: source for split, source in others.items() if source is not None}
    if not callable(loss) or type(loss).__module__ == nn.modules.loss.__name__:
        account = "must map a model and a batch to a number for each sample; call fit(model, train, loss)"
        raise UserError(f"fit: loss of type {type(loss).__name__}: {account}")
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(value):
            raise UserError(f"fit: {name} of the model has no shape before the first forward pass; call the model once")
    remarks = [_taken(name, source, settings) for name, source in sources.items() if isinstance(source, DataLoader)]
    try:
        own = _copied(model).cpu()
    except Exception as error:  # a user's module may raise anything
        raise UserError(f"fit: cannot copy the model ({type(error).__name__}: {error}); pass a new model") from None
    if not all(parameter.is_leaf for parameter in own.parameters()):
        raise UserError("fit: cannot copy a model made by torch.jit; pass the model from which it was made")
    function = loss.func if isinstance(loss, partial) else loss
    settings["loss"] = _identity(loss)
    settings["network"] = _with_digest(type(own).__qualname__, re.sub(" at 0x[0-9a-f]+", "", str(own)))
    build = _builder(optimizer, settings)
    if isinstance(build, partial):
        settings["given_optimizer"] = _with_digest(build.func.__qualname__, _plain(build.keywords.items()))
    used = dict[str, nn.Module]()
    if not isinstance(loss, nn.Module):  # such a loss is refused if it has tensors
        _add_modules("loss", loss, getattr(function, "__module__", ""), {*map(id, model.modules())}, used)
    helpers = {name: each for name, each in used.items() if not any(p.requires_grad for p in each.parameters())}
    if helpers:
        remarks.append(f"The loss uses frozen modules, which stay in eval mode: {', '.join(helpers)}.")
    if untrained := used.keys() - helpers.keys():
        remarks.append(
            f"The loss uses modules that are neither trained nor saved: {', '.join(sorted(untrained))}. Put what the "
            "run trains into the model, and freeze the others with requires_grad_(False)."
        )
    job = Job(own, loss, helpers, sources, names, collate, build, remarks)
    return type(SCRIPT, (Script,), {"job": job, "__module__": getattr(function, "__module__", "__main__")})


def _copied(model: nn.Module) -> nn.Module:
    """Copies a model with the gradient hooks of its trained parameters, which `copy.deepcopy` drops."""
    own = copy.deepcopy(model)
    for parameter, twin in zip(model.parameters(), own.parameters(), strict=True):
        if parameter.requires_grad:
            copy_hooks(parameter, twin)
    return own


def _identity(given: Any) -> str:
    """Returns a loss function's qualified name, followed by a digest.

    The digest covers its source code, and plain values, such as numbers, in the arguments of a functools.partial, in
    the outer variables of a function, or in the attributes of a callable object.
    """
    function = given.func if isinstance(given, partial) else given
    named = function if hasattr(function, "__qualname__") else type(function)
    read: list[object] = [value if isinstance(name, int) else (name, value) for name, value in _variables(given)]
    with suppress(OSError, TypeError):
        read.append(inspect.getsource(named))
    return _with_digest(named.__qualname__, _plain(read))


def _variables(given: Any) -> list[tuple[Any, Any]]:
    """Returns the arguments of a functools.partial, and outer variables or attributes of its function, by name."""
    function = given.func if isinstance(given, partial) else given
    found: list[tuple[Any, Any]] = []
    if isinstance(given, partial):
        found = [*enumerate(given.args), *given.keywords.items()]
    if isinstance(function, FunctionType):
        with suppress(ValueError):  # an outer variable that has no value yet
            outside = inspect.getclosurevars(function)
            found += [*outside.nonlocals.items(), *outside.globals.items()]
    else:
        found += getattr(function, "__dict__", {}).items()
    return found


def _add_modules(name: str, value: Any, file: str, seen: set[int], found: dict[str, nn.Module]) -> None:
    """Adds the modules with tensors in a loss's variables, containers, and functions and objects of the same file.

    file: `__module__` of the loss. seen: ids of values to leave out.
    """
    if id(value) in seen:
        return
    seen.add(id(value))
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, nn.Module):
        if value.state_dict():
            found[name] = value
    elif isinstance(value, tuple | list):
        inner = ((f"{name}.{i}", each) for i, each in enumerate(value))
    elif isinstance(value, dict):
        inner = ((f"{name}.{key}", each) for key, each in value.items())
    elif isinstance(value, MethodType):
        inner = ((name, value.__self__), (name, value.__func__))
    elif isinstance(value, partial) or (getattr(value, "__module__", "") == file and not isinstance(value, type)):
        inner = [("", value.func), *_variables(value)] if isinstance(value, partial) else _variables(value)
    for key, each in inner:
        _add_modules(str(key), each, file, seen, found)


def _plain(values: Iterable[object]) -> str:
    return repr(sorted(repr(value) for value in values if _is_plain(value)))


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)


def _with_digest(name: str, text: str) -> str:
    return f"{name} ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


@torch.no_grad()
def predicted(
    task_type: type[Script], model: nn.Module, source: Any, outputs: Outputs | None, batch_size: int
) -> Tensor:
    """Returns a trained model's outputs for all items of a data set, as `SavedRun.predict` describes."""
    job, device, task = task_type.job, pick_device("auto"), task_type(task_type.Config(), 0, Path())
    if outputs is not None and not callable(outputs):
        raise UserError(f"predict: outputs {shortened(repr(outputs))}: must be a function of the model and a batch")
    if type(batch_size) is not int or batch_size < 1:
        raise UserError(f"predict: batch_size {shortened(repr(batch_size))}: must be a whole number of at least 1")
    if isinstance(source, DataLoader) and (found := _settings_of_order(source)):
        raise UserError(
            f"predict: the DataLoader has {found}, but outputs are returned in the order of its data set; pass its "
            "`dataset`, or a torch.utils.data.Subset of it"
        )
    (dataset, collate), item = _items(source), None
    with suppress(IndexError, NotImplementedError, TypeError):  # data without items, which are refused below
        item = dataset if isinstance(dataset, Mapping) or is_keyed(dataset) else dataset[0]
    num_parts = len(item) if isinstance(item, tuple | list) else 1
    names = None if isinstance(item, Mapping) or job.names is None else job.names[:num_parts]
    dataset = task.keyed("predict", source, names, collate or job.collate or _items(job.sources["train"])[1])
    if len(dataset) == 0:
        raise UserError("predict: the data set is empty")
    answers, model = [], model.to(device).eval()
    is_double = any(parameter.dtype == torch.float64 for parameter in model.parameters())
    for start in range(0, len(dataset), batch_size):
        keys = SampleKeys(np.arange(start, min(start + batch_size, len(dataset))), epoch=0)
        batch = {name: tensor.to(device) for name, tensor in gathered(dataset, task.collate, keys).items()}
        if is_double:
            batch = of_dtype(batch, torch.float64)
        answers.append(_outputs_of(model, batch, outputs).cpu())
    shapes = {answer.shape[1:] for answer in answers}
    if len(shapes) > 1:
        sizes = " and ".join(sorted(str(tuple(shape)) for shape in shapes))
        raise UserError(f"predict: outputs per sample differ in shape ({sizes}); pass `outputs` that pads them")
    return torch.cat(answers)


def _outputs_of(model: nn.Module, batch: Batch, outputs: Outputs | None) -> Tensor:
    first, num_samples = next(iter(batch)), len(batch["weight"])
    whose = "outputs(model, batch)" if outputs else f"model(batch[{first!r}])"
    try:
        found: object = outputs(model, batch) if outputs else model(batch[first])
        if isinstance(found, Tensor) and found.shape[:1] == (num_samples,):
            return found
        what = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        problem = f"returned {what} for {num_samples} samples"
    except (NotImplementedError, TypeError) as error:  # a model without a forward, or whose forward needs more
        if outputs:
            raise
        problem = f"raised {type(error).__name__}: {error}"
    advice = "pass `outputs`, which maps the model and a batch to a tensor with one row per sample"
    raise UserError(f"predict: {whose} {problem}; {advice}")


# --- loaders -----------------------------------------------------------------------------------------------------


def _items(source: Any) -> tuple[Any, Any]:
    """Returns a DataLoader's data set and collate_fn (None for `default_collate`), or the source itself and None."""
    if not isinstance(source, DataLoader):
        return source, None
    return source.dataset, None if source.collate_fn is default_collate else source.collate_fn


def _taken(name: str, loader: DataLoader[Any], settings: dict[str, Any]) -> str:
    """Adds to `settings` the flags that a DataLoader determines; returns a sentence about them."""
    if found := _settings_of_order(loader):
        raise UserError(
            f"fit, {name}: the DataLoader has {found}, which the trainer cannot reproduce when a run resumes or "
            "changes its number of devices; pass its `dataset`, or for your own order write a task with an `order`"
        )
    flags, order = {"eval_batch_size": loader.batch_size}, ""
    if name == "train":
        order = " The trainer chooses a new order of samples in each epoch."
        flags = {each: getattr(loader, each) for each in ("batch_size", "drop_last", "num_workers")}
    taken = {flag: value for flag, value in flags.items() if settings.get(flag) is None}
    settings |= taken
    said = ", ".join(f"{flag} {value}" for flag, value in taken.items())
    return f"Taken from the DataLoader {name}: its data set, {said or 'no flag'}.{order}"


def _settings_of_order(loader: DataLoader[Any]) -> str:
    """Names a DataLoader's settings that determine the order of samples, which only the trainer may do; "" if none."""
    sampler, found = loader.sampler, []
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        return ""  # from_dataset raises the error
    is_random = isinstance(sampler, RandomSampler) and not sampler.replacement and len(dataset) == sampler.num_samples
    if type(sampler) is not SequentialSampler and not is_random:
        found.append(f"the sampler {type(sampler).__name__}")
    if loader.batch_size is None or type(loader.batch_sampler) is not torch.utils.data.BatchSampler:
        found.append("a batch_sampler, or batches that the data set makes")
    found += [f"the {each}" for each in ("worker_init_fn", "generator") if getattr(loader, each) is not None]
    return " and ".join(found)


# --- the optimizer -----------------------------------------------------------------------------------------------


def _builder(optimizer: Any, settings: dict[str, Any]) -> Callable[..., torch.optim.Optimizer] | None:
    """Returns a function that builds the optimizer for `fit`; None if `--optimizer` names it. Raises UserError."""
    if optimizer is None or isinstance(optimizer, str):
        settings |= {} if optimizer is None else {"optimizer": optimizer}
        return None
    kind = optimizer.func if isinstance(optimizer, partial) else optimizer
    problem = None
    if isinstance(kind, torch.optim.Optimizer):
        name = type(kind).__name__
        problem = (
            f"optimizer {name} is an instance with the parameters of your model, but a copy of the model is trained; "
            f"give the class {name}, or a functools.partial of it with its settings"
        )
    elif not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        problem = f"optimizer {optimizer!r}: must be a class, a functools.partial of a class, or a name like 'adamw'"
    elif issubclass(kind, torch.optim.LBFGS):
        problem = "optimizer LBFGS needs a closure that evaluates the loss again, which is not supported; use another"
    elif isinstance(optimizer, partial) and ("lr" in optimizer.keywords or optimizer.args):
        problem = f"the partial of {kind.__name__} has its own lr; leave it out, and give fit lr=..."
    elif given := [name for name in OF_NAMED_OPTIMIZERS if settings.get(name) is not None]:
        account = f"has no effect on the given optimizer class; leave it out, or give it to {kind.__name__}"
        problem = f"{given[0]} {settings[given[0]]}: {account} with functools.partial"
    if problem is not None:
        raise UserError(f"fit: {problem}")
    build: Callable[..., torch.optim.Optimizer] = optimizer
    return build
