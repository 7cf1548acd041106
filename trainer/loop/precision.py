"""Number formats: the type of the parameters, autocast, and the gradient scaler."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from trainer.config import FlagGroup, flag
from trainer.loading.batches import Batch
from trainer.task import Objective, Sums

AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCALE_FLOOR = 1.0
"""The gradient scaler goes no lower; at the floor an overflow is no longer the scale's fault."""


@dataclass
class PrecisionFlags(FlagGroup):
    """Precision"""

    amp: Literal["auto", "bf16", "fp16", "off"] = flag(
        "auto", "mixed precision; auto: bf16 on GPUs that have it, fp16 on older ones, off on the CPU"
    )
    no_amp: bool = flag(False, "the same as --amp off")
    dtype: Literal["float32", "float64"] = flag("float32", "type of the parameters")
    deterministic: bool = flag(
        False, "only deterministic algorithms on GPUs too (slower there; on the CPU it is always so, at no cost)"
    )

    def problems(self) -> list[str]:
        found = []
        if self.no_amp and self.amp in AMP_DTYPES:
            found.append(f"--no-amp and --amp {self.amp}: exclude each other; give one")
        if self.dtype == "float64" and self.amp in AMP_DTYPES:
            found.append(f"--amp {self.amp}: is for --dtype float32; with float64 leave it out")
        return found


def resolve_amp(amp: str, device: torch.device, dtype: torch.dtype) -> str:
    """What `--amp auto` means here: "bf16", "fp16" or "off".

    bf16 only on GPUs that have it in hardware; fp16 with a gradient scaler on older GPUs; off on CPUs, where bf16
    without its instructions is about ten times slower than float32, and in float64.
    """
    if amp != "auto":
        return amp
    if device.type != "cuda" or dtype == torch.float64:
        return "off"
    return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"


class Precision:
    """How numbers are kept and gradients are turned into a step."""

    def __init__(self, amp: str, dtype: torch.dtype, device: torch.device) -> None:
        self.amp = amp
        self.dtype = dtype
        self.autocast_dtype = AMP_DTYPES.get(amp)
        self.scaler = torch.amp.GradScaler(device.type, enabled=amp == "fp16")

    def __str__(self) -> str:
        parameters = str(self.dtype).removeprefix("torch.")
        return parameters if self.autocast_dtype is None else f"{parameters} with {self.amp} autocast"

    def autocast(self, device_type: str) -> torch.autocast:
        """The context in which forwards run."""
        return torch.autocast(device_type, self.autocast_dtype, enabled=self.autocast_dtype is not None)

    def backward(self, loss: Tensor, factor: float) -> None:
        """Adds the gradient of loss * factor. loss: a scalar."""
        # The factor enters as the gradient to begin with, which saves the graph a multiplication. To it is added zero
        # times the loss: nothing, or NaN where the loss is not finite. The gradient of such a loss may well be finite;
        # so it never is, and through the exchange of gradients no process's is.
        scaled = self.scaler.scale(loss)
        scaled.backward(torch.full_like(scaled, factor).add_(loss.detach(), alpha=0))

    def step(
        self, optimizer: torch.optim.Optimizer, params: Sequence[Tensor], max_grad_norm: float
    ) -> tuple[Tensor, Tensor]:
        """Unscale, clip, step, clear. Where the gradient's norm is not finite, weights and moments stay as they are.

        optimizer: with fused kernels, at least on a GPU. max_grad_norm: 0 does not clip.

        Returns the gradient norm before clipping and the alarm, both on the device. The alarm is not finite if the
        norm is not, unless a lower scale of the gradients may help.
        """
        self.scaler.unscale_(optimizer)
        grad_norm = _clip(params, max_grad_norm)
        _step_if_finite(optimizer, grad_norm)
        alarm = self._update_scale(grad_norm) if self.scaler.is_enabled() else grad_norm
        for parameter in params:  # as zero_grad does, without its profiling
            parameter.grad = None
        return grad_norm, alarm

    def _update_scale(self, grad_norm: Tensor) -> Tensor:
        """Returns the alarm: the norm, or 0 where the scale was above its floor."""
        one = torch.ones_like(grad_norm)
        scale = self.scaler.scale(one)
        self.scaler.update()
        self.scaler.update(self.scaler.scale(one).clamp(min=SCALE_FLOOR))
        return torch.where(scale > SCALE_FLOOR, 0.0, grad_norm)


def _clip(params: Sequence[Tensor], max_norm: float) -> Tensor:
    """The norm of the whole gradient before it is scaled down to at most `max_norm`; 0 leaves it as it is.

    As `nn.utils.clip_grad_norm_`, to the bit, in half the time: the parameters share one device, and where their norm
    is in host memory a gradient that is short enough is not multiplied by one.
    """
    grads = [parameter.grad for parameter in params if parameter.grad is not None]
    if not grads:
        return torch.zeros((), device=params[0].device)
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    if max_norm:
        factor = max_norm / (norm + 1e-6)
        if norm.device.type != "cpu":
            torch._foreach_mul_(grads, factor.clamp(max=1.0))
        elif factor.item() < 1:
            torch._foreach_mul_(grads, factor)
    return norm


def _step_if_finite(optimizer: torch.optim.Optimizer, grad_norm: Tensor) -> None:
    """The norm is that of the whole, exchanged gradient, so every process decides alike."""
    if grad_norm.device.type == "cpu":
        if math.isfinite(grad_norm.item()):
            optimizer.step()
        return
    # Fused kernels read this where it is, as they do for a gradient scaler: the host need not wait for it.
    optimizer.found_inf = torch.nan_to_num((grad_norm * 0).float(), nan=1.0)  # type: ignore[attr-defined]
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.step()


def choose_precision(flags: PrecisionFlags, device: torch.device) -> Precision:
    """What the flags mean on a device."""
    dtype = getattr(torch, flags.dtype)
    amp = "off" if flags.no_amp else resolve_amp(flags.amp, device, dtype)
    return Precision(amp, dtype, device)


def of_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with its floating-point tensors in another type."""
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in batch.items()}


class PrecisionForward(nn.Module):
    """What the parallel wrappers wrap: the objective in the run's precision.

    Autocast is entered here and not around the wrapper, because the threads of DataParallel do not inherit it.
    """

    def __init__(self, objective: Objective, precision: Precision) -> None:
        super().__init__()
        self.objective = objective
        self.dtype = precision.dtype
        self.autocast_dtype = precision.autocast_dtype

    def forward(self, batch: Batch, phase: str = "train") -> Sums:
        if self.dtype != torch.float32:
            batch = of_dtype(batch, self.dtype)
        if self.autocast_dtype is None:
            return self.objective(batch, phase)
        with torch.autocast(batch["weight"].device.type, dtype=self.autocast_dtype):
            return self.objective(batch, phase)
