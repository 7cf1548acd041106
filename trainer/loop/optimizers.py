"""Builds optimizers, and counts the tensors in their states."""

import inspect
import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.common.errors import UserError
from trainer.common.tensors import is_sharded
from trainer.common.torch_private import has_step_hooks, reads_found_inf
from trainer.config import given_flags
from trainer.flags import OPTIMIZERS, SETTINGS, LearningFlags
from trainer.loop.ema import keeps_average
from trainer.parallel.optimizer_states import facts_of, remember_settings
from trainer.task import Objective, ParamGroup, Task, method_name, sparse_parameters

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
OF_EVERY_GROUP = {"params", "weight_decay", "lr_scale"}


def build_optimizers(
    learning: LearningFlags, task: Task, objective: Objective, phase: str, groups: Sequence[ParamGroup]
) -> list[Optimizer]:
    """Builds a training phase's optimizers with `Task.build_optimizers`, or from the flags if it returns None.

    groups: parameter groups from `completed_groups`. Raises UserError if the task returns invalid optimizers or groups.
    """
    own = task.build_optimizers(phase, [dict(group) for group in groups], learning.lr)
    if own is not None:
        _refuse(task, "build_optimizers", phase, _problem_of_own(own, groups, learning.lr))
        useless = " and ".join(given_flags(learning, SETTINGS))
        _refuse(task, "build_optimizers", phase, f"{useless} would have no effect; leave it out" if useless else None)
        for optimizer in own:
            if keeps_average(optimizer):
                optimizer.train()  # type: ignore[attr-defined]
            remember_settings(optimizer)
        return list(own)
    hidden = hidden_matrices(task, objective.model) if learning.optimizer == "muon" else set[Tensor]()
    optimizers = by_flags(learning, groups, set(sparse_parameters(objective)), hidden)
    _refuse(task, "param_groups", phase, _unknown_setting(learning, optimizers))
    return optimizers


def _refuse(task: Task, method: str, phase: str, problem: str | None) -> None:
    if problem is not None:
        raise UserError(f"{method_name(task, method)}: phase {phase!r}: {problem}")


# --- parameter groups --------------------------------------------------------------------------------------------


def completed_groups(task: Task, objective: Objective, phase: str, weight_decay: float) -> list[ParamGroup]:
    """Returns the task's parameter groups, each with a weight decay; omits frozen parameters and empty groups.

    weight_decay: value for groups that set none. Call this function before `Learner.set_trained`, which sets
    `requires_grad` by phase. Raises UserError for an invalid parameter group.
    """
    sparse = set(sparse_parameters(objective))
    groups = [
        group | {"params": [p for p in group["params"] if p.requires_grad]}
        for group in task.param_groups(objective, phase)
    ]
    groups = [{"weight_decay": weight_decay, **group} for group in groups if group["params"]]
    if not groups:
        _refuse(task, "param_groups", phase, "trains no parameters; give it some with requires_grad=True")
    for group in groups:
        _refuse(task, "param_groups", phase, _problem_of_group(group, sparse))
    return groups


def _problem_of_group(group: ParamGroup, sparse: Collection[Tensor]) -> str | None:
    if "lr" in group:
        return f'a group has "lr" {group["lr"]}, but the schedule sets it; give "lr_scale", a factor on --lr'
    scale = group.get("lr_scale", 1.0)
    if not 0 <= scale < math.inf:
        return f'a group has "lr_scale" {scale}; it must be a finite number, at least 0'
    if group["weight_decay"] and any(p in sparse for p in group["params"]):
        return (
            f"a group with weight decay {group['weight_decay']} contains parameters of sparse embeddings, whose "
            'rows a step may skip; put them into a group with "weight_decay": 0.0, or give --weight-decay 0'
        )
    return None


def _divided(groups: Sequence[ParamGroup], chosen: Collection[Tensor]) -> tuple[list[ParamGroup], list[ParamGroup]]:
    """Returns the groups of the parameters in `chosen`, and the groups of all other parameters; drops empty groups."""

    def part(of_chosen: bool) -> list[ParamGroup]:
        parts = [group | {"params": [p for p in group["params"] if (p in chosen) == of_chosen]} for group in groups]
        return [group for group in parts if group["params"]]

    return part(True), part(False)


# --- by the flags ------------------------------------------------------------------------------------------------


def by_flags(
    learning: LearningFlags, groups: Sequence[ParamGroup], sparse: Collection[Tensor], hidden: Collection[Tensor]
) -> list[Optimizer]:
    """Builds the optimizers that `--optimizer` selects, and a SparseAdam for the parameters in `sparse`.

    hidden: parameters that `--optimizer muon` trains with Muon, while AdamW trains the other dense parameters.
    """
    rows, dense = _divided(groups, sparse)
    matrices, others = _divided(dense, hidden)
    built = []
    for key, part in (("muon", matrices), ("adamw" if hidden else learning.optimizer, others), ("sparse", rows)):
        facts, params = OPTIMIZERS[key], [p for group in part for p in group["params"]]
        its = {name: value for name in facts.settings if (value := getattr(learning, name)) is not None}
        # Fused steps reject complex parameters, and SGD's sharded ones; an explicit fused=False disables `foreach`.
        if facts.has_fused and all(p.is_floating_point() and not (key == "sgd" and is_sharded(p)) for p in params):
            its["fused"] = True
        if key == "muon":
            # Makes Muon's updates as large as AdamW's, so that both can use one learning rate (Liu et al., 2025,
            # arXiv:2502.16982, section 2).
            its["adjust_lr_fn"] = "match_rms_adamw"
        if part:
            built.append(without_compiler(SGD if key == "sgd" else facts.type)(part, lr=learning.lr, **its))
    return built


def hidden_matrices(task: Task, model: nn.Module) -> set[Tensor]:
    """Returns the parameters that Muon trains (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon).

    Muon trains the matrices in `Task.blocks`, or, if the task has no blocks, all matrices except embeddings and the
    last linear layer. Raises UserError if there are no matrices for Muon.
    """
    blocks = list(task.blocks(model))
    outer: list[nn.Module] = []
    if not blocks:
        outer += [module for module in model.modules() if isinstance(module, nn.Linear)][-1:]
        outer += [module for module in model.modules() if isinstance(module, EMBEDDINGS)]
    found: set[Tensor] = {p for block in blocks or [model] for p in block.parameters() if p.dim() == 2}
    found -= {p for module in outer for p in module.parameters()}
    if not found:
        raise UserError(
            "--optimizer muon: trains hidden matrices, but this model has none: all its parameters are vectors, "
            "tensors of more than two dimensions, embeddings or the last linear layer; use --optimizer adamw"
        )
    return found


def _unknown_setting(learning: LearningFlags, optimizers: Sequence[Optimizer]) -> str | None:
    """Returns an error message if a parameter group has an entry that PyTorch would silently ignore, or else None."""
    known = OF_EVERY_GROUP.union(*(optimizer.defaults for optimizer in optimizers))
    unknown = [name for optimizer in optimizers for group in optimizer.param_groups for name in group.keys() - known]
    if unknown:
        return f'a group has "{unknown[0]}", which is not a setting of --optimizer {learning.optimizer}; remove it'
    return None


# --- by the task -------------------------------------------------------------------------------------------------


def _problem_of_own(own: Any, groups: Sequence[ParamGroup], lr: float) -> str | None:
    """Returns an error message if a task's optimizers are invalid, or else None. lr: their required learning rate."""
    if not isinstance(own, Sequence) or not all(isinstance(optimizer, Optimizer) for optimizer in own):
        return f"must return a list of torch.optim.Optimizer, or None to use --optimizer, not {type(own).__name__}"
    for optimizer in own:
        name = type(optimizer).__name__
        if any("lr" not in group for group in optimizer.param_groups):
            return f'{name} has a group without "lr", which the schedule would set; add "lr" to the group'
        rates = [group["lr"] for group in optimizer.param_groups if group["lr"] != lr]
        if rates:
            return (
                f"{name} has the learning rate {rates[0]}, but the schedule sets it; pass the given {lr} instead, and "
                'to scale it add "lr_scale" to the group, a factor on --lr'
            )
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            return f"{name} needs a closure that evaluates the loss again, which this trainer does not support"
    trained = [p for optimizer in own for group in optimizer.param_groups for p in group["params"]]
    expected = {p for group in groups for p in group["params"]}
    if set(trained) != expected or len(trained) > len(expected):
        return (
            f"the optimizers must train each of the {len(expected)} parameters of param_groups once; they have "
            f"{len(trained)}, of which {len(expected & set(trained))} are in param_groups"
        )
    return None


# --- PyTorch's optimizers ----------------------------------------------------------------------------------------


def without_compiler(optimizer_type: type[torch.optim.Optimizer]) -> Any:
    """Returns a subclass of an optimizer class, without the wrappers that hide its methods from torch.compile.

    The wrappers import PyTorch's compiler, and this import would dominate a run's start-up time. PyTorch's other
    wrappers remain, so hooks and profilers work. Pickling an optimizer stores PyTorch's class instead of the subclass.
    """
    names = ("add_param_group", "load_state_dict", "state_dict", "step", "zero_grad")
    members: dict[str, Any] = {name: inspect.unwrap(getattr(optimizer_type, name)) for name in names}
    members["step"] = torch.no_grad()(members["step"])  # the removed wrapper also disabled gradients
    members["plain"] = optimizer_type
    members["__reduce__"] = lambda self: (object.__new__, (optimizer_type,), self.__getstate__())
    return type(optimizer_type.__name__, (optimizer_type,), members)


class SGD(torch.optim.SGD):
    """SGD with momentum buffers initialised to zero.

    PyTorch's fused kernels write the first gradient to an uninitialised buffer. If the first step is skipped because
    its gradient is not finite, PyTorch's second step would read uninitialised memory as momentum.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"] if group["momentum"] else ():
                if parameter.grad is not None and self.state[parameter].get("momentum_buffer") is None:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return inspect.unwrap(torch.optim.SGD.step)(self, closure)


CAPTURABLE = {facts.type.__name__: facts.type for facts in OPTIMIZERS.values() if facts.has_fused}


def can_be_captured(optimizer: Optimizer) -> bool:
    """Returns whether a CUDA graph can capture an optimizer's step, with `lr` and `found_inf` read on the GPU."""
    is_known = getattr(type(optimizer), "plain", type(optimizer)) in (SGD, *CAPTURABLE.values())
    return is_known and reads_found_inf(optimizer) and not has_step_hooks(optimizer)


def moments_of(optimizers: Sequence[Optimizer], only_to_come: bool = False) -> list[Tensor]:
    """Lists each parameter once per optimizer-state tensor of its size, for example twice for Adam.

    Assumes two such tensors for an optimizer of unknown type. only_to_come: whether to skip parameters that already
    have an optimizer state.
    """
    return [
        p
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
        if not (only_to_come and optimizer.state.get(p))
        for _ in range(_num_moments(optimizer, group))
    ]


def _num_moments(optimizer: Optimizer, group: ParamGroup) -> int:
    facts = facts_of(optimizer)
    return 2 if facts is None else sum(needed is None or bool(group.get(needed)) for needed in facts.state.values())
