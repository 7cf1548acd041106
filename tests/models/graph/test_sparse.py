"""Tests sparse products and their gradients against dense matrices, with every kernel, for all rows and some."""

import pytest
import torch

from models.graph import sparse
from models.graph.sparse import SparseMatrix, product

SIZE, NUM_ENTRIES = 7, 12


def make(dtype, num_entries=NUM_ENTRIES):
    """Returns a matrix with empty rows and columns, and its dense form."""
    torch.manual_seed(0)
    places = torch.randperm((SIZE - 1) * (SIZE - 1))[:num_entries].sort().values
    rows, columns = places // (SIZE - 1), places % (SIZE - 1) + 1
    matrix = SparseMatrix(rows, columns, SIZE, dtype)
    values = torch.randn(num_entries, dtype=dtype)
    matrix.set_values(values)
    return matrix, torch.zeros(SIZE, SIZE, dtype=dtype).index_put((rows, columns), values)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("rows", [None, [2], [6, 0, 3, 3], []])
@pytest.mark.parametrize("kernel", [sparse.multiply, sparse.multiply_by_torch_sparse])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_and_gradients_equal_dense_matrices(dtype, kernel, rows, monkeypatch):
    matrix, dense = make(dtype)
    monkeypatch.setattr(sparse, "multiply", kernel)
    rows = rows if rows is None else torch.tensor(rows, dtype=torch.int64)
    x = torch.randn(SIZE, 3, dtype=dtype, requires_grad=True)
    found, expected = product(matrix.operands(), x, rows), sparse.select(dense @ x, rows)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), x), torch.autograd.grad((expected * weights).sum(), x), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("kernel", [sparse.multiply, sparse.multiply_by_torch_sparse])
def test_autocast_does_not_lower_the_precision(kernel, monkeypatch):
    monkeypatch.setattr(sparse, "multiply", kernel)
    matrix, dense = make(torch.float32)
    x = torch.randn(SIZE, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, of_lower = product(matrix.operands(), x), product(matrix.operands(), x.bfloat16())
    assert found.dtype == of_lower.dtype == torch.float32
    torch.testing.assert_close(found, dense @ x)
    torch.testing.assert_close(of_lower, dense @ x.bfloat16().float())


def test_a_matrix_without_entries_gives_zeros():
    matrix, _ = make(torch.float32, num_entries=0)
    x = torch.randn(SIZE, 3, requires_grad=True)
    result = product(matrix.operands(), x)
    (grad,) = torch.autograd.grad(result.sum(), x)
    assert result.shape == x.shape and not result.any() and not grad.any()


def test_other_values_are_used_and_not_kept():
    matrix, dense = make(torch.float64)
    x = torch.randn(SIZE, 3, dtype=torch.float64)
    torch.testing.assert_close(product(matrix.operands_of(3 * matrix.values), x), 3 * dense @ x)
    torch.testing.assert_close(product(matrix.operands(), x), dense @ x)


def test_dropout_drops_the_same_entries_from_the_matrix_and_its_transpose():
    matrix, _ = make(torch.float64)
    torch.manual_seed(1)
    operands = matrix.operands(dropout=0.5)
    kept = operands.csr.values != 0
    assert 0 < kept.sum() < NUM_ENTRIES
    torch.testing.assert_close(operands.csr.values[kept], 2 * matrix.values[kept])
    identity = torch.eye(SIZE, dtype=torch.float64)
    forward, backward = sparse.multiply(operands.csr, identity), sparse.multiply(operands.transposed, identity)
    torch.testing.assert_close(forward.T, backward)


def test_checkpoints_do_not_contain_the_matrix():
    assert not make(torch.float32)[0].state_dict()
