"""A permutation that is computed where it is needed: no table of it is kept.

A Feistel network on a grid of rows and columns of nearly equal numbers that holds at least n cells, with cycle walking:
a cell beyond n goes through the network again until it is below n. (Black and Rogaway, "Ciphers with arbitrary finite
domains", CT-RSA 2002: the generalised Feistel cipher.) A network is a bijection whatever its round function is. This
one's is the SplitMix64 generator (see counter_random.py).
"""

import math

import numpy as np

from trainer.loading.counter_random import GOLDEN, mix

NUM_ROUNDS = 16
"""Keys of a good permutation. Four look random for millions of samples, but a handful of them takes twelve and more."""


def keyed_permutation(round_keys: np.ndarray, num_samples: int, positions: np.ndarray) -> np.ndarray:
    """The samples at these positions of a permutation of range(num_samples): (m,) int64.

    round_keys: (NUM_ROUNDS,) uint64; any other even number of them makes a permutation too, but a worse one.
    positions: (m,) int64, each in [0, num_samples); 1 <= num_samples < 2^62.
    Takes time and memory proportional to m, whatever num_samples is.
    """
    cells = _network(round_keys, num_samples, positions.astype(np.uint64))
    while len(outside := np.flatnonzero(cells >= num_samples)) > 0:  # fewer than rows
        cells[outside] = _network(round_keys, num_samples, cells[outside])
    return cells.view(np.int64)


def _network(round_keys: np.ndarray, num_samples: int, cells: np.ndarray) -> np.ndarray:
    """Permutes the cells of the smallest grid that is as good as square and holds the samples."""
    assert len(round_keys) % 2 == 0, "rows and columns are back in their places after an even number of rounds"
    num_rows = math.isqrt(num_samples - 1) + 1
    num_columns = -(-num_samples // num_rows)
    # Each round shifts `one` by a function of `other`, and they change places.
    one, other = cells // num_columns, cells % num_columns
    size, other_size = num_rows, num_columns
    for key in round_keys:
        one += mix(other * GOLDEN + key) >> 1  # 63 bits, so that the sum does not overflow
        one %= size
        one, other, size, other_size = other, one, other_size, size
    return one * num_columns + other
