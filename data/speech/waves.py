"""Augments the audio of a whole batch on a device, as `augmentation` does for single recordings on the CPU.

Audio is (B, S) float32, padded with zeros; GPU and CPU results differ by less than -100 dB. Lengths and other
numbers per row are arrays (B,) on the CPU, which `here` (`Movable.here`) copies to the device.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data.speech.augmentation import NOISE_LENGTH, Changes, Noise, from_db, hundreds, length_at

Here = Callable[[np.ndarray], Tensor]


def chirp_z(values: Tensor, period: Tensor, sign: int, num_out: int) -> Tensor:
    """Returns the sums over n of values[n] exp(sign 2 pi i n k / period), for k from 0: (B, num_out) complex64.

    values: (B, S), real or complex. period: (B, 1) int64. Since n k = (n^2 + k^2 - (k - n)^2) / 2, the sums are
    convolutions with chirps. Fourier transforms of one length compute the sums for all periods. (Bluestein, "A linear
    filtering approach to the computation of discrete Fourier transform", IEEE Transactions on Audio and
    Electroacoustics 18(4), 1970.)
    """
    num_in = values.shape[1]
    size = 1 << (num_in + num_out - 2).bit_length()
    n = torch.arange(max(num_in, num_out), device=values.device)
    angle = (n * n % (2 * period)).float() * (sign * torch.pi / period)
    chirp = torch.polar(torch.ones_like(angle), angle)
    between = chirp.new_zeros(len(chirp), size - num_out - num_in + 1)
    against = torch.cat([chirp[:, :num_out], between, chirp[:, 1:num_in].flip(1)], dim=1).conj_physical()
    spectrum = torch.fft.fft(values * chirp[:, :num_in], size) * torch.fft.fft(against)
    return torch.fft.ifft(spectrum)[:, :num_out] * chirp[:, :num_out]


def at_durations(audio: Tensor, length: np.ndarray, percent: np.ndarray, width: int, here: Here) -> Tensor:
    """Resamples rows to percentages of their durations, like `augmentation.at_duration`; returns (B, width)."""
    if (percent == 100).all():
        return F.pad(audio, (0, width - audio.shape[1]))
    periods = np.array([100 * hundreds(each) for each in length.tolist()])
    old, new, end = here(np.stack([periods, percent * periods // 100, length_at(length, percent)]))[..., None]
    # each bin of a real signal counts twice, except the first bin and the bin at half the new rate, if present
    twice_bin = 2 * torch.arange(int(periods.max()) // 2 + 1, device=audio.device)
    weight = (twice_bin <= old) * ((twice_bin < new).float() + (twice_bin <= new))
    weight[:, 0] = 1
    spectrum = chirp_z(audio, old, -1, len(twice_bin)) * (weight / old)
    return _ended(chirp_z(spectrum, new, 1, width).real, end)


def noisy(audio: Tensor, length: np.ndarray, noise: Noise, tables: Tensor, here: Here) -> Tensor:
    """Adds noise to each row, like `augmentation.add_noise`."""
    start, first, end = here(np.stack([noise.start, noise.colour * NOISE_LENGTH + noise.start, length]))[..., None]
    column = torch.arange(audio.shape[1], device=audio.device)
    found = _ended(tables.take(first + column % (NOISE_LENGTH - start)), end)
    power = audio.square().sum(1, keepdim=True) / end
    return audio + found * (power.sqrt() * here(from_db(-noise.snr_db))[:, None])


def changed(
    audio: Tensor, length: np.ndarray, changes: Changes | None, width: int, tables: Tensor, here: Here
) -> Tensor:
    """Augments each row, like `Augmenter.audio`: (B, width)."""
    if changes is None:
        return F.pad(audio, (0, width - audio.shape[1]))
    percent, gain, tilt, noise = changes
    gain_here, tilt_here = here(np.stack([gain, tilt]))[..., None]
    audio = at_durations(audio, length, percent, width, here) * gain_here
    length = length_at(length, percent)
    audio = _ended(audio - tilt_here * F.pad(audio, (1, -1)), here(length)[:, None])
    return audio if noise is None else noisy(audio, length, noise, tables, here)


def joined(words: Tensor, length: np.ndarray, begin: np.ndarray, shape: tuple[int, int], here: Here) -> Tensor:
    """Joins recordings `words` (m, T) into strings (B, width).

    length: (m,) int64, length of each recording. begin: (m,) int64, ascending, start of each in the flattened result.
    """
    first, num = here(np.stack([begin, length]))
    position = torch.arange(shape[0] * shape[1], device=words.device)
    number = (torch.searchsorted(first, position, right=True) - 1).clamp(min=0)
    time = position - first.take(number)
    is_word = (time >= 0) & (time < num.take(number))
    return (words.take((number * words.shape[1] + time) * is_word) * is_word).view(shape)


def _ended(audio: Tensor, length: Tensor) -> Tensor:
    """Sets each row to zero after its length (B, 1)."""
    return audio * (torch.arange(audio.shape[1], device=audio.device) < length)
