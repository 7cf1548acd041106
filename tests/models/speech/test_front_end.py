"""Tests log-mel features against explicit sums, and that padding, the batch and chunks change nothing."""

import math

import numpy as np
import pytest
import torch

from models.speech.front_end import FLOOR, LOWEST_HZ, LogMel

RATE = 8000


def speech_like(*lengths: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns noise of varying loudness, (B, S), with zeros behind each end, and num_samples, (B,)."""
    rng = np.random.default_rng(seed)
    audio = np.zeros((len(lengths), max(lengths)))
    for row, length in zip(audio, lengths, strict=True):
        row[:length] = 0.1 * rng.normal(size=length) * (1.1 + np.sin(np.arange(length) / 300))
    return torch.from_numpy(audio).to(torch.get_default_dtype()), torch.tensor(lengths)


def front_end(normalise="utterance", num_mels=20) -> LogMel:
    module = LogMel(RATE, num_mels, normalise=normalise)
    if normalise != "utterance":
        module.fit_statistics([speech_like(9000, 5000, seed=1)])
    return module


def mel(hz: float) -> float:
    return 2595 * math.log10(1 + hz / 700)


def slow_log_mel(audio: np.ndarray, num_mels: int) -> np.ndarray:
    """Returns features, (T, F), from explicit sums."""
    window = np.array([0.5 - 0.5 * math.cos(2 * math.pi * n / 200) for n in range(200)])
    window /= math.sqrt(sum(window**2))
    edges = np.linspace(mel(LOWEST_HZ), mel(RATE / 2), num_mels + 2)
    weights = np.zeros((num_mels, 129))
    for m, (left, centre, right) in enumerate(zip(edges[:-2], edges[1:-1], edges[2:], strict=True)):
        for k in range(129):
            at = mel(k * RATE / 256)
            weights[m, k] = max(0.0, min((at - left) / (centre - left), (right - at) / (right - centre)))
    turns = np.exp(-2j * np.pi * np.outer(np.arange(129), np.arange(200)) / 256)
    starts = range(0, len(audio) - 199, 80)
    power = [np.abs(turns @ (audio[start : start + 200] * window)) ** 2 for start in starts]
    return np.log(np.maximum(np.array(power) @ weights.T, FLOOR))


def test_log_mel_equals_explicit_sums(double_precision) -> None:
    audio, _ = speech_like(1500)
    audio[:, 700:1100] = 0  # silence, at the floor
    expected = slow_log_mel(audio[0].numpy(), 20)
    assert (expected == math.log(FLOOR)).any() and (expected > math.log(FLOOR)).any()
    np.testing.assert_allclose(front_end().log_mel(audio)[0].numpy(), expected, rtol=0, atol=1e-10)


def test_power_spectrum_equals_scipys(double_precision) -> None:
    signal = pytest.importorskip("scipy.signal")
    audio, _ = speech_like(2000)
    module = front_end()
    frames = audio[0].unfold(0, 200, 80).numpy()
    _, power = signal.periodogram(frames, window="hann", nfft=256, detrend=False, scaling="density", fs=1.0)
    power[:, 1:-1] /= 2  # scipy doubles one-sided powers
    expected = np.log(np.maximum(power @ module.filters.numpy(), FLOOR))
    np.testing.assert_allclose(module.log_mel(audio)[0].numpy(), expected, rtol=0, atol=1e-10)


def test_white_noise_has_its_variance_at_every_frequency() -> None:
    noise = 0.3 * torch.randn(1, 200_000, generator=torch.Generator().manual_seed(0))
    module = front_end()
    level = module.log_mel(noise).exp().mean(dim=(0, 1)) / module.filters.sum(dim=0)
    torch.testing.assert_close(level, torch.full((20,), 0.09), rtol=0.05, atol=0)


def test_a_tone_falls_in_the_bin_of_its_frequency() -> None:
    module = front_end(num_mels=40)
    edges = np.linspace(mel(LOWEST_HZ), mel(RATE / 2), 42)
    for hz in (300, 1000, 3000):
        tone = torch.sin(torch.arange(4000) * (2 * math.pi * hz / RATE))
        loudest = module.log_mel(tone[None])[0].mean(dim=0).argmax()
        assert loudest == np.abs(edges[1:-1] - mel(hz)).argmin()


@pytest.mark.parametrize("num_samples", [1, 199, 200, 279, 280, 1639, 1640])
@pytest.mark.parametrize("normalise", ["utterance", "fixed", "running"])
def test_padding_and_other_samples_have_no_effect(double_precision, normalise, num_samples) -> None:
    audio, lengths = speech_like(num_samples, 3000)
    masks = torch.tensor([[[3, 4]]] * 2), torch.tensor([[[0.25, 0.5]]] * 2)
    module, warp = front_end(normalise), torch.tensor([1.1, 0.9])
    together, num_frames = module(audio, lengths, warp, *masks)
    alone, num_alone = module(audio[:1, :num_samples], lengths[:1], warp[:1], masks[0][:1], masks[1][:1])
    assert num_frames.tolist() == [max(1, (num_samples - 200) // 80 + 1), 36]
    assert num_alone == num_frames[0] == alone.shape[1]
    torch.testing.assert_close(together[:1, : alone.shape[1]], alone, rtol=0, atol=1e-12)
    assert (together[0, alone.shape[1] :] == 0).all() and alone.isfinite().all()


def test_an_utterance_is_normalised_by_its_own_frames(double_precision) -> None:
    features, lengths = front_end()(*speech_like(8000, 2500))
    for row, length in zip(features, lengths.tolist(), strict=True):
        torch.testing.assert_close(row[:length].mean(dim=0), torch.zeros(20))
        torch.testing.assert_close(row[:length].square().mean(), torch.tensor(1.0), rtol=1e-4, atol=0)


def test_fixed_statistics_cover_all_frames_of_the_batches(double_precision) -> None:
    batches = [speech_like(9000, 5000, seed=1), speech_like(2000, 300, 4000, seed=2)]
    module = LogMel(RATE, 20, normalise="fixed")
    module.fit_statistics(batches)
    frames = np.concatenate(
        [slow_log_mel(row[:n].numpy(), 20) for audio, lengths in batches for row, n in zip(audio, lengths, strict=True)]
    )
    np.testing.assert_allclose(module.mean, frames.mean(axis=0), rtol=1e-9)
    np.testing.assert_allclose(module.std, [np.sqrt(frames.var(axis=0).mean())], rtol=1e-6)
    again = LogMel(RATE, 20, normalise="running")
    again.load_state_dict(module.state_dict())
    assert torch.equal(again.std, module.std)


def test_running_normalisation_uses_the_frames_so_far(double_precision) -> None:
    module = front_end("running")
    audio, lengths = speech_like(6000, seed=3)
    features = module(audio, lengths)[0][0].numpy()
    mean, std = module.mean.numpy(), module.std.numpy()
    raw = module.log_mel(audio)[0].numpy()
    for t in (0, 1, 2, 30, len(raw) - 1):
        # The statistics cover the frames so far, and 100 training frames that lie one deviation from the mean.
        known = np.concatenate([np.repeat([mean - std, mean + std], 50, axis=0), raw[: t + 1]])
        deviation = np.sqrt(known.var(axis=0).mean())
        np.testing.assert_allclose(features[t], (raw[t] - known.mean(axis=0)) / deviation, atol=1e-9)


@pytest.mark.parametrize("chunk", [7, 79, 80, 81, 200, 800, 5000])
@pytest.mark.parametrize("normalise", ["fixed", "running"])
def test_chunks_give_the_same_result_as_the_whole(normalise, chunk) -> None:
    module = front_end(normalise)
    audio, lengths = speech_like(2357, 2357)
    whole, _ = module(audio, lengths)
    state, parts = None, []
    for start in range(0, audio.shape[1], chunk):
        part, state = module.stream(audio[:, start : start + chunk], state)
        parts.append(part)
        # A frame comes out as soon as its last sample is in.
        assert sum(p.shape[1] for p in parts) == max(0, (min(start + chunk, 2357) - 200) // 80 + 1)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-5)


def test_whole_utterances_cannot_be_streamed() -> None:
    with pytest.raises(ValueError, match="streaming supports"):
        front_end().stream(torch.zeros(1, 400))


def test_masks_hide_only_their_ranges() -> None:
    module = front_end()
    audio, lengths = speech_like(5000, 2000)
    plain, num_frames = module(audio, lengths)
    freq_masks = torch.tensor([[[0, 3], [10, 2]], [[19, 5], [4, 0]]])
    time_masks = torch.tensor([[[0.1, 0.2], [0.0, 0.0]], [[0.9, 0.5], [0.0, 0.05]]])
    masked, _ = module(audio, lengths, None, freq_masks, time_masks)
    expected = plain.clone()
    for row in range(2):
        for start, width in freq_masks[row].tolist():
            expected[row, :, start : start + width] = 0
        for start, width in (time_masks[row] * num_frames[row]).tolist():
            for t in range(plain.shape[1]):
                if start <= t < start + width:
                    expected[row, t] = 0
    assert torch.equal(masked, expected) and not torch.equal(masked, plain)


def test_a_warp_moves_formants_by_its_factor_and_keeps_the_highest_frequency() -> None:
    module = front_end(num_mels=40)
    time = torch.arange(8000) / RATE

    def tone(hz: float) -> torch.Tensor:
        return torch.sin(2 * math.pi * hz * time)[None]

    for factor in (0.85, 1.2):
        warp = torch.tensor([factor])
        for hz in (500, 1500, 2200):
            moved = module.log_mel(tone(hz), warp).mean(dim=1).argmax()
            assert abs(moved - module.log_mel(tone(hz * factor)).mean(dim=1).argmax()) <= 1
        highest = module.log_mel(tone(3990), warp).mean(dim=1).argmax()
        assert highest == module.log_mel(tone(3990)).mean(dim=1).argmax() == 39
    torch.testing.assert_close(module.log_mel(tone(700), torch.ones(1)), module.log_mel(tone(700)), rtol=0, atol=1e-3)


def test_the_loudness_of_an_utterance_does_not_matter() -> None:
    audio, lengths = speech_like(8000)
    quiet, loud = (front_end()(gain * audio, lengths)[0] for gain in (0.1, 1.0))
    torch.testing.assert_close(quiet, loud, rtol=0, atol=1e-3)


def test_autocast_does_not_lower_the_precision() -> None:
    audio, lengths = speech_like(4000)
    module = front_end()
    plain, _ = module(audio, lengths)
    with torch.autocast("cpu", torch.bfloat16):
        inside, _ = module(audio, lengths, torch.ones(1))
    assert inside.dtype == torch.float32
    torch.testing.assert_close(inside, plain, rtol=0, atol=1e-3)


@pytest.mark.parametrize("settings", [{"num_mels": 200}, {"normalise": "batch"}, {"hop_s": 0.03}, {"hop_s": 0.0}])
def test_impossible_settings_are_refused(settings) -> None:
    with pytest.raises(ValueError):
        LogMel(**{"sample_rate": RATE, "num_mels": 40, **settings})


# --- masking -----------------------------------------------------------------------------------------------------


def test_masking_is_white_noise_of_known_power():
    """The masking has the power of such noise in a long recording."""
    rng = torch.Generator().manual_seed(0)
    audio = 0.3 * torch.sin(torch.arange(80000) * 0.2)[None].double() + 0.01 * torch.randn(1, 80000, generator=rng)
    num_samples, noise_db = torch.tensor([80000]), 10.0
    noise = (
        torch.randn(1, 80000, generator=rng, dtype=torch.float64)
        * audio.square().mean().sqrt()
        * 10 ** (-noise_db / 20)
    )
    front_end = LogMel(8000, 40, masking_db=noise_db).double()
    masking = front_end.masking_noise(audio, num_samples, None)
    expected = front_end.log_mel(audio + noise).exp().mean(1)
    torch.testing.assert_close(front_end.log_mel(audio, noise=masking).exp().mean(1), expected, rtol=0.1, atol=0)
    other = LogMel(8000, 40, masking_db=4.0).double()
    features, _ = front_end(audio, num_samples)
    torch.testing.assert_close(other(audio, num_samples, masking_db=torch.tensor([6.0]))[0], features)


def test_masking_noise_hides_room_noise():
    rng = torch.Generator().manual_seed(0)
    time = torch.arange(16000)
    speech = torch.where((time // 2000) % 2 == 0, torch.sin(time * 0.3), torch.zeros(16000))[None]
    room = speech + 0.003 * torch.randn(1, 16000, generator=rng)  # 47 dB below
    num_samples = torch.tensor([16000])
    change = {}
    for masking_db in (20.0, 80.0):
        front_end = LogMel(8000, 40, masking_db=masking_db)
        quiet, noisy = (front_end(audio, num_samples)[0] for audio in (speech, room))
        change[masking_db] = float((quiet - noisy).abs().max())
    assert change[20.0] < 0.1 < 1 < change[80.0]
