"""Sound files to read."""

import io
import wave

import numpy as np
import pytest


def wav(samples, rate=8000):
    """int16 samples, (length,) or (length, channels), as the content of a wav."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())
    return buffer.getvalue()


@pytest.fixture
def noise():
    """Makes int16 noise, other in each call: (length,)."""
    rng = np.random.default_rng(0)
    return lambda length=80: rng.integers(-9_000, 9_000, length).astype(np.int16)
