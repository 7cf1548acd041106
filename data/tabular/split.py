"""Which rows of a table are held out."""

import numpy as np

from trainer.loading.counter_random import random_bits


def stratified_hold_out(labels: np.ndarray, share: float, seed: int, stream: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The rows to learn from and those held out, (k,) int64 each, ascending; of each class the share, at random.

    A row's chance is a function of (seed, stream, its place). The numbers held out of the classes are rounded so that
    they add up to the rounded share of all rows as nearly as can be, but of a class with two rows or more at least one
    is held out and one kept; of a class with one row none is held out.

    labels: (n,) int64 >= 0. share: 0 < share < 1.
    """
    sizes = np.bincount(labels)
    num_held = _rounded(sizes, share)
    chance = random_bits(seed, 0, np.arange(len(labels)), 1, stream)[:, 0]
    order = np.lexsort((chance, labels))
    place_in_class = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    held = np.zeros(len(labels), bool)
    held[order] = place_in_class < num_held[labels[order]]
    return np.flatnonzero(~held), np.flatnonzero(held)


def _rounded(sizes: np.ndarray, share: float) -> np.ndarray:
    """By largest remainders."""
    exact = share * sizes
    num_held = np.floor(exact).astype(np.int64)
    num_missing = round(share * int(sizes.sum())) - int(num_held.sum())
    num_held[np.argsort(num_held - exact, kind="stable")[:num_missing]] += 1
    return np.where(sizes > 1, np.clip(num_held, 1, np.maximum(sizes - 1, 1)), 0)
