"""Classes from the units of a causal model, and which rows are context."""

import torch
import torch.nn.functional as F
from torch import Tensor

from data.tabular.prior.randomness import TableRandom


def draw_num_classes(random: TableRandom, most: int) -> Tensor:
    """Two in half of the tables, otherwise any number up to `most`: (G, 1) int64."""
    return torch.where(random.chance(0.5, 1), 2, random.integer(2, most, 1))


def classes_by_rank(random: TableRandom, latent: Tensor, num_classes: Tensor, most: int) -> Tensor:
    """latent: (G, T). Classes are its intervals between quantiles, of random shares: (G, T) int64."""
    num_rows = latent.shape[1]
    # Normalised powers of exponential numbers: power 1 is uniform over all shares, 0 makes all equal.
    shares = (-(1 - random.uniform(most)).log() + 1e-3).log().mul(random.between(0, 1.5, 1)).exp()
    shares = shares * (torch.arange(most) < num_classes)
    position = shares.cumsum(1)[:, :-1] / shares.sum(1, keepdim=True) * num_rows
    is_bound = torch.arange(1, most) < num_classes
    bounds = latent.sort(1).values.gather(1, position.long().clamp(1, num_rows - 1))
    return torch.searchsorted(bounds.masked_fill(~is_bound, float("inf")), latent, right=True)


def dense_labels(labels: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Renumbers the classes that occur, keeping their order: labels (G, T), and how many there are, (G,)."""
    occurs = F.one_hot(labels, most).amax(1)
    return (occurs.cumsum(1) - 1).gather(1, labels), occurs.sum(1)


def permuted_labels(random: TableRandom, labels: Tensor, num_classes: Tensor, most: int) -> Tensor:
    """Gives the classes of most tables a random order; num_classes: (G,)."""
    key = random.uniform(most) + torch.arange(most).ge(num_classes[:, None])
    permutation = key.argsort(dim=1, stable=True)
    permutation = torch.where(random.chance(0.3, 1), torch.arange(most), permutation)
    return permutation.gather(1, labels)


def row_order(random: TableRandom, labels: Tensor, most: int) -> Tensor:
    """The rows of each table shuffled, one of each class in front, so that the context has every class: (G, T)."""
    is_first = F.one_hot(labels, most).cumsum(1).gather(2, labels[..., None])[..., 0] == 1
    key = random.uniforms(labels.shape[1]) - is_first.float()
    return key.argsort(dim=1, stable=True)
