"""Recommenders without learned weights: tables that are counted, or solved for, and read for a user's history.

Histories are left-aligned, in the order of time where there is one: items from 1, zeros after them.
"""

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.common.errors import UserError

MOST_NEIGHBOURS = 200
"""Items that lead to an item, the strongest ones."""
MOST_ITEMS_OF_EASE = 8000
"""Its weights are a matrix of all items by all items: 256 MB then, and a minute of one core to solve for."""
_TIE_BREAK = 1e-9
"""Times the number of users who have an item: what no item of a history leads to is ranked by that alone."""


class SimpleRecommender(nn.Module):
    """Scores all items by buffers alone, which `fill` gives it. By itself: by popularity, whatever the history.

    popularity: (num_items + 1,), how many users have each item in training. recency: (maxlen,), what the last item of a
    history counts, the one before it, and so on; no history is longer.
    """

    popularity: Tensor
    recency: Tensor

    def __init__(self, num_items: int, maxlen: int) -> None:
        super().__init__()
        self.num_items = num_items
        self.register_buffer("popularity", torch.zeros(num_items + 1))
        self.register_buffer("recency", torch.ones(maxlen))

    def fill(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Takes the buffers of `fitting.candidates`; a table with fewer columns leaves the others empty."""
        buffers = dict(self.named_buffers())
        for name, array in arrays.items():
            buffer, values = buffers[name], torch.tensor(array)
            if buffer.dim() == 2:
                buffer.zero_()[:, : values.shape[1]] = values
            else:
                buffer.copy_(values)

    def forward(self, items: Tensor, length: Tensor, times: Tensor | None = None) -> Tensor:
        """items: (B, T) int64. length: (B,). times: not read. Returns (B, num_items + 1), -inf for the padding."""
        with torch.autocast(items.device.type, enabled=False):  # since ranks are close
            scores = self._scores(items, length)
        return torch.cat([torch.full_like(scores[:, :1], -torch.inf), scores[:, 1:]], dim=1)

    def _scores(self, items: Tensor, length: Tensor) -> Tensor:
        """(B, num_items + 1)."""
        # By its shape: torch.export would fix its len.
        return self.popularity.expand(items.shape[0], -1)

    def _history(self, items: Tensor, length: Tensor) -> Tensor:
        """What each item counts: (B, num_items + 1), 0 for those that are not in the history."""
        age = length.unsqueeze(1) - 1 - torch.arange(items.shape[1], device=items.device)
        weights = torch.where(age >= 0, self.recency[age.clamp(0, len(self.recency) - 1)], 0)
        row = torch.arange(items.shape[0], device=items.device).unsqueeze(1).expand_as(items)
        counted = self.popularity.new_zeros(items.shape[0], self.num_items + 1)
        return counted.index_put((row, items), weights, accumulate=True)


class NeighbourTable(SimpleRecommender):
    """By what leads to an item: of item-kNN what the same users have, of sequential rules what soon goes before it.

    neighbours, strengths: (num_items + 1, k), of each item, the strongest first; a strength of 0 is none.
    """

    neighbours: Tensor
    strengths: Tensor

    def __init__(self, num_items: int, maxlen: int) -> None:
        super().__init__(num_items, maxlen)
        size = num_items + 1, min(MOST_NEIGHBOURS, num_items)
        self.register_buffer("neighbours", torch.zeros(size, dtype=torch.int32))
        self.register_buffer("strengths", torch.zeros(size))

    def _scores(self, items: Tensor, length: Tensor) -> Tensor:
        history = self._history(items, length).T.contiguous()
        led_to = F.embedding_bag(self.neighbours, history, per_sample_weights=self.strengths, mode="sum").T
        return led_to + _TIE_BREAK * self.popularity


class EASE(SimpleRecommender):
    """A linear model of all items by all items in closed form (Steck, "Embarrassingly shallow autoencoders", WWW 2019).

    weights: (num_items + 1, num_items + 1), of the row's item for the column's.
    """

    weights: Tensor

    def __init__(self, num_items: int, maxlen: int) -> None:
        """Raises UserError for more items than such a matrix is good for."""
        if num_items > MOST_ITEMS_OF_EASE:
            raise UserError(
                f"--model ease: has a weight for each pair of items, and {num_items:,} items are more than the "
                f"{MOST_ITEMS_OF_EASE:,} it takes; take --model itemknn"
            )
        super().__init__(num_items, maxlen)
        self.register_buffer("weights", torch.zeros(num_items + 1, num_items + 1))

    def _scores(self, items: Tensor, length: Tensor) -> Tensor:
        return self._history(items, length) @ self.weights


SIMPLE_MODELS: Mapping[str, type[SimpleRecommender]] = {
    "popularity": SimpleRecommender, "rules": NeighbourTable, "itemknn": NeighbourTable, "ease": EASE,
}  # fmt: skip
