"""Audio of a whole batch at once, on a device: what `augmentation` does to one recording after another on the host.

Audio is (B, S) float32, zeros behind the end of each row. It differs from the host's by less than -100 dB of its power.
Lengths and other numbers of rows are arrays of the host, (B,); `here` (`Movable.here`) brings them to the device.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data.speech.augmentation import NOISE_LENGTH, Changes, Noise, from_db, hundreds, length_at

Here = Callable[[np.ndarray], Tensor]


def chirp_z(values: Tensor, period: Tensor, sign: int, num_out: int) -> Tensor:
    """The sums over n of values[n] exp(sign 2 pi i n k / period), for k from 0 on: (B, num_out) complex64.

    values: (B, S), real or complex. period: (B, 1) int64. As n k = (n^2 + k^2 - (k - n)^2) / 2, these are convolutions
    with chirps, and so Fourier transforms of one length for all rows, whatever their periods are. (Bluestein, "A linear
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
    """`augmentation.at_duration` of each row: (B, width), by Fourier transforms of the same lengths."""
    if (percent == 100).all():
        return F.pad(audio, (0, width - audio.shape[1]))
    periods = np.array([100 * hundreds(each) for each in length.tolist()])
    old, new, end = here(np.stack([periods, percent * periods // 100, length_at(length, percent)]))[..., None]
    # Each bin of a real signal stands for two, except the first one and the one at half the new rate, if there is one.
    twice_bin = 2 * torch.arange(int(periods.max()) // 2 + 1, device=audio.device)
    weight = (twice_bin <= old) * ((twice_bin < new).float() + (twice_bin <= new))
    weight[:, 0] = 1
    spectrum = chirp_z(audio, old, -1, len(twice_bin)) * (weight / old)
    return _ended(chirp_z(spectrum, new, 1, width).real, end)


def noisy(audio: Tensor, length: np.ndarray, noise: Noise, tables: Tensor, here: Here) -> Tensor:
    """`augmentation.add_noise` to each row."""
    start, first, end = here(np.stack([noise.start, noise.colour * NOISE_LENGTH + noise.start, length]))[..., None]
    column = torch.arange(audio.shape[1], device=audio.device)
    found = _ended(tables.take(first + column % (NOISE_LENGTH - start)), end)
    power = audio.square().sum(1, keepdim=True) / end
    return audio + found * (power.sqrt() * here(from_db(-noise.snr_db))[:, None])


def changed(
    audio: Tensor, length: np.ndarray, changes: Changes | None, width: int, tables: Tensor, here: Here
) -> Tensor:
    """`Augmenter.audio` of each row: (B, width)."""
    if changes is None:
        return F.pad(audio, (0, width - audio.shape[1]))
    percent, gain, tilt, noise = changes
    gain_here, tilt_here = here(np.stack([gain, tilt]))[..., None]
    audio = at_durations(audio, length, percent, width, here) * gain_here
    length = length_at(length, percent)
    audio = _ended(audio - tilt_here * F.pad(audio, (1, -1)), here(length)[:, None])
    return audio if noise is None else noisy(audio, length, noise, tables, here)


def joined(words: Tensor, length: np.ndarray, begin: np.ndarray, shape: tuple[int, int], here: Here) -> Tensor:
    """Strings of words (m, T), of a shape (B, width).

    length: (m,). begin: (m,) int64, ascending, where each word begins in the strings, if they lie behind each other.
    """
    first, num = here(np.stack([begin, length]))
    position = torch.arange(shape[0] * shape[1], device=words.device)
    number = (torch.searchsorted(first, position, right=True) - 1).clamp(min=0)
    time = position - first.take(number)
    is_word = (time >= 0) & (time < num.take(number))
    return (words.take((number * words.shape[1] + time) * is_word) * is_word).view(shape)


def _ended(audio: Tensor, length: Tensor) -> Tensor:
    """With zeros behind the length (B, 1) of each row."""
    return audio * (torch.arange(audio.shape[1], device=audio.device) < length)
