"""Hides items from rankings, and finds the items with the highest scores."""

import torch
from torch import Tensor


def highest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns the k highest scores of each row and their columns, (B, k) each, by descending score, then by column.

    In `torch.topk`, by contrast, the order of equal scores may depend on k. scores: (B, n), n < 2 ** 24.
    """
    values, columns = scores.topk(k)
    last = values[:, -1:]
    from_end = torch.arange(scores.shape[1], 0, -1, dtype=torch.float32, device=scores.device)
    equal_last = from_end.masked_fill(scores != last, 0).topk(k).indices
    is_above = ~(values <= last)  # also NaN
    place = torch.arange(k, device=scores.device) - is_above.sum(1, keepdim=True)
    columns = torch.where(is_above, columns, equal_last.gather(1, place.clamp(min=0))).sort(dim=1).values
    values, order = scores.gather(1, columns).sort(dim=1, descending=True, stable=True)
    return values, columns.gather(1, order)


def hide(scores: Tensor, items: Tensor) -> None:
    """Sets the scores of the given items to -inf in place.

    scores: (B, num_items). items: (B, S) int64, padded with num_items.
    """
    num_items = scores.shape[1]
    hidden = torch.where(items < num_items, -torch.inf, torch.inf).to(scores.dtype)
    scores.scatter_reduce_(1, items.clamp(max=num_items - 1), hidden, "amin")
