"""torch's optimizers as a run uses them: without the compiler, from a defined start; and what they keep."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.task import ParamGroup


def without_compiler(optimizer_type: type[torch.optim.Optimizer]) -> Any:
    """The class of optimizers without the wrappers that hide its methods from torch's compiler.

    These import the compiler, which takes longer than all else at the start of a run. All other wrappers are torch's:
    hooks of an optimizer and of all optimizers are called, and profilers see the step. A pickle holds torch's class.
    """
    names = ("add_param_group", "load_state_dict", "state_dict", "step", "zero_grad")
    members: dict[str, Any] = {name: inspect.unwrap(getattr(optimizer_type, name)) for name in names}
    members["step"] = torch.no_grad()(members["step"])  # the other duty of a wrapper
    members["__reduce__"] = lambda self: (object.__new__, (optimizer_type,), self.__getstate__())
    return type(optimizer_type.__name__, (optimizer_type,), members)


class ZeroStartSGD(torch.optim.SGD):
    """SGD whose momentum starts at zero.

    torch's fused kernels start it with the first gradient, in memory that is not initialised before. If that step is
    left out for a gradient that is not finite, the next one takes what the memory happens to hold for momentum.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"] if group["momentum"] else ():
                if parameter.grad is not None and self.state[parameter].get("momentum_buffer") is None:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return inspect.unwrap(torch.optim.SGD.step)(self, closure)


def moments_of(optimizers: Sequence[Optimizer], only_to_come: bool = False) -> list[Tensor]:
    """For each tensor of a parameter's size that the optimizers keep between steps, that parameter.

    Of optimizers that are not among those of `--optimizer` two are assumed, the most that is usual. only_to_come:
    leave those out that are in memory already.
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
    if isinstance(optimizer, torch.optim.SGD):
        return 1 if group["momentum"] else 0
    return 1 if type(optimizer).__name__ == "Muon" else 2  # a class that torch 2.8 does not have
