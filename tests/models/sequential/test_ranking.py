"""Tests losses and their gradients against loops over positions, and places of targets against sorting."""

import math

import pytest
import torch
import torch.nn.functional as F

from models.sequential import ranking
from models.sequential.ranking import (
    binary_cross_entropy,
    full_softmax,
    generalised_binary_cross_entropy,
    place_of_target,
    ranking_metrics,
    sampled_softmax,
)

NUM_ITEMS, WIDTH, MAXLEN = 12, 5, 4
LENGTHS = (4, 2, 1)
CALIBRATION = 0.7


# --- losses ------------------------------------------------------------------------------------------------------


def slow_bce(state, target, negatives, table):
    """Returns SASRec's -log sigma(s+) - log(1 - sigma(s-)), the latter as a mean over the negatives."""
    of_negatives = [-torch.log(1 - torch.sigmoid(state @ table[n])) for n in negatives]
    return -torch.log(torch.sigmoid(state @ table[target])) + sum(of_negatives) / len(negatives)


def slow_gbce(state, target, negatives, table, calibration=CALIBRATION):
    k = len(negatives)
    alpha = k / (len(table) - 1 - 1)
    beta = alpha * (calibration * (1 - 1 / alpha) + 1 / alpha)
    positive = torch.log(torch.sigmoid(state @ table[target]) ** beta)
    return -(positive + sum(torch.log(1 - torch.sigmoid(state @ table[n])) for n in negatives)) / (k + 1)


def slow_sampled(state, target, negatives, table):
    scores = torch.stack([state @ table[i] for i in (target, *negatives)])
    return -torch.log(scores.exp()[0] / scores.exp().sum())


def slow_full(state, target, negatives, table):
    return slow_sampled(state, target, [i for i in range(1, len(table)) if i != target], table)


def gbce(states, targets, negatives, table):
    return generalised_binary_cross_entropy(states, targets, negatives, table, CALIBRATION)


def full(states, targets, negatives, table):
    return full_softmax(states, targets, table)


def full_with_padding(states, targets, negatives, table):
    """Computes the loss as on a GPU, which does not skip the padding beforehand."""
    return ranking._FullSoftmax.apply(states.flatten(0, 1), targets.flatten(), table)


# name: (the loss, its slow form for one position, the shape of its negatives without their number)
LOSSES = {
    "bce": (binary_cross_entropy, slow_bce, (len(LENGTHS), MAXLEN)),
    "gbce": (gbce, slow_gbce, (len(LENGTHS),)),
    "sampled": (sampled_softmax, slow_sampled, (len(LENGTHS),)),
    "full": (full, slow_full, (len(LENGTHS),)),
    "full with padding": (full_with_padding, slow_full, (len(LENGTHS),)),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


def make_batch(name, num_negatives=3, lengths=LENGTHS, dtype=torch.float64):
    """Returns states and table with gradients, targets and negatives; row 0 of the table must not count."""
    torch.manual_seed(0)
    real = torch.arange(MAXLEN) < torch.tensor(lengths)[:, None]
    states = torch.randn(len(lengths), MAXLEN, WIDTH, dtype=dtype, requires_grad=True)
    table = torch.randn(NUM_ITEMS + 1, WIDTH, dtype=dtype, requires_grad=True)
    targets = torch.randint(1, NUM_ITEMS + 1, real.shape) * real
    shape = LOSSES[name][2]
    negatives = torch.randint(1, NUM_ITEMS + 1, (*shape, num_negatives))
    if len(shape) == 2:
        negatives *= real[:, :, None]
    return states, targets, negatives, table


def slow_loss(name, states, targets, negatives, table):
    of_position = LOSSES[name][1]
    total = torch.zeros((), dtype=states.dtype)
    for b, row in enumerate(targets.tolist()):
        for t, target in enumerate(row):
            if target > 0:
                own = negatives[b, t] if negatives.dim() == 3 else negatives[b]
                total = total + of_position(states[b, t], target, own.tolist(), table)
    return total


def assert_equals_slow(name, batch):
    states, _, _, table = batch
    loss, expected = LOSSES[name][0](*batch), slow_loss(name, *batch)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
    # The trainer scales the loss, so backward must pass on a factor.
    fast = torch.autograd.grad(0.3 * loss, (states, table))
    slow = torch.autograd.grad(0.3 * expected, (states, table))
    for found, wanted in zip(fast, slow, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


@every_loss
@pytest.mark.parametrize("num_negatives", [1, 3])
def test_losses_and_gradients_equal_a_loop_over_positions(name, num_negatives):
    assert_equals_slow(name, make_batch(name, num_negatives))


@pytest.mark.parametrize("chunk_elements", [1, NUM_ITEMS, 3 * NUM_ITEMS, 4 * NUM_ITEMS + 1, 7 * NUM_ITEMS])
@pytest.mark.parametrize("name", ["full", "full with padding"])
def test_full_softmax_is_the_same_in_chunks_of_any_size(name, chunk_elements, monkeypatch):
    """Chunks hold one position, several with a shorter last chunk, or all 7."""
    monkeypatch.setitem(ranking._CHUNK_ELEMENTS, "cpu", chunk_elements)
    monkeypatch.setattr(ranking, "_FEWEST_POSITIONS", 1)
    assert_equals_slow(name, make_batch(name))


@pytest.mark.parametrize("name", ["full", "full with padding"])
def test_full_softmax_survives_large_scores(name):
    """exp(1000) is infinite, but the loss of a sure model is not."""
    states, targets, negatives, table = make_batch(name)
    large = (1000 * states).detach().requires_grad_()
    loss = LOSSES[name][0](large, targets, negatives, table)
    real = targets > 0
    expected = F.cross_entropy((large[real] @ table.T)[:, 1:], targets[real] - 1, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    fast, slow = (torch.autograd.grad(value, (large, table)) for value in (loss, expected))
    for found, wanted in zip(fast, slow, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


@every_loss
@pytest.mark.parametrize("value", [1e9, math.inf, math.nan])
def test_the_content_of_padding_is_not_counted(name, value):
    states, targets, negatives, table = make_batch(name)
    expected = LOSSES[name][0](states, targets, negatives, table)
    spoilt = torch.where((targets > 0)[:, :, None], states, value)
    torch.testing.assert_close(LOSSES[name][0](spoilt, targets, negatives, table), expected, rtol=0, atol=1e-10)


@every_loss
def test_a_batch_without_targets_has_zero_loss(name):
    states, targets, negatives, table = make_batch(name, lengths=(0, 0, 0))
    loss = LOSSES[name][0](states, targets, negatives, table)
    assert loss.item() == 0
    for gradient in torch.autograd.grad(loss, (states, table)):
        assert not gradient.any()


@every_loss
def test_losses_under_autocast_stay_close_and_keep_gradient_dtypes(name):
    batch = make_batch(name, dtype=torch.float32)
    states, _, _, table = batch
    exact = LOSSES[name][0](*batch)
    with torch.autocast("cpu", torch.bfloat16):
        loss = LOSSES[name][0](*batch)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)
    assert name == "bce" or loss.item() != exact.item()  # bce has no matrix product, which autocast would round
    found, wanted = (torch.autograd.grad(value, (states, table)) for value in (loss, exact))
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 2e-2 * b.norm()


@pytest.mark.parametrize("name", ["full", "full with padding"])
def test_autocast_rounds_only_the_scores_of_full_softmax(name):
    states, targets, _, table = make_batch(name, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = LOSSES[name][0](states, targets, None, table)
        scores = states[targets > 0] @ table[1:].T
    expected = F.cross_entropy(scores.float(), targets[targets > 0] - 1, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("num_negatives", "calibration", "beta"),
    [
        (256, 0.75, 0.30622254758418740),  # the published setting on MovieLens-1M: 1/4 + 3/4 of 256 / 3415
        (256, 1.0, 256 / 3415),
        (256, 0.0, 1.0),
        (3415, 0.75, 1.0),
        (4000, 1.0, 1.0),  # drawn with repetition, there can be more negatives than items: no rate exceeds 1
    ],
)
def test_the_positive_in_gbce_has_its_published_weight(num_negatives, calibration, beta):
    torch.manual_seed(0)
    num_items, target = 3416, 7
    state, table = torch.randn(WIDTH).double(), torch.randn(num_items + 1, WIDTH).double()
    negatives = torch.randint(1, num_items + 1, (1, num_negatives))
    loss = generalised_binary_cross_entropy(
        state.view(1, 1, -1), torch.tensor([[target]]), negatives, table, calibration
    )
    of_negatives = F.softplus(table[negatives[0]] @ state).sum()
    found = (loss * (num_negatives + 1) - of_negatives) / F.softplus(-table[target] @ state)
    assert float(found) == pytest.approx(beta, abs=1e-9)


def test_gbce_without_calibration_is_plain_bce():
    """The mean covers the target and k negatives alike, while plain BCE gives both sides the same weight."""
    states, targets, negatives, table = make_batch("gbce")
    loss = generalised_binary_cross_entropy(states, targets, negatives, table, calibration=0)
    scores = torch.cat([table[targets].unsqueeze(2), table[negatives].unsqueeze(1).expand(-1, MAXLEN, -1, -1)], dim=2)
    scores = (scores @ states.unsqueeze(-1)).squeeze(-1)
    is_target = torch.zeros_like(scores)
    is_target[:, :, 0] = 1
    expected = F.binary_cross_entropy_with_logits(scores, is_target, reduction="none").mean(-1)[targets > 0].sum()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)


# --- places ------------------------------------------------------------------------------------------------------


def scores_with_ties(num_queries=200, num_others=15):
    torch.manual_seed(0)
    return torch.randint(8, (num_queries,)).double(), torch.randint(8, (num_queries, num_others)).double()


def test_a_tied_rank_is_the_middle_of_its_ties():
    target, others = scores_with_ties()
    places = place_of_target(target, others)
    assert places.dtype == torch.float64 and places.shape == target.shape
    for place, score, row in zip(places.tolist(), target.tolist(), others.tolist(), strict=True):
        tied = [i for i, s in enumerate(sorted([score, *row], reverse=True)) if s == score]
        assert place == sum(tied) / len(tied)
    assert places.frac().any() and (places == 0).any() and (places == others.shape[1]).any()


def test_a_rank_does_not_depend_on_storage_order():
    target, others = scores_with_ties()
    assert torch.equal(place_of_target(target, others), place_of_target(target, others[:, torch.randperm(15)]))
    assert torch.equal(place_of_target(target.float(), others.float()), place_of_target(target, others))


def test_minus_infinity_removes_an_item():
    target, others = scores_with_ties()
    removed = others.clone()
    removed[:, 3:9] = -math.inf
    kept = torch.cat([others[:, :3], others[:, 9:]], dim=1)
    assert torch.equal(place_of_target(target, removed), place_of_target(target, kept))
    assert not torch.equal(place_of_target(target, removed), place_of_target(target, others))


@pytest.mark.parametrize(
    ("target", "others", "place"),
    [
        (math.nan, [1.0, 2.0, math.nan, -math.inf], 4),
        (1.0, [math.nan, 0.0, 2.0], 2),
        (-math.inf, [-math.inf, -math.inf, 0.0], 2),
        (math.inf, [math.inf, 0.0], 0.5),
        (0.0, [], 0),
    ],
)
def test_scores_that_are_not_finite_never_look_good(target, others, place):
    """Broken weights must never look good, so NaN is the worst score of a target and the best of a rival."""
    assert place_of_target(torch.tensor([target]), torch.tensor([others])).tolist() == [place]


CUTOFFS = (1, 5, 10, 20)
PLACES = [0, 0, 0.5, 1, 3.5, 4, 4.5, 5, 8.5, 9, 9.5, 10, 18.5, 19, 19.5, 20, 57]


def slow_metrics(places, cutoff):
    """Returns the sums of hit rate, NDCG and reciprocal rank."""
    hit = ndcg = reciprocal = 0.0
    for place in places:
        if place <= cutoff - 1:
            hit += 1
            ndcg += 1 / math.log2(place + 2)
            reciprocal += 1 / (place + 1)
    return hit, ndcg, reciprocal


def test_metrics_equal_a_loop_over_queries():
    sums = ranking_metrics(torch.tensor(PLACES, dtype=torch.float64), CUTOFFS)
    assert sums.dtype == torch.float64 and sums.shape == (3, len(CUTOFFS))
    for j, cutoff in enumerate(CUTOFFS):
        assert sums[:, j].tolist() == pytest.approx(slow_metrics(PLACES, cutoff), abs=1e-12)


def test_metrics_of_known_ranks():
    sums = ranking_metrics(torch.tensor([1.0]), CUTOFFS)
    second = [0, 1, 1, 1]
    assert sums[0].tolist() == second
    assert sums[1].tolist() == pytest.approx([0.6309297535714575 * hit for hit in second])
    assert sums[2].tolist() == [0.5 * hit for hit in second]
    assert ranking_metrics(torch.tensor([0.0]), CUTOFFS).tolist() == [[1] * 4] * 3
    assert not ranking_metrics(torch.tensor([]), CUTOFFS).any()


def test_metrics_of_batches_add_up():
    places = torch.tensor(PLACES, dtype=torch.float64)
    parts = [ranking_metrics(part, CUTOFFS) for part in places.split([1, 9, 7])]
    torch.testing.assert_close(sum(parts), ranking_metrics(places, CUTOFFS), rtol=0, atol=1e-12)
