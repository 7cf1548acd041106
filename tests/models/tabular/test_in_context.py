"""Tests what must not change a prediction of NanoTabular and TabICL."""

import math
from functools import partial

import pytest
import torch

from tests.models.tabular.problems import NUM_CLASSES, logits_alone, padded_batch, problem
from tests.models.tabular.test_nano import EXACT, nano
from tests.models.tabular.test_tabicl import tabicl

pytestmark = pytest.mark.usefixtures("double_precision")
MODELS = [nano, partial(nano, num_thinking_rows=2), tabicl]


@pytest.mark.parametrize("build", MODELS)
def test_padding_changes_nothing(build):
    """Padding of rows, queries, features and classes changes neither logits nor gradients, whatever it contains."""
    model, problems = build(), [problem(9, 4, 6, seed=1), problem(1, 5, 1, seed=2), problem(5, 1, 3, seed=3)]
    tables, counts = padded_batch(problems)
    logits = model(**tables, **counts)
    assert (logits[:, :, NUM_CLASSES:] == -math.inf).all()
    loss = alone_loss = torch.zeros(())
    for row, one in enumerate(problems):
        alone = logits_alone(model, one)[:, :NUM_CLASSES]
        padded = logits[row, : len(alone), :NUM_CLASSES]
        torch.testing.assert_close(padded, alone, **EXACT)
        loss, alone_loss = loss + padded.square().sum(), alone_loss + alone.square().sum()
    gradients = (torch.autograd.grad(total, model.parameters()) for total in (loss, alone_loss))
    for padded, alone in zip(*gradients, strict=True):
        torch.testing.assert_close(padded, alone, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("build", MODELS)
def test_queries_do_not_influence_each_other(build):
    model, one = build(), problem(7, 5, 4)
    together = logits_alone(model, one)
    for row in range(5):
        torch.testing.assert_close(
            logits_alone(model, one | {"queries": one["queries"][row : row + 1]})[0], together[row], **EXACT
        )
    one["queries"][2] = 1e9
    changed = logits_alone(model, one)
    assert not torch.equal(changed[2], together[2])
    torch.testing.assert_close(changed[[0, 1, 3, 4]], together[[0, 1, 3, 4]], **EXACT)


@pytest.mark.parametrize("build", MODELS)
def test_the_order_of_context_rows_does_not_matter(build):
    model, one = build(), problem(40, 3, 4)
    order = torch.randperm(40)
    mixed = one | {"context": one["context"][order], "labels": one["labels"][order]}
    torch.testing.assert_close(logits_alone(model, mixed), logits_alone(model, one), rtol=0, atol=1e-10)
    mixed["labels"] = one["labels"]
    assert (logits_alone(model, mixed) - logits_alone(model, one)).abs().max() > 1e-3
