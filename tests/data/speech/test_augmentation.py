"""Tests what random augmentation does to audio, in which range, and what it depends on."""

import numpy as np
import pytest

from data.speech.augmentation import Augmentation, Augmenter, add_noise, at_duration, length_at

NOTHING = Augmentation().times(0.0)
RATE = 8000


def tone(hz: float, length: int) -> np.ndarray:
    """Returns a tone that fades in and out like an utterance."""
    time = np.arange(length)
    return (np.sin(2 * np.pi * hz / RATE * time) * np.sin(np.pi * time / length) ** 2).astype(np.float32)


def power(audio: np.ndarray) -> float:
    return float(np.mean(audio.astype(np.float64) ** 2))


@pytest.mark.parametrize("percent", [80, 93, 101, 120])
@pytest.mark.parametrize("length", [1, 99, 100, 3500, 3517])
def test_lengths_are_known_without_decoding(percent, length) -> None:
    audio = np.ones(length, np.float32)
    assert len(at_duration(audio, percent)) == length_at(length, percent) == np.ceil(length * percent / 100)
    assert at_duration(audio, percent).dtype == np.float32


@pytest.mark.parametrize("percent", [80, 97, 115])
def test_resampling_gives_the_same_sound_at_other_times(percent) -> None:
    """The reference is a sum of low tones, computed at the times of the new samples."""
    old, new = np.arange(4000.0), np.arange(length_at(4000, percent)) * (100 / percent)

    def sound(time: np.ndarray) -> np.ndarray:
        tones = sum(np.sin(2 * np.pi * hz / RATE * time + hz) for hz in (150.0, 900.0, 2700.0))
        return tones * np.sin(np.pi * time / 4000) ** 2

    np.testing.assert_allclose(at_duration(sound(old).astype(np.float32), percent), sound(new), atol=2e-4)


def test_frequencies_above_nyquist_are_removed_without_aliasing() -> None:
    """Played in 80 % of the time, 3,600 Hz becomes 4,500 Hz, which is above half of 8 kHz."""
    faster = at_duration(tone(3600, 8000), 80)
    assert power(faster) < 1e-6 * power(tone(3600, 8000))


def test_noise_has_the_requested_ratio() -> None:
    for snr_db in (0.0, 20.0):
        for length in (8000, 300_000):
            clean = tone(440, length)
            noisy = clean.copy()
            add_noise(noisy, snr_db, 9830)
            noise = (noisy - clean).astype(np.float64)
            assert 10 * np.log10(power(clean) / power(noise)) == pytest.approx(snr_db, abs=0.2)
            spectrum = np.abs(np.fft.rfft(noise)) ** 2
            bands = [band.mean() for band in np.array_split(spectrum[1:], 4)]
            np.testing.assert_allclose(bands, np.mean(bands), rtol=0.15)


def test_coloured_noise_has_low_frequencies() -> None:
    spectra = []
    for colour in (0, 2):
        audio = tone(500, 2**15)
        noise = -audio
        add_noise(audio, 0.0, 9830, colour)
        noise += audio
        assert abs(power(noise) / power(tone(500, 2**15)) - 1) < 0.25
        spectra.append(np.abs(np.fft.rfft(noise)) ** 2)
    white, low = (spectrum[:4096].sum() / spectrum.sum() for spectrum in spectra)
    assert abs(white - 0.25) < 0.02 and low > 0.9


def test_silence_stays_silent() -> None:
    audio = np.zeros(1000, np.float32)
    add_noise(audio, 10.0, 29_000)
    assert (audio == 0).all()


def test_each_augmentation_strength_changes_only_its_property() -> None:
    index = np.arange(300)
    clean = [tone(500, 1000) for _ in index]

    def changed(**strengths) -> list[np.ndarray]:
        augmenter = Augmenter(Augmentation(**{**NOTHING.__dict__, **strengths}), 40, seed=3)
        return augmenter.audio([audio.copy() for audio in clean], 1, index)

    assert all(np.array_equal(a, b) for a, b in zip(changed(), clean, strict=True))
    lengths = [len(audio) for audio in changed(speed_percent=12)]
    assert min(lengths) == 880 and max(lengths) == 1120 and len(set(lengths)) == 25
    gains = [20 * np.log10(a[500] / b[500]) for a, b in zip(changed(gain_db=6.0), clean, strict=True)]
    assert -6.01 < min(gains) < -5.8 and 5.8 < max(gains) < 6.01
    tilts = [np.median((b - a)[101:500] / b[100:499]) for a, b in zip(changed(tilt=0.2), clean, strict=True)]
    assert -0.201 < min(tilts) < -0.19 and 0.19 < max(tilts) < 0.201
    noisy = changed(noise_snr_db=(10.0, 20.0))
    ratios = [10 * np.log10(power(b) / power(a - b)) for a, b in zip(noisy, clean, strict=True)]
    assert 9 < min(ratios) < 10.5 and 19.5 < max(ratios) < 24  # low-frequency noise varies over so short a time
    assert len({audio[0] for audio in noisy}) > 290  # each utterance has its own noise


def test_lengths_agree_with_the_audio() -> None:
    augmenter = Augmenter(Augmentation(speed_percent=15), 40, seed=0)
    index, lengths = np.array([5, 0, 77]), np.array([1234, 800, 4001])
    audio = augmenter.audio([tone(300, n) for n in lengths], 2, index)
    assert [len(a) for a in audio] == augmenter.lengths(lengths, 2, index).tolist()


def test_masks_and_warps_fill_their_ranges() -> None:
    strength = Augmentation(warp=0.1, num_freq_masks=3, freq_mask=0.2, num_time_masks=2, time_mask=0.1)
    drawn = Augmenter(strength, num_mels=40, seed=0).for_front_end(0, np.arange(3000))
    assert drawn["warp"].shape == (3000,) and drawn["warp"].dtype == np.float32
    assert 0.9 <= drawn["warp"].min() < 0.901 and 1.099 < drawn["warp"].max() <= 1.1
    first, width = drawn["freq_masks"][..., 0], drawn["freq_masks"][..., 1]
    assert first.shape == (3000, 3) and first.dtype == np.int64
    assert set(width.ravel()) == set(range(9)) and first.min() == 0 and (first + width).max() == 40
    start, share = drawn["time_masks"][..., 0], drawn["time_masks"][..., 1]
    assert start.shape == (3000, 2) and start.dtype == np.float32
    assert share.min() >= 0 and 0.099 < share.max() <= 0.1 and 0.99 < (start + share).max() <= 1


def test_changes_depend_only_on_seed_epoch_and_sample() -> None:
    def changed(index: list[int], epoch: int = 1, seed: int = 0) -> list:
        augmenter = Augmenter(Augmentation(), 40, seed)
        audio = augmenter.audio([tone(100 * (i + 1), 2000) for i in index], epoch, np.array(index))
        numbers = augmenter.for_front_end(epoch, np.array(index))
        return [[audio[row], *(values[row] for values in numbers.values())] for row in range(len(index))]

    together = changed([2, 0, 5])
    for row, i in enumerate([2, 0, 5]):
        for one, other in zip(changed([i])[0], together[row], strict=True):
            assert np.array_equal(one, other)
    for others in (changed([2], epoch=2), changed([2], seed=1)):
        assert not any(np.array_equal(a, b) for a, b in zip(others[0], together[0], strict=True))


def test_the_factor_scales_every_strength() -> None:
    whole = Augmentation()
    assert whole.times(1.0) == whole
    half = whole.times(0.5)
    assert (half.speed_percent, half.gain_db, half.warp) == (
        round(whole.speed_percent / 2),
        whole.gain_db / 2,
        whole.warp / 2,
    )
    assert np.allclose(np.subtract(half.noise_snr_db, whole.noise_snr_db), 20 * np.log10(2))
    none = Augmenter(whole.times(0.0), num_mels=40, seed=0)
    sound = np.linspace(-1, 1, 100, dtype=np.float32)
    (same,) = none.audio([sound.copy()], 3, np.array([5]))
    drawn = none.for_front_end(3, np.array([5]))
    assert np.array_equal(same, sound) and drawn["warp"].tolist() == [1.0]
    assert not drawn["freq_masks"][..., 1].any() and not drawn["time_masks"][..., 1].any()
