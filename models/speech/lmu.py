"""Legendre Memory Unit, a recurrent layer (Voelker, Kajić and Eliasmith, NeurIPS 2019)."""

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.speech.legendre import discrete_system


class LMU(nn.Module):
    """Recurrent layer whose memory m of a one-dimensional signal u follows a fixed linear system (equations 5 to 7):

        u_t = e_x x_t + e_h h_(t-1) + e_m m_(t-1)
        m_t = A_d m_(t-1) + B_d u_t
        h_t = tanh(W_x x_t + W_h h_(t-1) + W_m m_t)

    The initial parameters are LeCun uniform (e_x, e_h), 0 (e_m) and Xavier normal (W_x, W_h, W_m).

    theta: window length of the memory in time steps, above 0.
    """

    stays_eager: ClassVar[bool] = True
    """Whether to exclude the module from `torch.compile`, which would unroll all time steps."""

    def __init__(self, input_size: int, hidden_size: int, memory_size: int, theta: float) -> None:
        super().__init__()
        self.memory_size, self.theta = memory_size, theta
        self.e_x = nn.Parameter(torch.empty(1, input_size).uniform_(-1, 1) * math.sqrt(3 / input_size))
        self.e_h = nn.Parameter(torch.empty(1, hidden_size).uniform_(-1, 1) * math.sqrt(3 / hidden_size))
        self.e_m = nn.Parameter(torch.zeros(1, memory_size))
        self.w_x = nn.Parameter(nn.init.xavier_normal_(torch.empty(hidden_size, input_size)))
        self.w_h = nn.Parameter(nn.init.xavier_normal_(torch.empty(hidden_size, hidden_size)))
        self.w_m = nn.Parameter(nn.init.xavier_normal_(torch.empty(hidden_size, memory_size)))

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Returns hidden states h, (B, T, hidden_size), and the final state. x: (B, T, input_size), T >= 1.

        state: h (B, hidden_size) and m (B, memory_size) before the first time step (default: zeros). The layer computes
        in at least float32, also under autocast.
        """
        dtype = torch.promote_types(x.dtype, self.w_x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            drive = F.linear(x.to(dtype).transpose(0, 1), torch.cat([self.e_x, self.w_x]))
            if state is None:
                state = drive.new_zeros(len(x), len(self.w_h)), drive.new_zeros(len(x), self.memory_size)
            system = discrete_system(self.memory_size, self.theta, dtype, x.device)
            h, m = _Recurrence.apply(drive, *state, *system, self.e_h, self.e_m, self.w_h, self.w_m)
        return h.transpose(0, 1), (h[-1], m)

    def extra_repr(self) -> str:
        hidden_size, input_size = self.w_x.shape
        return f"{input_size}, {hidden_size}, memory_size={self.memory_size}, theta={self.theta}"


class _Recurrence(torch.autograd.Function):
    """Computes all time steps of an LMU, with one matrix product per step.

    Both m_t and the argument g_t of tanh depend linearly on the previous state; the input contributes p_t:

        [m_t, g_t] = G [m_(t-1), h_(t-1)] + p_t

    The custom backward pass propagates only the gradients of m and g through time, and then computes weight gradients
    by matrix products over all time steps.
    """

    @staticmethod
    def forward(
        ctx: Any, drive: Tensor, h: Tensor, m: Tensor, a: Tensor, b: Tensor,
        e_h: Tensor, e_m: Tensor, w_h: Tensor, w_m: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Returns hidden states h, (T, B, H), and the last memory m. drive: [e_x x_t, W_x x_t], (T, B, 1 + H)."""
        memory_size = len(b)
        enter = torch.cat([b, w_m @ b])  # contribution of u_t to m_t and g_t
        step = torch.cat([torch.cat([a, torch.zeros_like(w_m.T)], dim=1), torch.cat([w_m @ a, w_h], dim=1)])
        step += enter[:, None] * torch.cat([e_m, e_h], dim=1)

        states = drive.new_empty(len(drive) + 1, len(h), len(enter))
        states[0] = torch.cat([m, h], dim=1)
        torch.mul(drive[..., :1], enter, out=states[1:])
        states[1:, :, memory_size:] += drive[..., 1:]
        transposed = step.T.contiguous()
        steps = states.unbind()
        for before, after, g in zip(steps, steps[1:], states[1:, :, memory_size:].unbind(), strict=False):
            after.addmm_(before, transposed)
            g.tanh_()
        ctx.save_for_backward(states, step, enter)
        ctx.memory_size = memory_size
        return states[1:, :, memory_size:].clone(), states[-1, :, :memory_size].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_h: Tensor, grad_m: Tensor) -> tuple[Tensor | None, ...]:
        states, step, enter = ctx.saved_tensors
        memory_size = ctx.memory_size
        m, h = states[..., :memory_size], states[..., memory_size:]
        grads = torch.zeros_like(states)  # w.r.t. m_t and h_t; the loop turns gradients of h_t into gradients of g_t
        grads[1:, :, memory_size:] = grad_h
        grads[-1, :, :memory_size] = grad_m
        slopes = (1 - h[1:] ** 2).unbind()
        steps, grads_of_g = grads.unbind(), grads[..., memory_size:].unbind()
        for t in reversed(range(1, len(steps))):
            grads_of_g[t].mul_(slopes[t - 1])
            steps[t - 1].addmm_(steps[t], step)

        grad_u, grad_g = grads[1:] @ enter[:, None], grads[1:, :, memory_size:]
        grad_drive = torch.cat([grad_u, grad_g], dim=2)
        of_h = grad_drive.flatten(0, 1).T @ h[:-1].flatten(0, 1)  # gradients of e_h and W_h
        of_e_m = grad_u.flatten(0, 1).T @ m[:-1].flatten(0, 1)
        of_w_m = grad_g.flatten(0, 1).T @ m[1:].flatten(0, 1)
        grad_state = grads[0, :, memory_size:], grads[0, :, :memory_size]
        return grad_drive, *grad_state, None, None, of_h[:1], of_e_m, of_h[1:], of_w_m
