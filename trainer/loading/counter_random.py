"""Random numbers that are a function of (seed, epoch, sample index, stream) and of nothing else.

A counter-based generator has no state: it hashes a counter. A sample therefore gets the same numbers whichever
process or worker draws them, in whatever batch, before or after a resume. The hash is the finaliser of SplitMix64
(Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).

Streams keep draws for different purposes independent: give each purpose its own number.

Where the indices are a tensor, so are the numbers, on its device: words and uniform numbers with the same bits, normal
ones within 1e-6, because devices round logarithms and cosines in their own ways. So no decision hangs on a normal one.
"""

import math

import numpy as np

from trainer.loading.arrays import Array, arange_like, cast, empty_beside, namespace, on_host

GOLDEN = 0x9E3779B97F4A7C15
"""2^64 / golden ratio, odd: its multiples are a sequence of distinct, well spread counters."""
_MASK = 2**64 - 1
_FLOAT_STEP = np.float32(2.0**-24)
"""A float32 represents every multiple of this in [0, 1] exactly."""


def random_bits(seed: int, epoch: int, index: Array, num: int, stream: int = 0) -> Array:
    """Uniform 64-bit words, (len(index), num) uint64; as tensors int64 of the same bits, in which torch computes.

    seed, epoch, stream: integers; their low 64 bits count.
    index: (n,) integers, the samples' ids. Row i depends on index[i] only.
    """
    key = 0
    for part in (seed, epoch, stream):
        key = _mix_scalar((key + GOLDEN) ^ part)
    sample_keys = mix(_words(index) * _word(GOLDEN, index) ^ _word(key, index))
    counters = _words(arange_like(num, index) + 1) * _word(GOLDEN, index)
    return mix(sample_keys[:, None] + counters)


def uniform(seed: int, epoch: int, index: Array, shape: tuple[int, ...], stream: int = 0) -> Array:
    """Uniform numbers in [0, 1), (len(index), *shape) float32, multiples of 2^-24."""
    bits = random_bits(seed, epoch, index, math.prod(shape), stream)
    return _unit_interval(high_bits(bits, 24)).reshape(len(index), *shape)


def below(bits: Array, limit: Array) -> Array:
    """Uniform words (B, n) to uniform numbers 0 <= r < limit (B,), int64; off from uniform by limit / 2^64 at most.

    limit: below 2^31.
    """
    limit = limit[:, None]
    if on_host(bits):
        return (bits % limit.astype(np.uint64)).astype(np.int64)
    # torch has no remainder of unsigned words: of the upper half first.
    return ((high_bits(bits, 32) % limit << 32) + (bits & 0xFFFFFFFF)) % limit


def normal(seed: int, epoch: int, index: Array, shape: tuple[int, ...], stream: int = 0) -> Array:
    """Standard normal numbers, (len(index), *shape) float32, by the Box-Muller transform; |z| < 5.8."""
    num, xp = math.prod(shape), namespace(index)
    num_pairs = (num + 1) // 2
    bits = random_bits(seed, epoch, index, num_pairs, stream)
    # One word makes one pair: 24 bits for the radius, 24 others for the angle.
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
    # By way of int32, which the processor converts to float32 several numbers at a time.
    unit = cast(cast(bits24, "int32"), "float32")
    unit *= _FLOAT_STEP
    return unit


def mix(x: Array) -> Array:
    """The finaliser of SplitMix64 on words, in place."""
    if on_host(x):  # a batch has few words, and a call takes as long as some of them
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
    """The upper num bits of words, as numbers from 0 to 2^num - 1."""
    shifted = words >> 64 - num
    return shifted if on_host(words) else shifted & (1 << num) - 1  # torch shifts the sign in


def _words(index: Array) -> Array:
    return index.astype(np.uint64) if on_host(index) else cast(index, "int64")


def _word(value: int, beside: Array) -> int:
    return value if on_host(beside) or value < 2**63 else value - 2**64


def _mix_scalar(x: int) -> int:
    """The finaliser on one number; Python's integers are quicker here than an array of one."""
    x &= _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31
