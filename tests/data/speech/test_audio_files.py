import importlib.util
import io
import struct

import numpy as np
import pytest

from data.speech.audio_files import UnreadableAudio, decode, resample, to_int16, within_full_scale
from tests.data.speech.conftest import riff, wav
from trainer.common.errors import UserError

has_soundfile = importlib.util.find_spec("soundfile") is not None


def test_16_bit_audio_round_trips_exactly():
    samples = np.arange(-(2**15), 2**15).astype(np.int16)
    decoded, rate = decode(wav(samples, 16_000), "a.wav")
    assert rate == 16_000 and decoded.dtype == np.float32
    assert np.array_equal(to_int16(decoded), samples)
    assert np.array_equal(decoded, samples / 2**15)


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 4])
def test_all_widths_of_integers_are_decoded(num_bytes):
    bits = 8 * num_bytes
    values = [-(2 ** (bits - 1)), -1, 0, 1, 2 ** (bits - 2), 2 ** (bits - 1) - 1]
    if num_bytes == 1:  # WAV stores 8 bits as unsigned
        data = bytes(value + 128 for value in values)
    else:
        data = b"".join(value.to_bytes(num_bytes, "little", signed=True) for value in values)
    decoded, _ = decode(riff(1, bits, 1, data), "a.wav")
    assert np.array_equal(decoded, np.array([value / 2 ** (bits - 1) for value in values], np.float32))


@pytest.mark.parametrize("bits", [32, 64])
def test_floats_are_decoded_exactly(bits):
    values = np.array([-1, -0.25, 0, 1e-3, 0.5, 1.5], f"<f{bits // 8}")
    decoded, _ = decode(riff(3, bits, 1, values.tobytes()), "a.wav")
    assert np.array_equal(decoded, values.astype(np.float32))
    assert to_int16(decoded).tolist() == [-32768, -8192, 0, 33, 16384, 32767]


def test_an_extensible_header_is_read():
    extension = struct.pack("<HHI", 22, 16, 0) + struct.pack("<H", 1) + bytes(14)
    decoded, _ = decode(riff(0xFFFE, 16, 1, struct.pack("<3h", 1, -2, 3), extension=extension), "a.wav")
    assert to_int16(decoded).tolist() == [1, -2, 3]


def test_channels_are_averaged():
    decoded, _ = decode(wav(np.array([[100, 300], [-8, 8], [32767, 32767]])), "a.wav")
    assert to_int16(decoded).tolist() == [200, 0, 32767]


def test_a_piped_file_is_read_to_its_end():
    data = struct.pack("<3h", 1, -2, 3)
    for size in (0x7FFFF000, 0xFFFFFFFF):
        assert to_int16(decode(riff(1, 16, 1, data, size=size), "a.wav")[0]).tolist() == [1, -2, 3]


GOOD = riff(1, 16, 1, bytes(20))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty file"),
        (b"no sound at all", "does not start like a wav"),
        (GOOD[:-2], "is truncated in the middle"),
        (GOOD[:30], "has no header or no samples"),
        (riff(1, 16, 0, b""), "has no channels"),
        (riff(1, 16, 1, bytes(20), rate=0), "a sample rate of 0 Hz"),
        (riff(3, 32, 1, struct.pack("<f", float("nan"))), "not finite"),
        (riff(3, 32, 1, struct.pack("<f", 1e30)), "has samples up to 1e.30, but full scale is 1"),
    ],
)
def test_a_damaged_file_is_reported_as_unreadable(content, says):
    with pytest.raises(UnreadableAudio, match=says):
        decode(content, "a.WAV")


def test_a_wav_file_without_samples_has_length_zero():
    assert len(decode(riff(1, 16, 1, b""), "a.wav")[0]) == 0


@pytest.mark.parametrize(
    ("peak", "is_loud"), [(0.5, False), (1.0, False), (1.00001, False), (1.5, True), (20000.0, True)]
)
def test_sound_beyond_full_scale_is_scaled_down_and_not_cut_off(peak, is_loud):
    samples = np.float32(peak) * np.array([1, -0.5, 0.25, -1], np.float32)
    scaled, was_loud = within_full_scale(samples)
    assert was_loud == is_loud
    np.testing.assert_allclose(scaled, samples / peak if is_loud else samples, rtol=1e-6)


def test_a_file_truncated_anywhere_is_reported():
    content = riff(1, 24, 2, bytes(24))
    for length in range(len(content)):
        with pytest.raises(UnreadableAudio):
            decode(content[:length], "a.wav")


@pytest.mark.skipif(has_soundfile, reason="soundfile is installed")
@pytest.mark.parametrize(("name", "content"), [("a.flac", b"fLaC"), ("a.wav", riff(7, 8, 1, bytes(4)))])
def test_other_formats_without_soundfile_say_what_to_install(name, content):
    with pytest.raises(UserError, match=f"{name}: .*pip install soundfile"):
        decode(content, name)


@pytest.mark.skipif(not has_soundfile, reason="needs the package soundfile")
@pytest.mark.parametrize("claimed", [b"\xff\xff\xff\xff", b"\x10\0\0\0"])
def test_a_header_that_claims_too_many_samples_is_refused(claimed, monkeypatch):
    import soundfile

    monkeypatch.setattr("data.speech.audio_files.MOST_SAMPLES", 1 << 27)
    soundfile.write(buffer := io.BytesIO(), np.zeros(100, np.float32), 16_000, format="FLAC")
    content = bytearray(buffer.getvalue())
    assert content[22:26] == (100).to_bytes(4, "big")
    content[22:26] = claimed
    with pytest.raises(UnreadableAudio, match="claims to have more than 134,217,728 samples"):
        decode(bytes(content), "a.flac")


@pytest.mark.skipif(not has_soundfile, reason="needs the package soundfile")
@pytest.mark.parametrize(("form", "subtype"), [("FLAC", "PCM_16"), ("WAV", "ULAW"), ("OGG", None), ("MP3", None)])
def test_other_formats_are_decoded_by_soundfile(form, subtype):
    import soundfile

    tone = np.sin(np.arange(16_000) / 16_000 * 2 * np.pi * 440).astype(np.float32) / 2
    buffer = io.BytesIO()
    soundfile.write(buffer, np.stack([tone, tone], axis=1), 16_000, format=form, subtype=subtype)
    decoded, rate = decode(buffer.getvalue(), f"a.{form.lower()}")
    assert rate == 16_000
    tolerance = 2e-5 if form == "FLAC" else 0.05
    assert np.abs(decoded[2_000:14_000] - tone[2_000:14_000]).max() < tolerance or form == "MP3"  # MP3 shifts it
    assert abs(np.sqrt(np.mean(decoded[2_000:14_000] ** 2)) - 0.5 / np.sqrt(2)) < 0.01
    with pytest.raises(UnreadableAudio, match="damaged"):
        decode(b"nothing of the kind", f"a.{form.lower()}.flac")


# --- resampling --------------------------------------------------------------------------------------------------

RATES = [(16_000, 8_000), (8_000, 16_000), (44_100, 16_000), (22_050, 16_000), (48_000, 16_000), (11_025, 8_000)]


def resampled_slowly(samples, from_rate, to_rate):
    """Sums in float64 what each sample adds to each result."""
    cutoff = 0.96 * min(1, to_rate / from_rate)
    results = []
    for k in range(-(-len(samples) * to_rate // from_rate)):
        # Samples beyond the ends are 0, but their weights count in the normalisation.
        around = np.arange(-400, len(samples) + 400)
        scaled = (around - k * from_rate / to_rate) * cutoff
        window = np.where(np.abs(scaled) < 24, np.i0(9 * np.sqrt(np.clip(1 - (scaled / 24) ** 2, 0, None))), 0)
        weights = np.sinc(scaled) * window
        results.append(weights[400:-400] @ samples / weights.sum())
    return np.array(results)


@pytest.mark.parametrize(("from_rate", "to_rate"), RATES)
@pytest.mark.parametrize("length", [0, 1, 7, 300])
def test_resampling_equals_the_slow_sum(from_rate, to_rate, length):
    samples = np.random.default_rng(length).standard_normal(length).astype(np.float32)
    fast, slow = resample(samples, from_rate, to_rate), resampled_slowly(samples, from_rate, to_rate)
    assert fast.shape == slow.shape and fast.dtype == np.float32
    assert np.abs(fast - slow).max(initial=0) < 5e-6


@pytest.mark.parametrize(("from_rate", "to_rate"), RATES)
def test_tones_keep_their_frequency_without_aliasing(from_rate, to_rate):
    old, new = (np.arange(rate // 2) / rate for rate in (from_rate, to_rate))
    nyquist = min(from_rate, to_rate) / 2
    inner = slice(to_rate // 50, -to_rate // 50)
    for frequency in (0.01 * nyquist, 0.5 * nyquist, 0.84 * nyquist):
        tone = resample(np.sin(2 * np.pi * frequency * old), from_rate, to_rate)
        assert np.abs(tone - np.sin(2 * np.pi * frequency * new))[inner].max() < 1e-4
    if to_rate < from_rate:
        too_high = np.sin(2 * np.pi * 1.08 * nyquist * old)
        assert np.abs(resample(too_high, from_rate, to_rate))[inner].max() < 1e-4


def test_resampling_to_the_same_rate_changes_nothing():
    samples = np.random.default_rng(0).standard_normal(50).astype(np.float32)
    assert np.array_equal(resample(samples, 16_000, 16_000), samples)
