"""Decodes and resamples sound files."""

import functools
import importlib
import io
import math
import struct

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from trainer.common.errors import UserError

SUFFIXES = (".wav", ".flac", ".mp3", ".ogg", ".opus")

MIN_RATE, MAX_RATE = 1_000, 384_000
"""Lowest and highest accepted sample rate, in Hz."""

FULL_SCALE = 32768
"""Divisor that scales 16-bit samples to [-1, 1)."""
MOST_SAMPLES = 1 << 31
"""Largest number of samples in a compressed recording; as 16-bit integers they take 4 GiB."""
_LOUDEST = 2.0**31
"""Largest accepted absolute value of a sample; some files store 32-bit integers as floats."""

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_UNKNOWN_SIZE = 0x7FFFF000
"""A WAV file that declares at least this size, in bytes, is a stream, whose samples extend to the end of the file."""
_NUM_LOBES = 24
"""Number of zeros of the sinc on each side of the resampling filter."""
_ROLL_OFF = 0.96
"""Frequency at which the filter halves the amplitude, as a share of the lower Nyquist frequency."""
_KAISER_BETA = 9.0
"""Parameter of the Kaiser window, for about 90 dB between passband and stopband."""


class UnreadableAudio(ValueError):
    """Raised for a damaged file or an unknown format; the message does not name the file."""


def decode(content: bytes, name: str) -> tuple[np.ndarray, int]:
    """Decodes a sound file; returns mono samples, (length,) float32 in [-1, 1], and the sample rate in Hz.

    Decodes WAV with integers of 8 to 32 bits or floats of 32 or 64 bits; other codecs, FLAC, MP3 and Ogg need the
    package soundfile. Channels are averaged. Floats may exceed [-1, 1] until `within_full_scale` scales them. name:
    file name, for its suffix and messages.

    Raises UnreadableAudio, or UserError if soundfile is needed and not installed.
    """
    if not content:
        raise UnreadableAudio("is an empty file")
    is_riff = content[:4] == b"RIFF" and content[8:12] == b"WAVE"
    if not is_riff and content[:4] != b"RF64" and name.lower().endswith(".wav"):
        raise UnreadableAudio("is damaged: it does not start like a wav file")
    samples, rate = (_decode_wav(content) if is_riff else None) or _decode_by_soundfile(content, name)
    if not MIN_RATE <= rate <= MAX_RATE:
        raise UnreadableAudio(f"has a sample rate of {rate} Hz, but {MIN_RATE} to {MAX_RATE} Hz are supported")
    if not np.isfinite(samples).all():
        raise UnreadableAudio("has samples that are not finite numbers")
    if (peak := float(np.abs(samples).max(initial=0))) > _LOUDEST:
        raise UnreadableAudio(f"has samples up to {peak:.3g}, but full scale is 1.0")
    return samples.mean(axis=1, dtype=np.float32), rate


def within_full_scale(samples: np.ndarray) -> tuple[np.ndarray, bool]:
    """Scales samples down to [-1, 1] if any sample is outside; also returns whether the samples were scaled.

    An excess of less than a 16-bit step is ignored.
    """
    peak = np.abs(samples).max(initial=0)
    return (samples / peak, True) if peak > 1 + 1 / FULL_SCALE else (samples, False)


def to_int16(samples: np.ndarray) -> np.ndarray:
    """Converts samples in [-1, 1] to 16-bit integers, clipped; restores the integers of 16-bit files exactly."""
    return np.clip(np.rint(samples * np.float32(FULL_SCALE)), -FULL_SCALE, FULL_SCALE - 1).astype(np.int16)


def resample(samples: np.ndarray, from_rate: int, to_rate: int) -> np.ndarray:
    """Resamples audio: (length,) -> (ceil(length * to_rate / from_rate),) float32.

    Sample k of the result is the sound at time k / to_rate s. Interpolates with a Kaiser-windowed sinc (Smith, "Digital
    Audio Resampling Home Page", CCRMA). The filter's gain differs from 1 by at most 1e-4 below 0.84 times the lower
    Nyquist frequency, and is about 1e-4 or less above 1.08 times it.
    """
    if from_rate == to_rate:
        return samples.astype(np.float32)
    divisor = math.gcd(from_rate, to_rate)
    up, down = to_rate // divisor, from_rate // divisor
    length = -(-len(samples) * up // down)
    kernels = _kernels(up, down)
    reach = kernels.shape[1] // 2
    padded = np.pad(samples.astype(np.float32), reach)
    result = np.empty(length, np.float32)
    # output samples `up` apart are `down` input samples apart and share a kernel
    for phase in range(min(up, length)):
        windows = sliding_window_view(padded[phase * down // up :], kernels.shape[1])[::down]
        result[phase::up] = windows[: len(range(phase, length, up))] @ kernels[phase]
    return result


@functools.lru_cache(maxsize=4)
def _kernels(up: int, down: int) -> np.ndarray:
    """Returns filters for output samples 0 to up - 1: (up, odd length) float32.

    A filter is centred on the input sample at or before its output sample; its weights add up to 1.
    """
    cutoff = _ROLL_OFF * min(1.0, up / down)  # as a share of the source's Nyquist frequency
    reach = math.ceil(_NUM_LOBES / cutoff)
    after = np.arange(up)[:, None] * down % up / up  # offset from the input sample at or before each output sample
    lobes = (np.arange(-reach, reach + 1) - after) * cutoff
    inside = np.clip(1 - (lobes / _NUM_LOBES) ** 2, 0, None)
    weights = np.sinc(lobes) * np.i0(_KAISER_BETA * np.sqrt(inside)) * (inside > 0)
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


def _decode_wav(content: bytes) -> tuple[np.ndarray, int] | None:
    """Decodes a WAV file to samples, (length, channels) float32, and the sample rate; returns None for other codecs.

    Replaces Python's module wave, which lacks floats and, before Python 3.12, the extensible header.
    """
    chunks = _riff_chunks(content)
    header, data = chunks.get(b"fmt ", b""), chunks.get(b"data")
    if len(header) < 16 or data is None:
        raise UnreadableAudio("is damaged: the wav file has no header or no samples")
    codec, num_channels, rate, _, _, bits = struct.unpack("<HHIIHH", header[:16])
    if codec == _EXTENSIBLE and len(header) >= 26:
        codec = int.from_bytes(header[24:26], "little")
    if not num_channels:
        raise UnreadableAudio("is damaged: the wav file has no channels")
    width = bits // 8
    if (codec, bits) not in [(_PCM, 8), (_PCM, 16), (_PCM, 24), (_PCM, 32), (_FLOAT, 32), (_FLOAT, 64)]:
        return None
    whole = len(data) - len(data) % (width * num_channels)
    samples = _floats(data[:whole], width) if codec == _FLOAT else _from_integers(data[:whole], width)
    return samples.reshape(-1, num_channels), rate


def _riff_chunks(content: bytes) -> dict[bytes, bytes]:
    """Returns the first chunk of each name. Raises UnreadableAudio if the samples are incomplete."""
    chunks: dict[bytes, bytes] = {}
    position = 12
    while position + 8 <= len(content):
        name, size = struct.unpack_from("<4sI", content, position)
        start = position + 8
        if name == b"data" and len(content) - start < size < _UNKNOWN_SIZE:
            raise UnreadableAudio("is truncated in the middle of its samples")
        chunks.setdefault(name, content[start : start + size])
        position = start + size + size % 2
    return chunks


def _floats(data: bytes, width: int) -> np.ndarray:
    return np.frombuffer(data, f"<f{width}").astype(np.float32)


def _from_integers(data: bytes, width: int) -> np.ndarray:
    """Converts little-endian integers of `width` bytes to float32 in [-1, 1); single bytes are unsigned."""
    if width == 1:
        return (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    words = np.zeros((len(data) // width, 4), np.uint8)
    words[:, 4 - width :] = np.frombuffer(data, np.uint8).reshape(-1, width)  # the low bytes stay 0
    return words.view("<i4")[:, 0].astype(np.float32) / np.float32(2**31)


def _decode_by_soundfile(content: bytes, name: str) -> tuple[np.ndarray, int]:
    try:
        # imported by name, since it is optional and untyped
        soundfile = importlib.import_module("soundfile")
    except (ImportError, OSError) as error:  # OSError if libsndfile is missing
        raise UserError(
            f"{name}: this audio format requires the package soundfile, which cannot be imported ({error}); run `pip "
            "install soundfile`, or convert the files to wav"
        ) from None
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as sound:
            if len(sound) * sound.channels > MOST_SAMPLES:
                raise UnreadableAudio(f"claims to have more than {MOST_SAMPLES:,} samples")
            return sound.read(dtype="float32", always_2d=True), sound.samplerate
    except (RuntimeError, MemoryError):  # the header of a damaged file may claim any number of samples
        raise UnreadableAudio("is damaged or has an unknown format") from None
