"""Aggregators, which combine a node's state with the weighted sum of its neighbours' states (KGAT, equations 6-8)."""

from collections.abc import Iterator
from itertools import repeat
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.graph.sparse import Operands, product, select

Aggregation = Literal["bi-interaction", "gcn", "graphsage"]

_CHUNK_ROWS = 1024
"""Number of nodes per chunk on a CPU, chosen so that intermediate states fit into the cache."""


class Aggregator(nn.Module):
    """Maps node states (N, width) to the next layer's states, (N, out_width), or (n, out_width) for n chosen nodes."""

    def __init__(self, slope: float) -> None:
        """Creates the layer. slope: negative slope of LeakyReLU."""
        super().__init__()
        self.slope = slope

    def forward(self, matrix: Operands, x: Tensor, rows: Tensor | None, mask: Tensor | None) -> Tensor:
        """Returns the next layer's states. matrix: the weighted adjacency matrix A. x: (N, width).

        rows: (n,), nodes to compute, or None for all nodes. mask: dropout mask, or None.
        """
        raise NotImplementedError

    def activate(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Applies LeakyReLU and dropout."""
        x = F.leaky_relu(x, self.slope)
        return x if mask is None else x * mask


class GCN(Aggregator):
    """Computes LeakyReLU(W (x + A x) + b)."""

    def __init__(self, width: int, out_width: int, slope: float) -> None:
        super().__init__(slope)
        self.linear = xavier_linear(width, out_width)

    def forward(self, matrix: Operands, x: Tensor, rows: Tensor | None, mask: Tensor | None) -> Tensor:
        weight, bias = self.linear.weight, self.linear.bias
        if len(weight) < x.shape[1]:
            x = x @ weight.T  # A (x W) = (A x) W, and the product with A is faster for narrower states
            projected = select(x, rows) + product(matrix, x, rows) + bias
        else:
            projected = self.linear(select(x, rows) + product(matrix, x, rows))
        return self.activate(projected, mask)


class GraphSAGE(Aggregator):
    """Computes LeakyReLU(W [x ; A x] + b)."""

    def __init__(self, width: int, out_width: int, slope: float) -> None:
        super().__init__(slope)
        self.linear = xavier_linear(2 * width, out_width)

    def forward(self, matrix: Operands, x: Tensor, rows: Tensor | None, mask: Tensor | None) -> Tensor:
        both = torch.cat([select(x, rows), product(matrix, x, rows)], dim=1)
        return self.activate(self.linear(both), mask)


class BiInteraction(Aggregator):
    """Computes LeakyReLU(W1 (x + A x) + b1) + LeakyReLU(W2 (x * A x) + b2)."""

    def __init__(self, width: int, out_width: int, slope: float) -> None:
        super().__init__(slope)
        self.linear1 = xavier_linear(width, out_width)
        self.linear2 = xavier_linear(width, out_width)

    def forward(self, matrix: Operands, x: Tensor, rows: Tensor | None, mask: Tensor | None) -> Tensor:
        own, neighbours = select(x, rows), product(matrix, x, rows)
        of_sum, of_product = self.linear1, self.linear2
        result: Tensor = _BiInteraction.apply(
            own, neighbours, of_sum.weight, of_sum.bias, of_product.weight, of_product.bias, mask, self.slope
        )
        return result


AGGREGATORS = {"bi-interaction": BiInteraction, "gcn": GCN, "graphsage": GraphSAGE}


def xavier_linear(width: int, out_width: int) -> nn.Linear:
    """Creates a linear layer with Xavier uniform weights and torch's default initial bias."""
    linear = nn.Linear(width, out_width)
    nn.init.xavier_uniform_(linear.weight)
    return linear


class _BiInteraction(torch.autograd.Function):
    """Computes `BiInteraction` in chunks of nodes; to save memory, the backward pass recomputes x + A x and x * A x."""

    @staticmethod
    def forward(
        ctx: Any, own: Tensor, neighbours: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor,
        mask: Tensor | None, slope: float,
    ) -> Tensor:  # fmt: skip
        both = own.new_empty(2, len(own), len(b1))
        result = own.new_empty(len(own), len(b1))
        for x, n, first, second, here, kept in _chunks(own, neighbours, *both, result, mask):
            F.leaky_relu_(torch.addmm(b1, x + n, w1.T, out=first), slope)
            F.leaky_relu_(torch.addmm(b2, x * n, w2.T, out=second), slope)
            torch.add(first, second, out=here)
            if kept is not None:
                here.mul_(kept)
        ctx.save_for_backward(own, neighbours, w1, w2, mask, both)
        ctx.slope = slope
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        own, neighbours, w1, w2, mask, both = ctx.saved_tensors
        grad_own, grad_neighbours = torch.empty_like(own), torch.empty_like(own)
        grad_w1, grad_w2, grad_b = torch.zeros_like(w1), torch.zeros_like(w2), w1.new_zeros(2, len(w1))
        chunks = _chunks(own, neighbours, *both, grads[0], mask, grad_own, grad_neighbours)
        for x, n, first, second, grad, kept, grad_x, grad_n in chunks:
            grad = grad if kept is None else grad * kept
            grad1 = torch.ops.aten.leaky_relu_backward(grad, first, ctx.slope, True)
            grad2 = torch.ops.aten.leaky_relu_backward(grad, second, ctx.slope, True)
            grad_w1.addmm_(grad1.T, x + n)
            grad_w2.addmm_(grad2.T, x * n)
            grad_b[0] += grad1.sum(0)
            grad_b[1] += grad2.sum(0)
            of_sum, of_product = grad1 @ w1, grad2 @ w2
            torch.addcmul(of_sum, of_product, n, out=grad_x)
            torch.addcmul(of_sum, of_product, x, out=grad_n)
        return grad_own, grad_neighbours, grad_w1, grad_b[0], grad_w2, grad_b[1], None, None


def _chunks(*tensors: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Yields tuples of corresponding row chunks of all arguments; an argument that is None yields None each time."""
    (first, *_) = tensors
    assert first is not None
    size = _CHUNK_ROWS if first.device.type == "cpu" else max(len(first), 1)
    parts = [repeat(None) if tensor is None else tensor.split(size) for tensor in tensors]
    return zip(*parts, strict=False)
