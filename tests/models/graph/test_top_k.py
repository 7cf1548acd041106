"""Tests ranking metrics against sorted lists and loops."""

import math

import pytest
import torch

from models.graph.top_k import top_k

KS = (1, 3, 20, 150)


def dcg(hits):
    return sum(hit / math.log2(place + 2) for place, hit in enumerate(hits))


def slow_metrics(scores, positives, seen, k):
    """Returns one user's recall, precision, hit, NDCG, and NDCG as KGAT's own code computes it."""
    ranked = sorted((i for i in range(len(scores)) if i not in seen), key=lambda i: -scores[i])
    hits = [item in positives for item in ranked]
    first = hits[:k]
    best = sorted(hits[:100], reverse=True)[:k]
    return (
        sum(first) / len(positives),
        sum(first) / k,
        float(any(first)),
        dcg(first) / dcg([1] * min(k, len(positives))),
        dcg(first) / dcg(best) if any(best) else 0.0,
    )


def padded(rows, value):
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows], dtype=torch.int64)


def make_users(num_items, num_users=9):
    """Returns distinct scores, (num_users, num_items), and few to many positives and seen items of each user."""
    torch.manual_seed(0)
    scores = torch.rand(num_users, num_items * 7).argsort(1)[:, :num_items].float()
    positives, seen = [], []
    for user in range(num_users):
        items = torch.randperm(num_items).tolist()
        middle = 1 + user * (num_items // 3) // num_users
        positives.append(items[:middle])
        seen.append(items[middle : middle + user * num_items // (2 * num_users)])
    return scores, positives, seen


@pytest.mark.parametrize("num_items", [12, 100, 400])
@pytest.mark.parametrize("step", [1, 50, 10**6], ids=["all different", "some equal", "all equal"])
def test_metrics_equal_sorted_lists(num_items, step):
    scores, positives, seen = make_users(num_items)
    scores = scores // step
    expected = [
        [sum(column) for column in zip(*(slow_metrics(s.tolist(), p, q, k) for s, p, q in rows), strict=True)]
        for k in KS
        for rows in [list(zip(scores, positives, seen, strict=True))]
    ]
    found = top_k(scores, padded(positives, num_items), padded(seen, num_items), KS)
    torch.testing.assert_close(torch.stack(found).T, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def test_the_official_ndcg_is_larger_and_ignores_missed_positives():
    scores, positives = torch.arange(300.0).flip(0).unsqueeze(0), torch.tensor([[3, 290, 291, 292]])
    nothing = torch.full((1, 0), 300)
    found = top_k(scores, positives, nothing, (20,))
    assert found.ndcg_official.item() == pytest.approx(1 / math.log2(5))
    assert found.ndcg.item() == pytest.approx(1 / math.log2(5) / dcg([1] * 4))


def test_a_seen_positive_is_never_a_hit():
    scores = torch.rand(1, 5)
    found = top_k(scores, torch.tensor([[1, 2]]), torch.tensor([[0, 1, 5]]), (5,))
    assert found.recall.item() == 0.5


def test_padding_has_no_weight():
    """Padding counts neither as a user without positives nor as the last item."""
    scores = torch.tensor([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])
    found = top_k(scores, torch.tensor([[2, 3], [3, 3]]), torch.tensor([[3, 3], [3, 3]]), (1,))
    assert torch.stack(found).flatten().tolist() == [1] * 5
    assert torch.isfinite(scores).all()
