"""Tests the size of TabICL, its parts against slow forms, and what must not change a prediction."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.tabular.normalise import normalise
from models.tabular.tabicl import TabICL, TransformerBlock, rotate
from tests.models.tabular.problems import Problem, logits_alone, problem

pytestmark = pytest.mark.usefixtures("double_precision")
EXACT = {"rtol": 0, "atol": 1e-12}


def tabicl(**options) -> TabICL:
    """Returns a small model without weights of 0 or 1."""
    torch.manual_seed(0)
    sizes = {"width": 8, "num_column_blocks": 2, "num_column_heads": 2, "num_inducing": 4, "num_row_blocks": 2}
    sizes |= {"num_row_heads": 2, "num_summaries": 2, "num_context_blocks": 2, "num_context_heads": 4, "max_classes": 5}
    model = TabICL(**sizes | options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.double()


def test_the_published_configuration_has_its_size():
    with torch.device("meta"):
        model = TabICL()
    assert sum(p.numel() for p in model.parameters()) == 27_051_658


# --- a slow form ---------------------------------------------------------------------------------------------------


def block_by_torch(block: TransformerBlock, x: Tensor, others: Tensor, rotation: Tensor | None = None) -> Tensor:
    """Uses torch's products and softmax, one head after the other. x: (T, width), others: (K, width)."""
    attention, size = block.attention, x.shape[1] // block.attention.num_heads
    outputs = []
    for head in range(attention.num_heads):
        part = slice(head * size, (head + 1) * size)
        query = attention.query(block.norm(x))[:, part]
        key, value = (layer(block.norm(others))[:, part] for layer in (attention.key, attention.value))
        if rotation is not None:
            query, key = (
                torch.stack([rotation_matrix(angles) @ row for row, angles in zip(rows, rotation, strict=False)])
                for rows in (query, key)
            )
        outputs.append((query @ key.T / math.sqrt(size)).softmax(dim=1) @ value)
    x = x + attention.out(torch.cat(outputs, dim=1))
    return x + block.feed_forward(x)


def rotation_matrix(angles: Tensor) -> Tensor:
    return torch.block_diag(*(torch.stack([a.cos(), -a.sin(), a.sin(), a.cos()]).view(2, 2) for a in angles))


def by_parts(model: TabICL, one: Problem) -> Tensor:
    """Computes logits of one column, one row and one table at a time, without pruning."""
    values = normalise(one["context"][None], one["queries"][None])[0][0]
    num_context = len(one["labels"])
    columns = []
    for column in values.T:
        states = model.columns.embed(column[:, None])
        for block in model.columns.blocks:
            found = block_by_torch(block.gather, block.inducing, states[:num_context])
            states = block_by_torch(block.spread, states, found)
        columns.append(column[:, None] * model.columns.weight(states) + model.columns.bias(states))
    rows, num_summaries = [], len(model.rows.summaries)
    size = model.rows.frequencies.shape[0] * 2
    frequencies = torch.tensor([100_000 ** (-2 * i / size) for i in range(size // 2)])
    angles = torch.arange(float(num_summaries + len(columns)))[:, None] * frequencies
    for row in torch.stack(columns, dim=1):
        tokens = torch.cat([model.rows.summaries, row])
        for block in model.rows.blocks:
            tokens = block_by_torch(block, tokens, tokens, angles)
        rows.append(model.rows.norm(tokens[:num_summaries]).flatten())
    table = torch.stack(rows)
    labels = model.embed_labels(F.one_hot(one["labels"], model.max_classes).double())
    table = torch.cat([table[:num_context] + labels, table[num_context:]])
    for block in model.blocks:
        table = block_by_torch(block, table, table[:num_context])
    return model.decode(table[num_context:])


def test_equals_one_sequence_at_a_time_with_gradients():
    model, one = tabicl(), problem(5, 3, 4)
    results = []
    for form in (logits_alone, by_parts):
        logits = form(model, one)
        loss = logits.log_softmax(-1)[torch.arange(3), torch.tensor([2, 0, 1])].sum()
        results.append((logits, *torch.autograd.grad(loss, model.parameters())))
    for name, value, reference in zip(["logits", *dict(model.named_parameters())], *results, strict=True):
        torch.testing.assert_close(
            value, reference, rtol=1e-7, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_rotated_products_depend_only_on_the_distance():
    rows = tabicl().rows
    query, key = torch.randn(1, 1, 1, 4), torch.randn(1, 1, 1, 4)
    rotation = rows.rotation(9)
    products = [
        (rotate(query, rotation[i:]) * rotate(key, rotation[j:])).sum() for i, j in ((0, 3), (2, 5), (5, 8), (0, 4))
    ]
    torch.testing.assert_close(products[0], products[1], **EXACT)
    torch.testing.assert_close(products[0], products[2], **EXACT)
    assert (products[0] - products[3]).abs() > 1e-3


def test_a_block_starts_as_the_identity():
    block, x = TransformerBlock(8, 2), torch.randn(2, 3, 8)
    assert torch.equal(block(x, x, None), x)
