"""Recommenders without gradient training, which score items from a user's history with tables computed by `fitting`.

Items are numbered from 1. A history is in time order if times are known, and is padded at the end with zeros.
"""

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.common.errors import UserError

MOST_NEIGHBOURS = 200
"""Maximum number of neighbours kept for each item."""
MOST_ITEMS_OF_EASE = 8000
"""Maximum number of items for EASE; at this number, one core computes its dense matrix (256 MB) in a minute."""
_TIE_BREAK = 1e-9
"""Weight of popularity in scores, to order items that would otherwise have equal scores."""


class SimpleRecommender(nn.Module):
    """Scores all items by their popularity. Subclasses score items with additional buffers. `fill` sets buffers.

    popularity: (num_items + 1,), number of training users of each item. recency: (maxlen,), weights of the items in a
    history, from the last item to the first.
    """

    popularity: Tensor
    recency: Tensor

    def __init__(self, num_items: int, maxlen: int) -> None:
        super().__init__()
        self.num_items = num_items
        self.register_buffer("popularity", torch.zeros(num_items + 1))
        self.register_buffer("recency", torch.ones(maxlen))

    def fill(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copies a result of `fitting.candidates` to the buffers, and sets missing columns of a table to 0."""
        buffers = dict(self.named_buffers())
        for name, array in arrays.items():
            buffer, values = buffers[name], torch.tensor(array)
            if buffer.dim() == 2:
                buffer.zero_()[:, : values.shape[1]] = values
            else:
                buffer.copy_(values)

    def forward(self, items: Tensor, length: Tensor, times: Tensor | None = None) -> Tensor:
        """Returns scores (B, num_items + 1), with -inf for item 0, which is padding.

        items: (B, T) int64. length: (B,), number of items in each history. times: ignored.
        """
        with torch.autocast(items.device.type, enabled=False):  # full precision, because many scores are close
            scores = self._scores(items, length)
        return torch.cat([torch.full_like(scores[:, :1], -torch.inf), scores[:, 1:]], dim=1)

    def _scores(self, items: Tensor, length: Tensor) -> Tensor:
        # shape[0], because len() would become a constant in an exported program
        return self.popularity.expand(items.shape[0], -1)

    def _history(self, items: Tensor, length: Tensor) -> Tensor:
        """Returns each item's total recency weight, (B, num_items + 1), which is 0 for items outside the history."""
        age = length.unsqueeze(1) - 1 - torch.arange(items.shape[1], device=items.device)
        weights = torch.where(age >= 0, self.recency[age.clamp(0, len(self.recency) - 1)], 0)
        row = torch.arange(items.shape[0], device=items.device).unsqueeze(1).expand_as(items)
        counted = self.popularity.new_zeros(items.shape[0], self.num_items + 1)
        return counted.index_put((row, items), weights, accumulate=True)


class NeighbourTable(SimpleRecommender):
    """Scores each item by the strengths of its neighbours in the user's history.

    Neighbours are items with similar sets of users (itemknn), or items that often closely precede the item (rules).

    neighbours, strengths: (num_items + 1, k), strongest first; unused entries have strength 0.
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
    """Linear item-item model in closed form (Steck, "Embarrassingly shallow autoencoders", WWW 2019).

    weights: (num_items + 1, num_items + 1); [i, j] is what item i, if it is in the history, adds to the score
    of item j.
    """

    weights: Tensor

    def __init__(self, num_items: int, maxlen: int) -> None:
        """Creates the model. Raises UserError if there are more than MOST_ITEMS_OF_EASE items."""
        if num_items > MOST_ITEMS_OF_EASE:
            raise UserError(
                f"--model ease: has a weight for each pair of items, so it supports at most {MOST_ITEMS_OF_EASE:,} "
                f"items, but the data have {num_items:,}; use --model itemknn"
            )
        super().__init__(num_items, maxlen)
        self.register_buffer("weights", torch.zeros(num_items + 1, num_items + 1))

    def _scores(self, items: Tensor, length: Tensor) -> Tensor:
        return self._history(items, length) @ self.weights


SIMPLE_MODELS: Mapping[str, type[SimpleRecommender]] = {
    "popularity": SimpleRecommender, "rules": NeighbourTable, "itemknn": NeighbourTable, "ease": EASE,
}  # fmt: skip
