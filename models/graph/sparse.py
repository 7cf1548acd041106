"""Products of a constant sparse matrix and a dense matrix, differentiable in the dense matrix."""

import warnings
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.dropout import dropout_mask

for _of_torch in ("Sparse CSR tensor support is in beta state", "Sparse invariant checks are implicitly disabled"):
    warnings.filterwarnings("ignore", message=_of_torch)


class CSR(NamedTuple):
    """Sparse matrix in CSR format. Entries offsets[i] to offsets[i + 1] - 1 of `columns` and `values` form row i."""

    offsets: Tensor
    """(rows + 1,) int32"""
    columns: Tensor
    """(entries,) int32"""
    values: Tensor
    """(entries,) floating"""


class Operands(NamedTuple):
    """Sparse matrix for the forward pass, and its transpose for the backward pass."""

    csr: CSR
    transposed: CSR


class SparseMatrix(nn.Module):
    """Square matrix with a fixed sparsity pattern, and with values that can be replaced but get no gradient."""

    offsets: Tensor
    columns: Tensor
    values: Tensor
    transposed_offsets: Tensor
    transposed_columns: Tensor
    transposed_values: Tensor
    transposed_entries: Tensor

    def __init__(self, rows: Tensor, columns: Tensor, size: int, dtype: torch.dtype) -> None:
        """Creates a zero matrix. rows, columns: (entries,) integers below `size`; pairs are distinct and sorted."""
        super().__init__()
        entries = columns.argsort(stable=True)
        for name, value in (
            ("offsets", _offsets(rows, size).int()),
            ("columns", columns.int()),
            ("values", torch.zeros(len(rows), dtype=dtype)),
            ("transposed_offsets", _offsets(columns, size).int()),
            ("transposed_columns", rows[entries].int()),
            ("transposed_values", torch.zeros(len(rows), dtype=dtype)),
            ("transposed_entries", entries.int()),
        ):
            self.register_buffer(name, value, persistent=False)

    def set_values(self, values: Tensor) -> None:
        """Replaces the values of all entries. values: (entries,)."""
        self.values.copy_(values)
        self.transposed_values.copy_(self._transpose(values))

    def operands(self, dropout: float = 0.0) -> Operands:
        """Returns operands for `product`. dropout: probability of dropping an entry; other entries are scaled up."""
        if dropout > 0:
            return self.operands_of(self.values * dropout_mask(self.values.shape, dropout, self.values))
        return self._operands(self.values, self.transposed_values)

    def operands_of(self, values: Tensor) -> Operands:
        """Returns operands for `product` with `values`, (entries,), instead of the stored values."""
        return self._operands(values, self._transpose(values))

    def _transpose(self, values: Tensor) -> Tensor:
        return values.index_select(0, self.transposed_entries)

    def _operands(self, values: Tensor, transposed_values: Tensor) -> Operands:
        return Operands(
            CSR(self.offsets, self.columns, values),
            CSR(self.transposed_offsets, self.transposed_columns, transposed_values),
        )


def _offsets(rows: Tensor, size: int) -> Tensor:
    """Returns the CSR offsets (size + 1,): the index of each row's first entry, then the number of entries."""
    return F.pad(torch.bincount(rows, minlength=size).cumsum(0), (1, 0))


def product(matrix: Operands, x: Tensor, rows: Tensor | None = None) -> Tensor:
    """Returns A @ x for the matrix A, or (A @ x)[rows] if rows are given. Only x gets a gradient.

    On a CPU, only the given rows are computed. x: (size, d). rows: (n,) int64 indices, which may repeat. The result is
    (size, d) or (n, d) in the dtype of A's values, also under autocast.
    """
    if rows is not None and x.device.type != "cpu":
        return product(matrix, x).index_select(0, rows)  # selecting entries first would make the host wait
    with torch.autocast(x.device.type, enabled=False):
        result: Tensor = _Product.apply(x.to(matrix.csr.values.dtype), matrix, rows)
    return result


def select(x: Tensor, rows: Tensor | None) -> Tensor:
    """Returns x[rows], or x if rows is None."""
    return x if rows is None else x.index_select(0, rows)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Operands, rows: Tensor | None) -> Tensor:
        ctx.transposed, ctx.rows, ctx.size = matrix.transposed, rows, len(x)
        return multiply(matrix.csr if rows is None else _take_rows(matrix.csr, rows), x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        if ctx.rows is not None:
            # zeros in all other rows cost less time than selecting entries of the transpose
            grad = grad.new_zeros(ctx.size, grad.shape[1]).index_add_(0, ctx.rows, grad)
        return multiply(ctx.transposed, grad), None, None


def multiply(csr: CSR, x: Tensor) -> Tensor:
    """Returns csr @ x without a gradient.

    On a CPU, F.embedding_bag is many times faster than torch's sparse products. On a GPU, F.embedding_bag is slower,
    but sums in a fixed order, so it is used only if torch must use deterministic algorithms.
    """
    offsets, columns, values = csr
    if x.device.type == "cpu" or torch.are_deterministic_algorithms_enabled():
        return F.embedding_bag(columns, x, offsets, mode="sum", per_sample_weights=values, include_last_offset=True)
    return multiply_by_torch_sparse(csr, x)


def multiply_by_torch_sparse(csr: CSR, x: Tensor) -> Tensor:
    """Returns csr @ x, computed with torch's sparse product."""
    size = (len(csr.offsets) - 1, len(x))
    return torch.sparse_csr_tensor(*csr, size, check_invariants=False) @ x


def _take_rows(csr: CSR, rows: Tensor) -> CSR:
    """Returns a matrix of only the given rows, in the order of `rows`."""
    starts = csr.offsets.index_select(0, rows)
    sizes = csr.offsets.index_select(0, rows + 1) - starts
    offsets = F.pad(sizes.cumsum(0, dtype=torch.int32), (1, 0))
    entries = torch.repeat_interleave(starts - offsets[:-1], sizes)
    entries += torch.arange(len(entries), dtype=torch.int32)
    return CSR(offsets, csr.columns.index_select(0, entries), csr.values.index_select(0, entries))
