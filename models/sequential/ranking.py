"""Ranking items: training losses, and the place of the true item.

States (..., d) score item i by their dot product with row i of the item table; item 0 is padding and never scored.
Every loss is a sum over positions whose target is an item.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}
"""Scores held at once by `full_softmax`: few enough for a CPU's cache, enough to keep a GPU busy (256 MiB)."""
_FEWEST_POSITIONS = 16
"""Minimum positions per chunk, since each chunk reads the whole table."""


def binary_cross_entropy(states: Tensor, targets: Tensor, negatives: Tensor, table: Tensor) -> Tensor:
    """softplus(-s+) plus the mean of softplus(s-) over a position's negatives (SASRec, equation 6).

    states: (B, T, d). targets: (B, T). negatives: (B, T, k). table: (num_items + 1, d). Returns a scalar.
    """
    states = _of_items(states, targets)
    positive = (states * F.embedding(targets, table)).sum(-1)
    negative = (states.unsqueeze(-2) * F.embedding(negatives, table)).sum(-1)
    return _sum_over_items(F.softplus(-positive) + F.softplus(negative).mean(-1), targets)


def generalised_binary_cross_entropy(
    states: Tensor, targets: Tensor, negatives: Tensor, table: Tensor, calibration: float
) -> Tensor:
    """gBCE (Petrov and Macdonald, RecSys 2023, equation 12): counters the overconfidence that few negatives cause.

    -(log sigma(s+)^beta + sum log(1 - sigma(s-))) / (k + 1), with the sampling rate alpha = k / (num_items - 1) and
    beta = alpha (t (1 - 1 / alpha) + 1 / alpha).

    negatives: (B, k), shared by a row's positions. calibration: t in [0, 1]; 0 is plain BCE, 1 unbiased.
    """
    positive, negative = _scores(states, targets, negatives, table)
    k = negatives.shape[-1]
    alpha = min(1.0, k / (len(table) - 2))
    beta = alpha * (calibration * (1 - 1 / alpha) + 1 / alpha)
    loss = beta * F.softplus(-positive) + F.softplus(negative).sum(-1)
    return _sum_over_items(loss / (k + 1), targets)


def sampled_softmax(states: Tensor, targets: Tensor, negatives: Tensor, table: Tensor) -> Tensor:
    """Softmax cross-entropy over the target and the row's k negatives, (B, k), drawn uniformly."""
    positive, negative = _scores(states, targets, negatives, table)
    of_all = torch.logaddexp(positive, negative.logsumexp(-1))
    return _sum_over_items(of_all - positive, targets)


def full_softmax(states: Tensor, targets: Tensor, table: Tensor) -> Tensor:
    """Softmax cross-entropy over all items, exact, without holding all scores at once."""
    flat, targets = states.flatten(0, -2), targets.flatten()
    if flat.device.type == "cpu":
        # skipping padding saves work; on a GPU the host would wait for the number of positions
        real = targets.nonzero().squeeze(1)
        flat, targets = flat.index_select(0, real), targets.index_select(0, real)
    loss: Tensor = _FullSoftmax.apply(flat, targets, table)
    return loss


class _FullSoftmax(torch.autograd.Function):
    """Computes scores, loss and gradients in chunks; forward stores the gradients, no larger than the inputs.

    For the sum of losses d/d scores = softmax - one-hot; backward scales its products with states and table.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, targets: Tensor, table: Tensor) -> Tensor:
        # low-precision autocast applies to the products only
        states = _of_items(states, targets)
        in_full = torch.promote_types(states.dtype, torch.float32)
        grad_states, grad_table = torch.zeros_like(states), torch.zeros_like(table, dtype=in_full)
        loss = torch.zeros((), dtype=in_full, device=states.device)
        items = table[1:]
        chunk = max(_FEWEST_POSITIONS, _CHUNK_ELEMENTS[states.device.type] // len(items))
        for part in range(0, len(states), chunk):
            here = slice(part, part + chunk)
            scores = (states[here] @ items.T).to(in_full)
            counts = (targets[here] > 0).to(in_full).unsqueeze(1)
            target = (targets[here] - 1).clamp(min=0).unsqueeze(1)
            log_shares = scores.log_softmax(1)
            loss -= (log_shares.gather(1, target) * counts).sum()
            grad = log_shares.exp_().scatter_add_(1, target, -torch.ones_like(counts)).mul_(counts)
            grad_states[here] = (grad @ items).to(states.dtype)
            grad_table[1:] += grad.T @ states[here]
        ctx.save_for_backward(grad_states, grad_table.to(table.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor]:
        grad_states, grad_table = ctx.saved_tensors
        return grads[0] * grad_states, None, grads[0] * grad_table


def _scores(states: Tensor, targets: Tensor, negatives: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Scores targets (B, T) and the rows' negatives (B, T, k) in at least float32, since many are summed."""
    states = _of_items(states, targets)
    positive = (states * F.embedding(targets, table)).sum(-1)
    negative = states @ F.embedding(negatives, table).transpose(-2, -1)
    return positive, negative.to(torch.promote_types(negative.dtype, torch.float32))


def _sum_over_items(loss: Tensor, targets: Tensor) -> Tensor:
    return torch.where(targets > 0, loss, 0).sum()


def _of_items(states: Tensor, targets: Tensor) -> Tensor:
    """Returns states with zeros at padding, where they may hold anything, even infinity."""
    return torch.where((targets > 0).unsqueeze(-1), states, 0)


def place_of_target(target: Tensor, others: Tensor) -> Tensor:
    """Returns how many other items rank above the target, float64 (B,), from its score (B,) and theirs (B, n).

    An item tied with m others takes their middle place: m / 2 count as above it, in any storage order. NaN scores count
    as above the target, and a NaN target is last. -inf removes an item, unless the target's score is -inf too.
    """
    target = target.unsqueeze(1)
    num_below = (others < target).sum(1)
    num_equal = (others == target).sum(1)
    return others.shape[1] - num_below - num_equal.double() / 2


def ranking_metrics(place: Tensor, cutoffs: Sequence[int]) -> Tensor:
    """Returns hit rate, NDCG and reciprocal rank at each cut-off, summed over queries: (3, len(cutoffs)) float64.

    place: (B,), from `place_of_target`. With one relevant item NDCG is 1 / log2(place + 2), and the reciprocal rank 1 /
    (place + 1), both 0 beyond the cut-off k; a hit means place <= k - 1.
    """
    place = place.double().unsqueeze(1)
    # plain numbers go to a GPU with the kernels; copying a tensor would make the host wait
    hit = torch.cat([place <= cutoff - 1 for cutoff in cutoffs], dim=1).double()
    gain = math.log(2) / torch.log(place + 2)
    return torch.stack([hit.sum(0), (hit * gain).sum(0), (hit / (place + 1)).sum(0)])


def times_recommended(scores: Tensor, cutoffs: Sequence[int]) -> Tensor:
    """Counts how often each item is among the best k of a query, at each cut-off k: (len(cutoffs), n) float64."""
    best = scores.topk(min(max(cutoffs), scores.shape[1]))
    counts = (best.values > -math.inf).double()
    times = counts.new_zeros(len(cutoffs), scores.shape[1])
    for row, cutoff in zip(times, cutoffs, strict=True):
        row.scatter_add_(0, best.indices[:, :cutoff].flatten(), counts[:, :cutoff].flatten())
    return times
