"""How well the classes of query rows are ranked."""

import torch
from torch import Tensor

_TIE = 1e-6
"""Equal rows have equal scores but for rounding, which must not decide between them."""


def area_under_curve(scores: Tensor, targets: Tensor) -> Tensor:
    """Of each problem the mean over classes of the area under the ROC curve, one class against the rest: (B,) float64.

    The share of pairs of a row of the class and another one in which the first has the higher score of the class; ties
    (differences up to 1e-6) count half. Classes that no row, or every row, is of do not count; NaN where none is left.

    scores: (B, Q, C), probabilities for example. targets: (B, Q) int64, -1 for rows that do not count.
    """
    areas, num_counted = scores.new_zeros(2, len(scores), dtype=torch.float64)
    for c in range(scores.shape[2]):
        positive, negative = (targets == c).double(), ((targets != c) & (targets >= 0)).double()
        of_class = scores[:, :, c]
        above = of_class.unsqueeze(2) - of_class.unsqueeze(1)
        won = (above > _TIE).double() + (above.abs() <= _TIE).double() / 2
        wins = torch.einsum("bi,bij,bj->b", positive, won, negative)
        num_pairs = positive.sum(1) * negative.sum(1)
        areas += torch.where(num_pairs > 0, wins / num_pairs, 0.0)
        num_counted += num_pairs > 0
    return areas / num_counted
