"""Tests NanoTabular against cells that attend one by one, and what must not change a prediction."""

import math

import pytest
import torch
from torch import Tensor

from models.tabular.attention import Attention
from models.tabular.nano import Block, NanoTabular, _layout
from models.tabular.normalise import normalise
from tests.models.tabular.problems import Problem, logits_alone, problem

pytestmark = pytest.mark.usefixtures("double_precision")
EXACT = {"rtol": 0, "atol": 1e-12}


def nano(**options) -> NanoTabular:
    """Returns a model without weights of 0 or 1, which would hide mistakes."""
    torch.manual_seed(0)
    model = NanoTabular(**{"width": 8, "num_blocks": 2, "num_heads": 2, "hidden_width": 12, "max_classes": 5} | options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


# --- a slow form ---------------------------------------------------------------------------------------------------

Rows = list[list[Tensor]]
"""The tokens of each row, (width,) each."""


def attend_one(attention: Attention, token: Tensor, others: list[Tensor]) -> Tensor:
    size = len(token) // attention.num_heads
    of_heads = []
    projections = (attention.query, attention.key, attention.value)
    for query, key, value in zip(*(layer.weight.split(size) for layer in projections), strict=True):
        weights = torch.stack([torch.exp((query @ token) @ (key @ other) / math.sqrt(size)) for other in others])
        of_heads.append(sum(w * (value @ other) for w, other in zip(weights / weights.sum(), others, strict=True)))
    return attention.out.weight @ torch.cat(of_heads)


def embedded(model: NanoTabular, one: Problem) -> Rows:
    values, missing = (x[0] for x in normalise(one["context"][None], one["queries"][None]))
    rows = []
    for number, (of_row, unknown) in enumerate(zip(values, missing.double(), strict=True)):
        known_label = number < len(one["labels"])
        rows.append([model.embed_labels.weight[one["labels"][number]] if known_label else model.no_label])
        for j in range(len(of_row)):
            seen = [(j + int(shift)) % len(of_row) for shift in model.shifts]
            rows[-1].append(model.embed_cells(torch.cat([of_row[seen], unknown[seen]])))
    return rows


def by_loops(model: NanoTabular, one: Problem) -> Tensor:
    """Computes logits without pruning: every token of every row goes through all blocks."""
    thinking = [[row] * (1 + one["context"].shape[1]) for row in getattr(model, "thinking_rows", ())]
    rows, num_context = [*thinking, *embedded(model, one)], len(thinking) + len(one["labels"])
    for block in [*model.blocks, model.last_block]:
        normed = [[block.feature_norm(token) for token in row] for row in rows]
        attended = [[attend_one(block.over_features, token, row) for token in row] for row in normed]
        rows = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(rows, attended, strict=True)]
        normed = [[block.row_norm(token) for token in row] for row in rows]
        columns = [[row[j] for row in normed[:num_context]] for j in range(len(rows[0]))]
        attended = [[attend_one(block.over_rows, t, c) for t, c in zip(row, columns, strict=True)] for row in normed]
        rows = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(rows, attended, strict=True)]
        rows = [[token + block.feed_forward(token) for token in row] for row in rows]
    return torch.stack([model.decode(row[0]) for row in rows[num_context:]])


@pytest.mark.parametrize(("shifts", "num_thinking_rows"), [((0,), 0), ((0, 1, 3), 0), ((0, 1, 3), 2)])
def test_values_and_gradients_equal_cell_by_cell_attention(shifts, num_thinking_rows):
    model, one = nano(group_shifts=shifts, num_thinking_rows=num_thinking_rows), problem(4, 3, 3)
    results = []
    for form in (logits_alone, by_loops):
        logits = form(model, one)
        loss = logits.log_softmax(-1)[torch.arange(3), torch.tensor([2, 0, 1])].sum()
        results.append((logits, *torch.autograd.grad(loss, model.parameters())))
    for name, value, reference in zip(["logits", *dict(model.named_parameters())], *results, strict=True):
        torch.testing.assert_close(value, reference, **EXACT, msg=lambda text, name=name: f"{name}: {text}")
        assert reference.any(), name


def test_pruned_block_equals_the_whole():
    model, one = nano(), problem(6, 4, 5)
    context, queries = one["context"][None], one["queries"][None]
    cells, layout = (
        model.embed(context, one["labels"][None], queries, None, None),
        _layout(context, queries, None, None),
    )
    whole = Block.forward(model.last_block, cells, layout)
    assert whole.shape == (10, 6, 8)
    torch.testing.assert_close(model.last_block(cells, layout), whole[6:, :1], **EXACT)


# --- what must not change a prediction -----------------------------------------------------------------------------


@pytest.mark.parametrize(("shifts", "matters"), [((0,), False), ((0, 1, 3), True)])
def test_the_order_of_columns_matters_only_to_groups(shifts, matters):
    model, one = nano(group_shifts=shifts), problem(8, 3, 5)
    order = torch.tensor([3, 0, 4, 2, 1])
    mixed = one | {name: one[name][:, order] for name in ("context", "queries")}
    assert ((logits_alone(model, mixed) - logits_alone(model, one)).abs().max() > 1e-10) == matters


def test_the_scale_of_a_column_does_not_matter():
    model, one = nano(), problem(8, 3, 2)
    scaled = one | {name: one[name] * torch.tensor([1e6, -2.0]).abs() + 5 for name in ("context", "queries")}
    torch.testing.assert_close(logits_alone(model, scaled), logits_alone(model, one), rtol=0, atol=1e-8)


# --- sizes ---------------------------------------------------------------------------------------------------------


def test_the_default_model_has_less_than_a_million_parameters():
    assert sum(p.numel() for p in NanoTabular().parameters()) < 1_000_000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_float32_in_any_precision(dtype):
    model, one = (
        NanoTabular().float(),
        {k: v.float() if v.is_floating_point() else v for k, v in problem(9, 3, 4).items()},
    )
    with torch.autocast("cpu", dtype):
        logits = logits_alone(model, one)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, logits_alone(model, one), rtol=0, atol=0.05)
