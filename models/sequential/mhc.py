"""Manifold-constrained hyper-connections: several residual streams instead of one (arXiv 2512.24880).

The state X of a token consists of n streams: (n, C). Around a sub-layer F with its own norm, a connection maps X to

    X' = H_res X + h_post^T F(h_pre X)

with coefficients that depend on the token through v = RMSNorm(vec(X)) (equations 7 and 8):

    h_pre = sigmoid(a_pre v phi_pre + b_pre)
    h_post = 2 sigmoid(a_post v phi_post + b_post)
    H_res = Sinkhorn(a_res v phi_res + b_res)

A model's first connection creates the streams as copies of its input, and its last connection returns their mean. The
first connection lacks h_pre and H_res, which have no effect on equal streams (a norm cancels the scale of h_pre X). The
last connection lacks H_res, which does not change the mean.

Before training, h_post is nearly 1, H_res is close to the identity, and h_pre sums to nearly 1, with most weight on
stream l mod n at connection l. All streams are then nearly equal, so the network computes nearly the same function as
with pre-norm residuals. The streams get different gradients, because each h_pre selects mainly one stream.
"""

import math
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from models.sequential.sasrec import NORM_EPS, Sublayer, rows

_OTHERS_SHARE = 1 / (1 + math.exp(4.0))
"""Initial h_pre of each stream except one: sigmoid(-4)."""
_RESIDUAL_LOGIT = 1.5
"""Initial value of b_res on the diagonal; elements off the diagonal have the negative of this value."""
_PHI_STD = 0.02
_SMALLEST_ENTRY = math.exp(-27.0)


def hyper_connections(
    width: int, num_blocks: int, num_streams: int = 4, init_gate: float = 0.01, num_iterations: int = 20,
    in_full_precision: bool = False,
) -> list["HyperConnection"]:  # fmt: skip
    """Creates a model's hyper-connections, two per block."""
    last = 2 * num_blocks - 1
    return [
        HyperConnection(
            width, layer, num_streams, init_gate, num_iterations, in_full_precision,
            opens=layer == 0, closes=layer == last,
        )
        for layer in range(last + 1)
    ]  # fmt: skip


class HyperConnection(nn.Module):
    """Hyper-connection around a sub-layer; replaces a pre-norm residual connection.

    layer: index of the sub-layer in the model, from 0.
    num_streams: n, at least 2.
    init_gate: initial a_pre, a_post and a_res, which determine how much the coefficients depend on the token.
    num_iterations: number of iterations of Sinkhorn and Knopp's algorithm, at least 1.
    in_full_precision: whether to disable autocast except in the sub-layer.
    opens: whether the input is (B, T, C), from which the connection creates the streams.
    closes: whether the output is the mean of the streams, (B, T, C).
    """

    def __init__(
        self,
        width: int,
        layer: int,
        num_streams: int,
        init_gate: float,
        num_iterations: int,
        in_full_precision: bool,
        opens: bool,
        closes: bool,
    ) -> None:
        super().__init__()
        self.in_full_precision = in_full_precision
        self.opens, self.closes = opens, closes
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        n = num_streams
        read = width if opens else n * width
        self.post = Coefficients(read, torch.zeros(n), init_gate)
        if not opens:
            self.pre = Coefficients(read, _one_hot_read(layer % n, n), init_gate)
        if not opens and not closes:
            self.residual = ResidualMatrix(read, n, init_gate, num_iterations)

    def forward(self, x: Tensor, sublayer: Sublayer, last: Tensor | None = None) -> Tensor:
        """Applies the sub-layer: (B, T, n, C) -> (B, T, n, C), or (B, 1, n, C) if `last` is given.

        With `opens`, the input has no dimension n; with `closes`, the output has no dimension n.
        """
        with self._precision(x):
            streams = x.unsqueeze(-2) if self.opens else x
            projected = self._projected(streams)
            # a matrix product of so few rows would be many times slower on a CPU than multiplying and summing
            read = x if self.opens else (torch.sigmoid(self.pre(projected["pre"])).unsqueeze(-1) * streams).sum(-2)
            normalised = self.norm(read)
        out = sublayer(rows(normalised, last), normalised)
        with self._precision(x):
            streams = rows(streams, last)
            post = 2 * torch.sigmoid(self.post(rows(projected["post"], last)))
            if self.closes:
                return streams.mean(-2) + post.mean(-1, keepdim=True) * out
            kept = streams if self.opens else self.residual(rows(projected["residual"], last)) @ streams
            return kept + post.unsqueeze(-1) * out.unsqueeze(-2)

    def _projected(self, streams: Tensor) -> dict[str, Tensor]:
        """Returns a dict from the name of each `Coefficients` module to RMSNorm(vec(X)) phi, (B, T, len(phi)).

        streams: X, (B, T, n, C). RMSNorm has no weight, because phi includes the weight.
        """
        phi = {name: part.phi for name, part in self.named_children() if isinstance(part, Coefficients)}
        flat = streams.flatten(-2)
        stacked = torch.cat(list(phi.values()))
        norm = torch.linalg.vector_norm(flat, dim=-1, keepdim=True, dtype=stacked.dtype)
        rms = (norm.square() / flat.shape[-1]).add(NORM_EPS).sqrt()
        product = nn.functional.linear(flat, stacked).to(stacked.dtype) / rms
        return dict(zip(phi, product.split([len(part) for part in phi.values()], dim=-1), strict=True))

    def _precision(self, x: Tensor) -> Any:
        return torch.autocast(x.device.type, enabled=False) if self.in_full_precision else nullcontext()


class Coefficients(nn.Module):
    """Computes gate * projected + bias for projected = RMSNorm(vec(X)) phi, which the hyper-connection computes."""

    def __init__(self, num_inputs: int, bias: Tensor, gate: float) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(len(bias), num_inputs) * _PHI_STD)
        self.gate = nn.Parameter(torch.tensor([gate]))
        self.bias = nn.Parameter(bias)

    def forward(self, projected: Tensor) -> Tensor:
        """Returns the coefficients, in the shape of `projected`: (..., number of coefficients)."""
        return self.gate * projected + self.bias


class ResidualMatrix(Coefficients):
    """Computes the doubly stochastic matrix H_res of each token."""

    stays_eager: ClassVar[bool] = True
    """Whether to exclude the module from `torch.compile`, which would take many minutes to unroll all iterations."""

    def __init__(self, num_inputs: int, num_streams: int, gate: float, num_iterations: int) -> None:
        super().__init__(num_inputs, _RESIDUAL_LOGIT * (2 * torch.eye(num_streams) - 1).flatten(), gate)
        self.num_streams = num_streams
        self.num_iterations = num_iterations

    def forward(self, projected: Tensor) -> Tensor:
        """Returns H_res: (..., n * n) -> (..., n, n)."""
        logits = super().forward(projected).unflatten(-1, (self.num_streams, self.num_streams))
        return doubly_stochastic(logits, self.num_iterations)


def _one_hot_read(stream: int, n: int) -> Tensor:
    """Returns the initial b_pre, (n,), for which h_pre sums to 1, with most weight on the given stream."""
    share = torch.full((n,), _OTHERS_SHARE)
    share[stream] = 1 - (n - 1) * _OTHERS_SHARE
    return torch.logit(share)


def doubly_stochastic(logits: Tensor, num_iterations: int) -> Tensor:
    """Returns doubly stochastic matrices near exp(logits): (..., n, n), in at least float32.

    The algorithm of Sinkhorn and Knopp (1967) alternately divides columns and rows by their sums. The rounding
    method of Altschuler, Weed and Rigollet (NeurIPS 2017, algorithm 2) then removes the error of the column sums, which
    can remain large if logits are widely spread.
    """
    n = logits.shape[-1]
    # tokens are the last dimension, so that sums of rows or columns add long vectors
    by_token = logits.reshape(-1, n, n).permute(1, 2, 0)
    if by_token.dtype in (torch.float16, torch.bfloat16):
        by_token = by_token.float()
    matrix: Tensor = _Sinkhorn.apply(by_token, num_iterations)
    matrix = matrix / matrix.sum(0, keepdim=True).clamp(min=1)
    lack_of_row = (1 - matrix.sum(1, keepdim=True)).clamp(min=0)
    lack_of_column = (1 - matrix.sum(0, keepdim=True)).clamp(min=0)
    matrix = matrix + lack_of_row * lack_of_column / lack_of_row.sum(0, keepdim=True).clamp(min=_SMALLEST_ENTRY)
    # contiguous, because batched products of other layouts are computed one at a time
    return matrix.permute(2, 0, 1).reshape(logits.shape).contiguous()


class _Sinkhorn(torch.autograd.Function):
    """Alternately normalises the columns and rows of exp(logits), for logits (n, n, tokens).

    Each iterate is diag(u) K diag(v) with a fixed K, so each iteration computes and stores only u and v. Entries
    below e^-27 times the largest entry of their column are raised to this bound, which keeps all sums above 0.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, num_iterations: int) -> Tensor:
        # scales each column to a maximum of 1; the first normalisation cancels this factor
        kernel = (logits - logits.amax(0, keepdim=True)).exp().clamp(min=_SMALLEST_ENTRY).contiguous()
        u = [torch.ones_like(kernel[:, 0])]
        v = []
        for _ in range(num_iterations):
            v.append((kernel * u[-1].unsqueeze(1)).sum(0).reciprocal_())
            u.append((kernel * v[-1].unsqueeze(0)).sum(1).reciprocal_())
        ctx.save_for_backward(kernel, torch.stack(u), torch.stack(v))
        return u[-1].unsqueeze(1) * kernel * v[-1].unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        kernel, u, v = ctx.saved_tensors
        (grad,) = grads
        weighted = grad * kernel
        grad_u = (weighted * v[-1].unsqueeze(0)).sum(1)
        grad_v = (weighted * u[-1].unsqueeze(1)).sum(0)
        grad_kernel = u[-1].unsqueeze(1) * grad * v[-1].unsqueeze(0)
        slope_u, slope_v = -u.square(), -v.square()  # derivatives of the reciprocals
        for t in reversed(range(len(v))):
            # u[t + 1] = 1 / (K v[t])
            row = grad_u * slope_u[t + 1]
            grad_kernel += row.unsqueeze(1) * v[t].unsqueeze(0)
            # v[t] = 1 / (K^T u[t]). Only the last v is part of the result.
            from_row = (kernel * row.unsqueeze(1)).sum(0)
            column = slope_v[t] * (from_row if t < len(v) - 1 else grad_v + from_row)
            grad_kernel += u[t].unsqueeze(1) * column.unsqueeze(0)
            grad_u = (kernel * column.unsqueeze(0)).sum(1)
        return grad_kernel * kernel, None
