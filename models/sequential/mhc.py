"""Manifold-constrained hyper-connections: several residual streams instead of one (arXiv 2512.24880).

A token's state X, (n, C), consists of n streams. A connection around a sub-layer F, which includes F's norm, computes

    X' = H_res X + h_post^T F(h_pre X)

Its coefficients depend on the token (equations 7 and 8 of the paper). With v = RMSNorm(vec(X)),

    h_pre = sigmoid(a_pre v phi_pre + b_pre)
    h_post = 2 sigmoid(a_post v phi_post + b_post)
    H_res = Sinkhorn(a_res v phi_res + b_res)

A model's first connection creates the streams as copies of its input, and the last connection averages them. Where all
streams are equal, or only their mean is used, the exact gradient of H_res is zero (and of h_pre in front of a norm), so
the first connection has neither H_res nor h_pre, and the last has no H_res.

Initially h_post is 1, H_res is close to the identity, and h_pre sums to 1, with most of its weight on stream l mod n at
connection l. All streams are then equal, and the network computes the same as with plain pre-norm residuals. Different
h_pre give the streams different gradients; with equal h_pre the streams would stay equal throughout training.
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
"""Initial b_res on the diagonal; the other elements start as the negative of this value."""
_PHI_STD = 0.02
_SMALLEST_ENTRY = math.exp(-27.0)


def hyper_connections(
    width: int, num_blocks: int, num_streams: int = 4, init_gate: float = 0.01, num_iterations: int = 20,
    in_full_precision: bool = False,
) -> list["HyperConnection"]:  # fmt: skip
    """Creates a model's connections, two per block; `HyperConnection` describes the arguments."""
    last = 2 * num_blocks - 1
    return [
        HyperConnection(
            width, layer, num_streams, init_gate, num_iterations, in_full_precision,
            opens=layer == 0, closes=layer == last,
        )
        for layer in range(last + 1)
    ]  # fmt: skip


class HyperConnection(nn.Module):
    """Hyper-connection around a sub-layer, whose input it normalises like a pre-norm residual connection.

    layer: index of the sub-layer in the model, from 0.
    num_streams: n, at least 2.
    init_gate: initial value of a_pre, a_post and a_res, which scale the coefficients' dependence on the token.
    num_iterations: iterations of Sinkhorn and Knopp's algorithm, at least 1.
    in_full_precision: whether to disable autocast for the whole connection, including its matrix products.
    opens: whether to take (B, T, C) and create the streams.
    closes: whether to return (B, T, C), the mean of the streams.
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
        """Applies the connection: (B, T, n, C) -> (B, T, n, C), or (B, 1, n, C) with `last` (see `sasrec.rows`).

        The input has no dimension n with `opens`, nor has the result with `closes`.
        """
        with self._precision(x):
            streams = x.unsqueeze(-2) if self.opens else x
            projected = self._projected(streams)
            # A sum of elementwise products is many times faster on a CPU than a product of such thin matrices.
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
        """Returns RMSNorm(vec(X)) phi by name of the coefficients: (B, T, n, C) -> (B, T, number of coefficients) each.

        RMSNorm has no gain of its own, because phi can express it. The product is divided by the root mean square
        instead of X, which has more elements.
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
    """Computes gate * projected + bias in full precision; the connection passes projected = RMSNorm(vec(X)) phi."""

    def __init__(self, num_inputs: int, bias: Tensor, gate: float) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(len(bias), num_inputs) * _PHI_STD)
        self.gate = nn.Parameter(torch.tensor([gate]))
        self.bias = nn.Parameter(bias)

    def forward(self, projected: Tensor) -> Tensor:
        """Scales and shifts the projections: (..., number of coefficients) -> the same shape."""
        return self.gate * projected + self.bias


class ResidualMatrix(Coefficients):
    """Computes H_res, a doubly stochastic matrix for every token."""

    stays_eager: ClassVar[bool] = True
    """Whether `torch.compile` skips the module, which takes many minutes to compile: all iterations are unrolled."""

    def __init__(self, num_inputs: int, num_streams: int, gate: float, num_iterations: int) -> None:
        super().__init__(num_inputs, _RESIDUAL_LOGIT * (2 * torch.eye(num_streams) - 1).flatten(), gate)
        self.num_streams = num_streams
        self.num_iterations = num_iterations

    def forward(self, projected: Tensor) -> Tensor:
        """Converts projections to doubly stochastic matrices: (..., n * n) -> (..., n, n)."""
        logits = super().forward(projected).unflatten(-1, (self.num_streams, self.num_streams))
        return doubly_stochastic(logits, self.num_iterations)


def _one_hot_read(stream: int, n: int) -> Tensor:
    """Returns the b_pre for which h_pre has most of its weight on one stream and sums to 1."""
    share = torch.full((n,), _OTHERS_SHARE)
    share[stream] = 1 - (n - 1) * _OTHERS_SHARE
    return torch.logit(share)


def doubly_stochastic(logits: Tensor, num_iterations: int) -> Tensor:
    """Returns a doubly stochastic matrix near exp(logits), (..., n, n), in at least float32.

    Columns and rows are divided by their sums in turn, rows last (Sinkhorn and Knopp, 1967). Columns of widely spread
    logits would converge too slowly, so the rounding of Altschuler, Weed and Rigollet (NeurIPS 2017, algorithm 2)
    finally makes all rows and columns sum to 1.
    """
    n = logits.shape[-1]
    # With tokens in the last dimension, sums over the small matrices are sums of long vectors.
    by_token = logits.reshape(-1, n, n).permute(1, 2, 0)
    if by_token.dtype in (torch.float16, torch.bfloat16):
        by_token = by_token.float()
    matrix: Tensor = _Sinkhorn.apply(by_token, num_iterations)
    matrix = matrix / matrix.sum(0, keepdim=True).clamp(min=1)
    lack_of_row = (1 - matrix.sum(1, keepdim=True)).clamp(min=0)
    lack_of_column = (1 - matrix.sum(0, keepdim=True)).clamp(min=0)
    matrix = matrix + lack_of_row * lack_of_column / lack_of_row.sum(0, keepdim=True).clamp(min=_SMALLEST_ENTRY)
    # Batched products of matrices that are not contiguous would run one by one.
    return matrix.permute(2, 0, 1).reshape(logits.shape).contiguous()


class _Sinkhorn(torch.autograd.Function):
    """Normalises columns and rows of exp(logits), (n, n, tokens), in turn.

    The matrix is diag(u) K diag(v) after every iteration, so only the vectors u and v are updated and stored for
    backward. Elements below e^-27 times their column's largest are raised to this bound, so that no sum becomes zero.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, num_iterations: int) -> Tensor:
        # The first division cancels any factor of a column, so its largest element can be 1.
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
        slope_u, slope_v = -u.square(), -v.square()  # derivatives of reciprocals
        for t in reversed(range(len(v))):
            # u[t + 1] = 1 / (K v[t])
            row = grad_u * slope_u[t + 1]
            grad_kernel += row.unsqueeze(1) * v[t].unsqueeze(0)
            # v[t] = 1 / (K^T u[t]); the result depends directly on the last v only
            from_row = (kernel * row.unsqueeze(1)).sum(0)
            column = slope_v[t] * (from_row if t < len(v) - 1 else grad_v + from_row)
            grad_kernel += u[t].unsqueeze(1) * column.unsqueeze(0)
            grad_u = (kernel * column.unsqueeze(0)).sum(1)
        return grad_kernel * kernel, None
