"""Number formats: the dtype of parameters, autocast, and the gradient scaler."""

import math
from collections.abc import Callable, Sequence
from ctypes import c_float
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from trainer.common.errors import UserError, reason
from trainer.common.tensors import is_sharded
from trainer.common.torch_private import convert_tensors, foreach_mul_, foreach_norm, reads_found_inf, run_backward
from trainer.flags import PrecisionFlags
from trainer.loading.batches import Batch, in_dtype, of_dtype
from trainer.parallel.devices import half_precision, queue_of
from trainer.task import Outputs

M = TypeVar("M", bound=nn.Module)

AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCALE_FLOOR = 1.0
"""Minimum of the gradient scale; an overflow at this scale counts as a non-finite step."""


_is_sparse = attrgetter("is_sparse")
_OF_PARTS = ("DTensor", "Sharding propagation", "placement")
"""Fragments of PyTorch's error messages about operations that DTensors do not support."""


class StepOutcome(NamedTuple):
    """Result of an optimizer update, equal on all processes.

    grad_norm: global gradient norm before clipping. applied: whether weights changed, as they do if the norm is finite.
    alarm: whether to report a skipped step. On the CPU, `applied` and `alarm` are bools.
    """

    grad_norm: Tensor
    applied: bool | Tensor
    alarm: bool | Tensor


class Precision:
    """Runs backward passes and optimizer updates in the number formats of a run."""

    def __init__(self, amp: str, dtype: torch.dtype, device: torch.device) -> None:
        self.amp = amp
        self.dtype = dtype
        self.autocast_dtype = AMP_DTYPES.get(amp)
        self._knows_at_once = queue_of(device).lag == 0
        """Whether the host can read a tensor without waiting for the device."""
        self.scaler = torch.amp.GradScaler(device.type, enabled=amp == "fp16")
        self.scaler.scale(torch.zeros((), device=device))  # creates its tensors, for steps without an own sample

    def __str__(self) -> str:
        parameters = str(self.dtype).removeprefix("torch.")
        return parameters if self.autocast_dtype is None else f"{parameters} with {self.amp} autocast"

    def autocast(self, device_type: str) -> torch.autocast:
        return torch.autocast(device_type, self.autocast_dtype, enabled=self.autocast_dtype is not None)

    def rate(self, learning_rate: float) -> float:
        """Rounds a learning rate to float32 unless the device is a CPU or parameters are float64."""
        return learning_rate if self._knows_at_once or self.dtype == torch.float64 else c_float(learning_rate).value

    def backward(self, loss: Tensor, factor: float | Tensor) -> None:
        """Accumulates the gradient of loss * factor.

        factor: a number, or a scalar tensor on the loss's device. Raises UserError if loss does not require a gradient.
        """
        # Passes the factor as initial gradient, because multiplying the loss by it would add 1% to a step of 2 ms.
        run_backward((loss,), (self.start(loss, factor),))

    def start(self, loss: Tensor, factor: float | Tensor) -> Tensor:
        """Returns the initial gradient for the loss's backward pass: `factor` times the gradient scale.

        The initial gradient is NaN if the loss is not finite, so that all processes see NaN after the gradient
        exchange. Raises UserError if the loss does not require a gradient.
        """
        if not loss.requires_grad:
            raise UserError(
                "the loss of this batch depends on no parameter; for a batch without targets, "
                "return a loss that depends on the model, such as logits.sum() * 0"
            )
        dtype = loss.dtype if loss.dtype.itemsize >= 4 else torch.float32
        if self._knows_at_once:
            coefficient = torch.full((), float(factor) if math.isfinite(loss.item()) else math.nan, dtype=dtype)
        else:
            coefficient = (loss.detach().to(dtype) * 0).add_(factor)  # the host does not wait for the loss
        coefficient = self.scaler.scale(coefficient)
        return coefficient if dtype == loss.dtype else coefficient.to(loss.dtype)

    def forget_unscaling(self) -> None:
        """Lets the scaler unscale gradients again, after an update that failed before it changed the gradients."""
        if self.scaler.is_enabled():
            self.scaler.update(self.scaler.get_scale())

    def step(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        params: Sequence[Tensor],
        max_grad_norm: float,
        global_norm: Callable[[Tensor], Tensor] = lambda own: own,
        shards: Callable[[Sequence[Tensor]], list[Tensor]] = list,
    ) -> StepOutcome:
        """Unscales and clips gradients, steps the optimizers, and clears gradients; a non-finite norm skips the step.

        params: parameters that the step trains. max_grad_norm: maximum norm of their gradients; 0 disables clipping.
        global_norm: combines the norms of all shards. shards: returns this process's shards of gradients.

        A skipped step sets `alarm`, unless the gradient scaler responded by lowering its scale. Fused optimizers read
        `found_inf` and skip the step on the GPU. With other optimizers or sparse gradients, the host waits for the GPU.
        """
        is_scaled = self.scaler.is_enabled() and any(parameter.grad is not None for parameter in params)
        if is_scaled:
            for optimizer in optimizers:
                self.scaler.unscale_(optimizer)
        grads = [parameter.grad for parameter in params if parameter.grad is not None]
        if any(map(_is_sparse, grads)):
            grads = _coalesced_values(params)
        grads = shards(grads)
        # the norm of the exchanged gradient, so that all processes make the same decision
        grad_norm = global_norm(gradient_norm(grads)) if grads else torch.zeros((), device=params[0].device)
        step = _step_on_host if self._knows_at_once else _step_on_device
        applied, alarm = step(optimizers, grads, grad_norm, max_grad_norm)
        if is_scaled:
            alarm = self._update_scale(grad_norm).logical_not() & alarm
        for parameter in params:  # as zero_grad does, without its profiling
            parameter.grad = None
        return StepOutcome(grad_norm, applied, alarm)

    def _update_scale(self, grad_norm: Tensor) -> Tensor:
        """Updates the gradient scale and returns whether it decreased; only non-finite gradients decrease it."""
        one = torch.ones_like(grad_norm)
        before = self.scaler.scale(one)
        self.scaler.update()
        self.scaler.update(self.scaler.scale(one).clamp(min=SCALE_FLOOR))
        return self.scaler.scale(one) < before


def gradient_norm(grads: list[Tensor]) -> Tensor:
    """Returns the global norm, bit-equal to `nn.utils.get_total_norm`, without grouping by device and dtype."""
    return torch.linalg.vector_norm(torch.stack(foreach_norm(grads)))


def _coalesced_values(params: Sequence[Tensor]) -> list[Tensor]:
    """Coalesces sparse gradients; returns their values, (rows, columns), as views, and the dense gradients.

    An uncoalesced gradient may contain a row several times, which would change the norm.
    """
    grads = []
    for parameter in params:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
            grads.append(parameter.grad.values())
        elif parameter.grad is not None:
            grads.append(parameter.grad)
    return grads


def _step_on_host(
    optimizers: Sequence[torch.optim.Optimizer], grads: list[Tensor], grad_norm: Tensor, max_grad_norm: float
) -> tuple[bool, bool]:
    """Clips gradients and steps the optimizers if the norm is finite; returns (applied, skipped)."""
    norm = grad_norm.numpy()[()]  # keeps the dtype of the gradient
    if not math.isfinite(norm):
        return False, True
    factor = 1 / (norm + norm.dtype.type(1e-6)) * norm.dtype.type(max_grad_norm)
    if 0 < factor < 1:
        foreach_mul_(grads, float(factor))
    for optimizer in optimizers:
        take_step(optimizer)
    return True, False


def _step_on_device(
    optimizers: Sequence[torch.optim.Optimizer], grads: list[Tensor], grad_norm: Tensor, max_grad_norm: float
) -> tuple[Tensor, Tensor]:
    """Works like `_step_on_host`, but waits for the norm only if an optimizer does not support `found_inf`."""
    if max_grad_norm:
        foreach_mul_(grads, (max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0))
    applied = grad_norm < torch.inf  # torch.isfinite of a norm, in one kernel instead of four
    left_out = applied.logical_not()
    if not all(map(reads_found_inf, optimizers)) and not bool(applied):
        return applied, left_out
    found_inf = left_out.float()
    for optimizer in optimizers:
        if reads_found_inf(optimizer):
            optimizer.found_inf = found_inf  # type: ignore[attr-defined]
            optimizer.grad_scale = None  # type: ignore[attr-defined]
        take_step(optimizer)
    return applied, left_out


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """Steps an optimizer. Raises UserError if the optimizer needs a closure or does not support sharded parameters."""
    try:
        optimizer.step()
    except (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        name, told = type(optimizer).__name__, str(error)
        if "closure" in told.lower() or told == "'NoneType' object is not callable":
            raise UserError(
                f"the optimizer {name} needs a closure that evaluates the loss again, which is not supported "
                f"({reason(error)}); use another optimizer; instead of SAM, use its base optimizer with --sam-rho"
            ) from error
        in_parts = any(is_sharded(p) for group in optimizer.param_groups for p in group["params"])
        if in_parts and any(word in told for word in _OF_PARTS):
            raise UserError(
                f"--multi-gpu fsdp: {name} cannot train sharded parameters ({reason(error)}); use --multi-gpu ddp or "
                "another optimizer"
            ) from error
        raise


def choose_precision(flags: PrecisionFlags, device: torch.device) -> Precision:
    """Returns the precision that flags select."""
    dtype = getattr(torch, flags.dtype)
    automatic = "off" if dtype == torch.float64 else half_precision(device)
    return Precision(automatic if flags.amp == "auto" else flags.amp, dtype, device)


def module_in_dtype(module: M, dtype: torch.dtype) -> M:
    """Converts a module's parameters and buffers in place; keeps imaginary parts, which `Module.to` would drop."""
    convert_tensors(module, partial(in_dtype, dtype=dtype))
    return module


def with_dense_tensors(module: M) -> M:
    """Copies non-dense parameters and buffers, such as `weight[:, :4]` or an expanded tensor, to dense memory.

    Fused optimizers would ignore gaps in memory, and an expanded tensor cannot be loaded from a checkpoint.
    """
    for tensor in chain(module.parameters(), module.buffers()):
        if tensor.layout == torch.strided and torch.empty_like(tensor, device="meta").stride() != tensor.stride():
            tensor.data = tensor.data.clone()
    return module


def in_precision(objective: nn.Module, precision: Precision) -> nn.Module:
    """Wraps an objective in `PrecisionForward`, or returns it unchanged for float32 without autocast."""
    if precision.dtype == torch.float32 and precision.autocast_dtype is None:
        return objective
    return PrecisionForward(objective, precision)


class PrecisionForward(nn.Module):
    """Converts batches to the objective's dtype, and runs the objective in autocast.

    The forward itself enters autocast, because DataParallel's threads do not inherit autocast.
    """

    def __init__(self, objective: nn.Module, precision: Precision) -> None:
        super().__init__()
        self.objective = objective
        self.precision = precision

    def forward(self, batch: Batch, *phase: str) -> Outputs:
        if self.precision.dtype != torch.float32:
            batch = of_dtype(batch, self.precision.dtype)
        with self.precision.autocast(batch["weight"].device.type):
            return self.objective(batch, *phase)
