import io
import struct
import wave

import numpy as np
import pytest


def wav(samples, rate=8000):
    """Returns the content of a WAV file with int16 samples of shape (length,) or (length, channels)."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())
    return buffer.getvalue()


def riff(codec, bits, channels, data, rate=8000, extension=b"", size=None):
    """Returns the content of a WAV file, built byte by byte."""
    frame = channels * bits // 8
    header = struct.pack("<HHIIHH", codec, channels, rate, rate * frame, frame, bits) + extension
    chunks = b"fmt " + struct.pack("<I", len(header)) + header
    chunks += b"LIST" + struct.pack("<I", 3) + b"abc\0"  # odd, so one byte of padding
    chunks += b"data" + struct.pack("<I", len(data) if size is None else size) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


@pytest.fixture
def noise():
    """Returns a function that returns new int16 noise of shape (length,) at each call."""
    rng = np.random.default_rng(0)
    return lambda length=80: rng.integers(-9_000, 9_000, length).astype(np.int16)
