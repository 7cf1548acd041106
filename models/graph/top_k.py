"""Metrics that compare a user's k highest-scored items with the held-out items."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers.item_scores import hide, highest

_OFFICIAL_LIST = 100


class TopK(NamedTuple):
    """Metrics per cut-off k, summed over users: (len(ks),) float64 each.

    A positive is a held-out item of the user, and a hit is a positive in the first k places of the ranking.
    """

    recall: Tensor
    """Number of hits / number of positives."""
    precision: Tensor
    """Number of hits / k."""
    hit: Tensor
    """1 if there is a hit, else 0."""
    ndcg: Tensor
    """DCG / the highest possible DCG, which has positives in the first min(k, number of positives) places."""
    ndcg_official: Tensor
    """NDCG as in KGAT's code, which is too high: its ideal ranking omits positives beyond the first 100 items."""


def top_k(scores: Tensor, positives: Tensor, seen: Tensor, ks: Sequence[int]) -> TopK:
    """Ranks each user's unseen items by score, then by index; sets the scores of seen items to -inf in place.

    scores: (B, num_items). positives: (B, P) int64. seen: (B, S) int64. Each row of positives and seen contains
    distinct items, padded with num_items. Users without positives add 0 to all sums. DCG sums 1 / log2(place + 2) over
    the hits, with places numbered from 0.
    """
    num_items = scores.shape[1]
    hide(scores, seen)
    length = max(_OFFICIAL_LIST, *ks)
    values, items = highest(scores, min(length, num_items))
    relevant = scores.new_zeros(len(scores), num_items + 1, dtype=torch.bool).scatter_(1, positives, True)
    hits = relevant[:, :num_items].gather(1, items) & (values > -torch.inf)
    hits = F.pad(hits.double(), (0, length - hits.shape[1]))
    num_positives = (positives < num_items).sum(1)

    cutoffs, within, gains, best = _constants(tuple(ks), length, scores.device)
    num_hits, dcg = hits @ within, hits @ gains

    def ndcg(num_relevant: Tensor) -> Tensor:
        ideal = best[torch.minimum(num_relevant.unsqueeze(1), cutoffs)]
        return torch.where(ideal > 0, dcg / ideal, 0).sum(0)

    return TopK(
        recall=(num_hits / num_positives.clamp(min=1).unsqueeze(1)).sum(0),
        precision=(num_hits / cutoffs).sum(0),
        hit=(num_hits > 0).double().sum(0),
        ndcg=ndcg(num_positives),
        ndcg_official=ndcg(hits[:, :_OFFICIAL_LIST].sum(1).long()),
    )


@lru_cache(maxsize=32)
def _constants(ks: tuple[int, ...], length: int, device: torch.device) -> tuple[Tensor, ...]:
    """Returns the constant tensors cutoffs, within, gains and best, which are cached and must not be changed.

    cutoffs: (len(ks),) int64. within: (length, len(ks)) float64, 1 at the places within each cut-off, else 0.
    gains: `within` times each place's DCG gain. best: (length + 1,) float64, DCG of n hits in the first n places.
    """
    with torch.inference_mode(False), torch.no_grad():
        gains = 1 / torch.arange(2, length + 2, dtype=torch.float64).log2()
        cutoffs = torch.tensor(ks)
        within = (torch.arange(length).unsqueeze(1) < cutoffs).double()
        found = cutoffs, within, within * gains.unsqueeze(1), F.pad(gains.cumsum(0), (1, 0))
        return tuple(tensor.to(device) for tensor in found)
