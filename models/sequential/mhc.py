"""Manifold-constrained hyper-connections: several residual streams instead of one (arXiv 2512.24880).

A token's state is n streams X (n, C). Around a sub-layer F, which includes its own norm,

    X' = H_res X + h_post^T F(h_pre X)

with coefficients that depend on the token (equations 7 and 8 of the paper): with v = RMSNorm(vec(X)),

    h_pre = sigmoid(a_pre v phi_pre + b_pre)
    h_post = 2 sigmoid(a_post v phi_post + b_post)
    H_res = Sinkhorn(a_res v phi_res + b_res)

Streams exist from the first sub-layer to the last: a model's first connection opens them as copies of its input, and
the last one closes them by their mean. Where all streams are equal, or only their mean is used, H_res has a true
gradient of zero (as has h_pre in front of a norm), so those two connections lack these coefficients.

Initially h_post is 1, H_res is close to the identity and h_pre sums to 1, mostly on stream l mod n at connection l. All
streams are then equal and the network is the plain pre-norm one, but streams are read differently and so receive
different gradients; with equal h_pre they would stay equal forever.
"""

import math
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from models.sequential.sasrec import NORM_EPS, Sublayer, rows

_OTHERS_SHARE = 1 / (1 + math.exp(4.0))
"""Initial h_pre of every stream but one: sigmoid(-4)."""
_RESIDUAL_LOGIT = 1.5
"""Initial b_res: this on the diagonal, its negative elsewhere."""
_PHI_STD = 0.02
_SMALLEST_ENTRY = math.exp(-27.0)


def hyper_connections(
    width: int, num_blocks: int, num_streams: int = 4, init_gate: float = 0.01, num_iterations: int = 20,
    in_full_precision: bool = False,
) -> list["HyperConnection"]:  # fmt: skip
    """Creates a model's connections, two per block; see HyperConnection for the arguments."""
    last = 2 * num_blocks - 1
    return [
        HyperConnection(
            width, layer, num_streams, init_gate, num_iterations, in_full_precision,
            opens=layer == 0, closes=layer == last,
        )
        for layer in range(last + 1)
    ]  # fmt: skip


class HyperConnection(nn.Module):
    """A connection around a sub-layer with normalised input, as in a pre-norm residual connection.

    layer: index of the sub-layer in the model, from 0.
    num_streams: n, at least 2.
    init_gate: initial a_pre, a_post and a_res: how much the coefficients depend on the token.
    num_iterations: of Sinkhorn and Knopp's algorithm, at least 1.
    in_full_precision: disables autocast for the whole connection; otherwise its matrix products use it.
    opens: takes (B, T, C) and creates the streams.
    closes: returns (B, T, C), the mean of the streams.
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
        """(B, T, n, C) -> (B, T, n, C), or (B, 1, n, C) with `last`; see `opens` and `closes`."""
        with self._precision(x):
            streams = x.unsqueeze(-2) if self.opens else x
            projected = self._projected(streams)
            # A sum of products, since products of such thin matrices are many times slower on a CPU.
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
        """Returns RMSNorm(vec(X)) phi of all coefficients by name: (B, T, n, C) -> (B, T, number of coefficients) each.

        RMSNorm's gain is absorbed in phi, and its division is applied to the product, which is shorter than its input.
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
    """gate * (RMSNorm(vec(X)) phi) + bias, in full precision except for the product, which the connection computes."""

    def __init__(self, num_inputs: int, bias: Tensor, gate: float) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(len(bias), num_inputs) * _PHI_STD)
        self.gate = nn.Parameter(torch.tensor([gate]))
        self.bias = nn.Parameter(bias)

    def forward(self, projected: Tensor) -> Tensor:
        """(..., number of coefficients) -> the same shape."""
        return self.gate * projected + self.bias


class ResidualMatrix(Coefficients):
    """Returns H_res of every token, doubly stochastic."""

    stays_eager: ClassVar[bool] = True
    """Not compiled by `torch.compile`, which would unroll all iterations for many minutes."""

    def __init__(self, num_inputs: int, num_streams: int, gate: float, num_iterations: int) -> None:
        super().__init__(num_inputs, _RESIDUAL_LOGIT * (2 * torch.eye(num_streams) - 1).flatten(), gate)
        self.num_streams = num_streams
        self.num_iterations = num_iterations

    def forward(self, projected: Tensor) -> Tensor:
        """(..., n * n) -> (..., n, n)."""
        logits = super().forward(projected).unflatten(-1, (self.num_streams, self.num_streams))
        return doubly_stochastic(logits, self.num_iterations)


def _one_hot_read(stream: int, n: int) -> Tensor:
    """Returns b_pre that reads mostly one stream, summing to exactly 1."""
    share = torch.full((n,), _OTHERS_SHARE)
    share[stream] = 1 - (n - 1) * _OTHERS_SHARE
    return torch.logit(share)


def doubly_stochastic(logits: Tensor, num_iterations: int) -> Tensor:
    """Returns the doubly stochastic matrix near exp(logits): (..., n, n), at least in float32.

    Columns and rows are divided by their sums in turn (Sinkhorn and Knopp, 1967), rows last. Widely spread logits would
    need too many iterations, so the columns' remaining error is removed by the rounding of Altschuler, Weed and
    Rigollet (NeurIPS 2017, algorithm 2), after which rows and columns sum to 1 exactly.
    """
    n = logits.shape[-1]
    # with tokens last, sums over the small matrices are sums of long vectors
    by_token = logits.reshape(-1, n, n).permute(1, 2, 0)
    if by_token.dtype in (torch.float16, torch.bfloat16):
        by_token = by_token.float()
    matrix: Tensor = _Sinkhorn.apply(by_token, num_iterations)
    matrix = matrix / matrix.sum(0, keepdim=True).clamp(min=1)
    lack_of_row = (1 - matrix.sum(1, keepdim=True)).clamp(min=0)
    lack_of_column = (1 - matrix.sum(0, keepdim=True)).clamp(min=0)
    matrix = matrix + lack_of_row * lack_of_column / lack_of_row.sum(0, keepdim=True).clamp(min=_SMALLEST_ENTRY)
    # contiguous, since batched products of other layouts run one by one
    return matrix.permute(2, 0, 1).reshape(logits.shape).contiguous()


class _Sinkhorn(torch.autograd.Function):
    """exp(logits) of (n, n, tokens), columns and rows normalised in turn.

    Every iterate is diag(u) K diag(v), so only these vectors are iterated and stored for backward. Entries below e^-27
    of their column's largest are raised to it, so that no sum vanishes.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, num_iterations: int) -> Tensor:
        # the first division cancels any column factor, so the largest entry can be 1
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
        slope_u, slope_v = -u.square(), -v.square()  # of reciprocals
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
