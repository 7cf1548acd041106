"""Random numbers as a pure function of (seed, epoch, sample index, stream).

A counter-based generator has no state: it hashes a counter. A sample therefore gets the same numbers in any process,
worker or batch, before and after a resume. The hash is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014).

Use a different stream number for each purpose, so that the random numbers are independent.

If the index is a tensor, the results are tensors on the same device. Tensors and NumPy arrays contain the same random
words and uniform numbers, bit for bit. Normal numbers may differ by up to 1e-6, because devices round differently, so
do not base decisions on normal numbers.
"""

import math

import numpy as np

from trainer.loading.arrays import Array, arange_like, cast, empty_beside, namespace, on_host

GOLDEN = 0x9E3779B97F4A7C15
"""2^64 / golden ratio, rounded to an odd number; its multiples modulo 2^64 are distinct and well spread."""
_MASK = 2**64 - 1
_FLOAT_STEP = np.float32(2.0**-24)
"""Distance between neighbouring uniform numbers; float32 represents its multiples in [0, 1] exactly."""


def random_bits(seed: int, epoch: int, index: Array, num: int, stream: int = 0) -> Array:
    """Returns uniform 64-bit words of shape (len(index), num): uint64, or int64 with the same bits for a tensor index.

    seed, epoch, stream: integers, of which the low 64 bits are used. index: (n,) integer sample ids. Row i depends on
    index[i] but on no other entry of index.
    """
    key = 0
    for part in (seed, epoch, stream):
        key = _mix_scalar((key + GOLDEN) ^ part)
    sample_keys = mix(_words(index) * _word(GOLDEN, index) ^ _word(key, index))
    counters = _words(arange_like(num, index) + 1) * _word(GOLDEN, index)
    return mix(sample_keys[:, None] + counters)


def uniform(seed: int, epoch: int, index: Array, shape: tuple[int, ...], stream: int = 0) -> Array:
    """Returns uniform float32 numbers in [0, 1), multiples of 2^-24, of shape (len(index), *shape)."""
    bits = random_bits(seed, epoch, index, math.prod(shape), stream)
    return _unit_interval(high_bits(bits, 24)).reshape(len(index), *shape)


def below(bits: Array, limit: Array) -> Array:
    """Maps random 64-bit words (B, n) to uniform int64 numbers in [0, limit), with a bias of at most limit / 2^64.

    limit: integers below 2^31, of shape (B,).
    """
    limit = limit[:, None]
    if on_host(bits):
        return (bits % limit.astype(np.uint64)).astype(np.int64)
    # PyTorch has no unsigned remainder of 64-bit words, so take the remainder of the upper half first.
    return ((high_bits(bits, 32) % limit << 32) + (bits & 0xFFFFFFFF)) % limit


def normal(seed: int, epoch: int, index: Array, shape: tuple[int, ...], stream: int = 0) -> Array:
    """Returns standard normal float32 numbers in (-5.8, 5.8), of shape (len(index), *shape) (Box-Muller transform)."""
    num, xp = math.prod(shape), namespace(index)
    num_pairs = (num + 1) // 2
    bits = random_bits(seed, epoch, index, num_pairs, stream)
    # Each word gives a pair of numbers: 24 bits determine the radius, and 24 other bits the angle.
    radius = _unit_interval(high_bits(bits, 24))
    radius += _FLOAT_STEP  # (0, 1], for the logarithm
    xp.log(radius, out=radius)
    radius *= np.float32(-2.0)
    xp.sqrt(radius, out=radius)
    angle = _unit_interval(bits & 0xFFFFFF)
    angle *= np.float32(2.0 * np.pi)
    z = empty_beside(radius, (len(index), 2 * num_pairs))
    xp.multiply(radius, xp.cos(angle), out=z[:, :num_pairs])
    xp.multiply(radius, xp.sin(angle), out=z[:, num_pairs:])
    return z[:, :num].reshape(len(index), *shape)


def _unit_interval(bits24: Array) -> Array:
    # converts to int32 first, because the conversion from int32 to float32 is vectorised
    unit = cast(cast(bits24, "int32"), "float32")
    unit *= _FLOAT_STEP
    return unit


def mix(x: Array) -> Array:
    """Applies the finaliser of SplitMix64 to words in place, and returns them."""
    if on_host(x):  # calls no helper functions, which would dominate the time for few words
        x ^= x >> 30
        x *= 0xBF58476D1CE4E5B9
        x ^= x >> 27
        x *= 0x94D049BB133111EB
        x ^= x >> 31
        return x
    x ^= high_bits(x, 34)
    x *= _word(0xBF58476D1CE4E5B9, x)
    x ^= high_bits(x, 37)
    x *= _word(0x94D049BB133111EB, x)
    x ^= high_bits(x, 33)
    return x


def high_bits(words: Array, num: int) -> Array:
    """Returns the upper `num` bits of 64-bit words, as numbers from 0 to 2^num - 1."""
    shifted = words >> 64 - num
    return shifted if on_host(words) else shifted & (1 << num) - 1  # PyTorch's shifts are signed


def _words(index: Array) -> Array:
    return index.astype(np.uint64) if on_host(index) else cast(index, "int64")


def _word(value: int, beside: Array) -> int:
    return value if on_host(beside) or value < 2**63 else value - 2**64


def _mix_scalar(x: int) -> int:
    """Applies the finaliser of SplitMix64 to a Python integer; this is faster than `mix` for a single word."""
    x &= _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31
