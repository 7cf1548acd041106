"""Calls any model on any batch: a mapping of tensors, a tensor, or (inputs ..., targets); and leaves it as it was."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.parallel.module_state import leaving_no_trace

LossFunction = Callable[[Any, Any], Tensor]
"""(output, targets) -> loss."""

_LOSS_OF_PAIRS = "pass a loss function with batches of (inputs, targets)"


def mapped(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The batch with the function applied to each of its tensors."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {name: mapped(value, function) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [mapped(value, function) for value in batch]
    return batch


def num_samples(batch: Any) -> int:
    """The size of dim 0 of its first tensor. Raises TypeError if there is none."""
    if isinstance(batch, Mapping | list | tuple) and batch:
        return num_samples(next(iter(batch.values() if isinstance(batch, Mapping) else batch)))
    if not isinstance(batch, Tensor):
        raise TypeError(f"a batch must be a tensor, or a mapping or sequence of tensors, not {type(batch).__name__}")
    return len(batch) if batch.dim() else 1


def resized(batch: Any, size: int) -> Any:
    """A batch of so many samples: those of the batch, which has some, again and again."""
    available = num_samples(batch)
    index = torch.arange(size) % available

    def take(tensor: Tensor) -> Tensor:
        return tensor[index.to(tensor.device)] if tensor.dim() and len(tensor) == available else tensor

    return mapped(batch, take)


def call(model: nn.Module, batch: Any) -> Any:
    """The model's output. Of a sequence of several parts the last one is the targets, which the model does not get."""
    if not isinstance(batch, list | tuple):
        return model(batch)
    return model(*batch[: max(1, len(batch) - 1)])


def training_loss(model: nn.Module, batch: Any, loss: LossFunction | None) -> Tensor:
    """A scalar to run backward from: loss(output, targets); or the output's "loss"; or its sum, if it has none.

    Raises ValueError if the model has nothing to train, and TypeError if there is nothing of that kind.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"the {type(model).__name__} has no parameter to train, so there is no backward pass")
    if loss is not None and (not isinstance(batch, list | tuple) or len(batch) < 2):
        raise TypeError(
            f"a loss function needs batches of (inputs, targets), not a {type(batch).__name__}; or let the model "
            'return its "loss", and pass no loss function'
        )
    output = call(model, batch)
    if loss is not None:
        return loss(output, batch[-1]).sum()
    if isinstance(output, Mapping):
        if "loss" not in output:
            raise TypeError(f'the model returned {sorted(output)}; let it return its "loss" too, or {_LOSS_OF_PAIRS}')
        return output["loss"].sum()
    if isinstance(output, list | tuple):
        output = output[0]
    if not isinstance(output, Tensor) or not output.requires_grad:
        raise TypeError(f"cannot run backward from the model's {type(output).__name__}; {_LOSS_OF_PAIRS}")
    return output.float().sum()


@contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Within it the model is on the device, without gradients; after it everything is as it was before.

    That is: its device, the modes of its modules, gradients, buffers, attributes, and the generators of torch, numpy
    and Python.
    """
    home = device_of(model)
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(p, p.grad) for p in model.parameters()]
    python, numpy_state = random.getstate(), np.random.get_state()
    try:
        with leaving_no_trace(model), torch.random.fork_rng([d for d in {device, home} if d.type == "cuda"]):
            model.zero_grad(set_to_none=True)
            model.to(device)
            yield
    finally:
        model.to(home)
        for module, mode in modes:
            module.training = mode
        for parameter, gradient in gradients:
            parameter.grad = gradient
        random.setstate(python)
        np.random.set_state(numpy_state)


def device_of(model: nn.Module) -> torch.device:
    """Where the model's first parameter or buffer is; the CPU for a model without any."""
    tensors = (*model.parameters(), *model.buffers())
    return tensors[0].device if tensors else torch.device("cpu")
