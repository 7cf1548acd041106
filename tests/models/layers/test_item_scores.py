"""Tests the highest scores of each row against a stable sort of whole rows."""

import pytest
import torch

from models.layers.item_scores import highest


@pytest.mark.parametrize("num_different", [1, 2, 5, 1000])
@pytest.mark.parametrize("k", [1, 7, 40])
def test_equal_scores_keep_the_order_of_columns(num_different, k):
    scores = torch.randint(num_different, (9, 40), generator=torch.Generator().manual_seed(0)).float()
    scores[0, ::2] = -torch.inf
    values, columns = scores.sort(dim=1, descending=True, stable=True)
    torch.testing.assert_close(highest(scores, k), (values[:, :k], columns[:, :k]), rtol=0, atol=0)


@pytest.mark.parametrize("k", [1, 7, 40])
def test_nan_counts_as_the_highest_score(k):
    scores = torch.zeros(1, 40)
    scores[0, 5:9] = torch.nan
    values, columns = highest(scores, k)
    assert values.isnan().sum() == min(k, 4) and len(columns.unique()) == k
    assert columns[0, 4:].tolist() == [column for column in range(40) if not 5 <= column < 9][: max(0, k - 4)]
