"""Random numbers that are a function of (seed, epoch, sample index, stream) and of nothing else.

A counter-based generator has no state: it hashes a counter. A sample therefore gets the same numbers whichever
process or worker draws them, in whatever batch, before or after a resume. The hash is the finaliser of SplitMix64
(Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).

Streams keep draws for different purposes independent: give each purpose its own number.
"""

import math

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
"""2^64 / golden ratio, odd: its multiples are a sequence of distinct, well spread counters."""
_MASK = 2**64 - 1
_FLOAT_STEP = np.float32(2.0**-24)
"""A float32 represents every multiple of this in [0, 1] exactly."""


def random_bits(seed: int, epoch: int, index: np.ndarray, num: int, stream: int = 0) -> np.ndarray:
    """Uniform 64-bit words, (len(index), num) uint64.

    seed, epoch, stream: integers; their low 64 bits count.
    index: (n,) integers, the samples' ids. Row i depends on index[i] only.
    """
    key = 0
    for part in (seed, epoch, stream):
        key = _mix_scalar((key + GOLDEN) ^ part)
    sample_keys = mix(index.astype(np.uint64) * GOLDEN ^ key)
    counters = np.arange(1, num + 1, dtype=np.uint64) * GOLDEN
    return mix(sample_keys[:, None] + counters)


def uniform(seed: int, epoch: int, index: np.ndarray, shape: tuple[int, ...], stream: int = 0) -> np.ndarray:
    """Uniform numbers in [0, 1), (len(index), *shape) float32, multiples of 2^-24."""
    bits = random_bits(seed, epoch, index, math.prod(shape), stream)
    return _unit_interval(bits >> 40).reshape(len(index), *shape)


def normal(seed: int, epoch: int, index: np.ndarray, shape: tuple[int, ...], stream: int = 0) -> np.ndarray:
    """Standard normal numbers, (len(index), *shape) float32, by the Box-Muller transform; |z| < 5.8."""
    num = math.prod(shape)
    num_pairs = (num + 1) // 2
    bits = random_bits(seed, epoch, index, num_pairs, stream)
    # One word makes one pair: 24 bits for the radius, 24 others for the angle.
    radius = _unit_interval(bits >> 40)
    radius += _FLOAT_STEP  # (0, 1], for the logarithm
    np.log(radius, out=radius)
    radius *= np.float32(-2.0)
    np.sqrt(radius, out=radius)
    angle = _unit_interval(bits & 0xFFFFFF)
    angle *= np.float32(2.0 * np.pi)
    z = np.empty((len(index), 2 * num_pairs), np.float32)
    np.multiply(radius, np.cos(angle), out=z[:, :num_pairs])
    np.multiply(radius, np.sin(angle), out=z[:, num_pairs:])
    return z[:, :num].reshape(len(index), *shape)


def _unit_interval(bits24: np.ndarray) -> np.ndarray:
    # By way of int32, which the processor converts to float32 several numbers at a time.
    unit = bits24.astype(np.int32).astype(np.float32)
    unit *= _FLOAT_STEP
    return unit


def mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 on uint64, in place."""
    x ^= x >> 30
    x *= 0xBF58476D1CE4E5B9
    x ^= x >> 27
    x *= 0x94D049BB133111EB
    x ^= x >> 31
    return x


def _mix_scalar(x: int) -> int:
    """The same on one number; Python's integers are quicker here than an array of one."""
    x &= _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31
