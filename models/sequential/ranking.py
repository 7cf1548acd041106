"""Training losses and metrics of next-item prediction.

The score of item i is the dot product of a state, (..., d), with row i of the item table. Item 0 is padding and is
never scored. Each loss is a sum over positions whose target is not padding.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}
"""Number of scores that `full_softmax` computes at a time: few on a CPU, to fit into its cache, and many on a GPU."""
_FEWEST_POSITIONS = 16
"""Minimum number of positions per chunk, since each chunk reads the whole table."""


def binary_cross_entropy(states: Tensor, targets: Tensor, negatives: Tensor, table: Tensor) -> Tensor:
    """Returns the sum over positions of softplus(-s+) + mean of softplus(s-) (SASRec, equation 6).

    s+ is the score of a position's target, and s- are the scores of its negatives.

    states: (B, T, d). targets: (B, T). negatives: (B, T, k). table: (num_items + 1, d).
    """
    states = _of_items(states, targets)
    positive = (states * F.embedding(targets, table)).sum(-1)
    negative = (states.unsqueeze(-2) * F.embedding(negatives, table)).sum(-1)
    return _sum_over_items(F.softplus(-positive) + F.softplus(negative).mean(-1), targets)


def generalised_binary_cross_entropy(
    states: Tensor, targets: Tensor, negatives: Tensor, table: Tensor, calibration: float
) -> Tensor:
    """Returns gBCE (Petrov and Macdonald, RecSys 2023, equation 12), which corrects BCE for the sampling of negatives.

    The loss of a position is -(log sigma(s+)^beta + sum log(1 - sigma(s-))) / (k + 1), where s+ is the score of its
    target, and s- are the scores of its negatives. The sampling rate alpha = k / (num_items - 1) determines
    beta = alpha (t (1 - 1 / alpha) + 1 / alpha).

    negatives: (B, k), shared by all positions of a sequence. calibration: t, from 0 (plain BCE) to 1 (full correction).
    """
    positive, negative = _scores(states, targets, negatives, table)
    k = negatives.shape[-1]
    alpha = min(1.0, k / (len(table) - 2))
    beta = alpha * (calibration * (1 - 1 / alpha) + 1 / alpha)
    loss = beta * F.softplus(-positive) + F.softplus(negative).sum(-1)
    return _sum_over_items(loss / (k + 1), targets)


def sampled_softmax(states: Tensor, targets: Tensor, negatives: Tensor, table: Tensor) -> Tensor:
    """Returns softmax cross-entropy over the target and the negatives.

    negatives: (B, k), shared by all positions of a sequence.
    """
    positive, negative = _scores(states, targets, negatives, table)
    of_all = torch.logaddexp(positive, negative.logsumexp(-1))
    return _sum_over_items(of_all - positive, targets)


def full_softmax(states: Tensor, targets: Tensor, table: Tensor) -> Tensor:
    """Returns softmax cross-entropy over all items, without storing all scores at once."""
    flat, targets = states.flatten(0, -2), targets.flatten()
    if flat.device.type == "cpu":
        # skips padding; on a GPU, this would make the host wait for the number of positions
        real = targets.nonzero().squeeze(1)
        flat, targets = flat.index_select(0, real), targets.index_select(0, real)
    loss: Tensor = _FullSoftmax.apply(flat, targets, table)
    return loss


class _FullSoftmax(torch.autograd.Function):
    """Computes the loss and its gradients in chunks of positions.

    The forward pass computes the gradients of states and table, and the backward pass scales these gradients.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, targets: Tensor, table: Tensor) -> Tensor:
        # autocast lowers only the precision of the matrix products
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
    """Returns scores of targets, (B, T), and scores of negatives, (B, T, k), in at least float32."""
    states = _of_items(states, targets)
    positive = (states * F.embedding(targets, table)).sum(-1)
    negative = states @ F.embedding(negatives, table).transpose(-2, -1)
    return positive, negative.to(torch.promote_types(negative.dtype, torch.float32))


def _sum_over_items(loss: Tensor, targets: Tensor) -> Tensor:
    return torch.where(targets > 0, loss, 0).sum()


def _of_items(states: Tensor, targets: Tensor) -> Tensor:
    """Replaces states at padding, which may be infinite or NaN, with zeros."""
    return torch.where((targets > 0).unsqueeze(-1), states, 0)


def place_of_target(target: Tensor, others: Tensor) -> Tensor:
    """Returns the number of other items ranked above the target, float64 (B,).

    target: (B,), score of the target. others: (B, n), scores of the other items. An item with the target's score counts
    as 1/2. If the score of the item or of the target is NaN, the item counts as above the target. An item with score
    -inf counts only if the target's score is -inf or NaN.
    """
    target = target.unsqueeze(1)
    num_below = (others < target).sum(1)
    num_equal = (others == target).sum(1)
    return others.shape[1] - num_below - num_equal.double() / 2


def ranking_metrics(place: Tensor, cutoffs: Sequence[int]) -> Tensor:
    """Returns hit rate, NDCG and reciprocal rank at each cut-off, summed over queries: (3, len(cutoffs)) float64.

    place: (B,), result of `place_of_target`. At cut-off k, a query with place <= k - 1 is a hit, with NDCG
    1 / log2(place + 2) and reciprocal rank 1 / (place + 1). For other queries all three metrics are 0.
    """
    place = place.double().unsqueeze(1)
    # compares with Python numbers, because copying a tensor of cut-offs to a GPU would make the host wait
    hit = torch.cat([place <= cutoff - 1 for cutoff in cutoffs], dim=1).double()
    gain = math.log(2) / torch.log(place + 2)
    return torch.stack([hit.sum(0), (hit * gain).sum(0), (hit / (place + 1)).sum(0)])


def times_recommended(scores: Tensor, cutoffs: Sequence[int]) -> Tensor:
    """Counts, for each cut-off k and item, the queries with the item in their top k: (len(cutoffs), n) float64."""
    best = scores.topk(min(max(cutoffs), scores.shape[1]))
    counts = (best.values > -math.inf).double()
    times = counts.new_zeros(len(cutoffs), scores.shape[1])
    for row, cutoff in zip(times, cutoffs, strict=True):
        row.scatter_add_(0, best.indices[:, :cutoff].flatten(), counts[:, :cutoff].flatten())
    return times
