"""Log-mel features of speech, computed on the device of the audio, for whole utterances or chunks."""

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.layers.lengths import within_lengths

Normalise = Literal["utterance", "fixed", "running"]

LOWEST_HZ = 20.0
FLOOR = 1e-9
"""Minimum energy of a mel bin: approximately white noise at -90 dB full scale, below the resolution of 16-bit audio."""
VARIANCE_FLOOR = 1e-5
PRIOR_FRAMES = 100
"""Weight, in frames, of the training statistics in running normalisation."""
WARP_KNEE = 0.7
"""Share of the highest frequency up to which a warp multiplies frequencies; warp factors above 1 divide the share."""


class StreamState(NamedTuple):
    """State of `LogMel.stream` between chunks.

    audio: (B, s), samples that the next frames need. sums: (2, B, 1, F), sums of standardised features and
    of their squares over all previous frames. num_frames: number of previous frames.
    """

    audio: Tensor
    sums: Tensor
    num_frames: int


class LogMel(nn.Module):
    """Computes normalised log-mel features, (B, T, F), of audio, (B, S).

    A frame is `window_s` seconds of audio, multiplied by a periodic Hann window. Frame t starts at sample t * hop. The
    module uses all frames that fit into the utterance, and pads an utterance that is shorter than a frame. An FFT whose
    length is a power of two computes a frame's power spectrum. The window is scaled so that white noise of variance v
    has power v at each frequency. Each of num_mels triangular filters then computes a weighted sum of the spectrum. The
    triangles are equally spaced and linear on HTK's mel scale, 2595 log10(1 + f / 700 Hz), from LOWEST_HZ to half the
    sample rate. A feature is the natural logarithm of max(sum, FLOOR).

    Features are computed in the dtype of the module's buffers, also under autocast. Padding has no effect, and features
    beyond the end of an utterance are 0.

    masking_db: with normalise="utterance", level of white noise added to each frame, in decibels below the utterance's
        mean power. The noise masks weaker sounds, such as room noise in pauses.
    normalise: statistics to use in (x - mean) / std, with one mean per mel bin and one std for all bins.
        "utterance": statistics of the utterance's frames.
        "fixed": statistics of the training data, which `fit_statistics` stores in the buffers `mean` and `std`.
        "running": statistics of all frames so far, combined with the "fixed" statistics, which count as PRIOR_FRAMES
        frames.
    """

    window: Tensor
    bin_hz: Tensor
    filters: Tensor
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        sample_rate: int = 16000,
        num_mels: int = 80,
        window_s: float = 0.025,
        hop_s: float = 0.010,
        normalise: Normalise = "utterance",
        masking_db: float = 40.0,
    ) -> None:
        super().__init__()
        if normalise not in get_args(Normalise):
            raise ValueError(f"normalise {normalise!r}: must be one of {', '.join(get_args(Normalise))}")
        self.window_length, self.hop = round(window_s * sample_rate), round(hop_s * sample_rate)
        if not 1 <= self.hop <= self.window_length:
            raise ValueError(f"hop_s {hop_s}: must be at least one sample and at most window_s {window_s}")
        self.sample_rate, self.num_mels, self.normalise = sample_rate, num_mels, normalise
        self.masking_db = masking_db
        self.fft_length = 2 ** math.ceil(math.log2(self.window_length))
        self._lowest_mel, highest_mel = (2595 * math.log10(1 + hz / 700) for hz in (LOWEST_HZ, sample_rate / 2))
        self._mel_spacing = (highest_mel - self._lowest_mel) / (num_mels + 1)
        window = torch.hann_window(self.window_length, dtype=torch.float64)
        dtype = torch.get_default_dtype()
        self.register_buffer("window", (window / window.norm()).to(dtype), persistent=False)
        bin_hz = torch.arange(self.fft_length // 2 + 1, dtype=torch.float64) * (sample_rate / self.fft_length)
        self.register_buffer("bin_hz", bin_hz.to(dtype), persistent=False)
        self.register_buffer("filters", self._triangles(bin_hz).to(dtype), persistent=False)
        if bool((self.filters.sum(dim=0) == 0).any()):
            raise ValueError(f"num_mels {num_mels}: too many for windows of {self.window_length} samples; choose fewer")
        has_statistics = normalise != "utterance"
        self.register_buffer("mean", torch.zeros(num_mels), persistent=has_statistics)
        self.register_buffer("std", torch.ones(1), persistent=has_statistics)

    def forward(
        self,
        audio: Tensor,
        num_samples: Tensor,
        warp: Tensor | None = None,
        freq_masks: Tensor | None = None,
        time_masks: Tensor | None = None,
        masking_db: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns features, (B, T, F), and the number of frames of each utterance, (B,) int64.

        audio: (B, S), approximately in [-1, 1], zero-padded. num_samples: (B,) int64.
        warp: (B,), factors that multiply frequencies to imitate shorter or longer vocal tracts, or None.
        freq_masks: (B, n, 2) int64, (start, width) of mel bins to set to 0 (SpecAugment, Park et al., 2019), or None.
        time_masks: (B, n, 2), (start, width) of frames to set to 0, as shares of the utterance, or None.
        masking_db: (B,), decibels to add to the module's `masking_db`, or None.
        """
        with torch.autocast(audio.device.type, enabled=False):
            noise = self.masking_noise(audio, num_samples, masking_db) if self.normalise == "utterance" else None
            features = self.log_mel(audio, warp, noise)
            lengths = self.num_frames(num_samples)
            frames = torch.arange(features.shape[1], device=audio.device)
            hidden = (frames >= lengths[:, None])[:, :, None]
            if self.normalise == "utterance":
                features = _normalise_utterances(features, hidden, lengths[:, None, None])
            else:
                features, _ = self._normalise_causally(features, None)
            if freq_masks is not None:
                hidden = hidden | _within(torch.arange(self.num_mels, device=audio.device), freq_masks)[:, None, :]
            if time_masks is not None:
                hidden = hidden | _within(frames, time_masks * lengths[:, None, None])[:, :, None]
            return features.masked_fill(hidden, 0.0), lengths

    def stream(self, audio: Tensor, state: StreamState | None = None) -> tuple[Tensor, StreamState]:
        """Processes the next samples of audio, (B, S); returns features of completed frames and the new state.

        The features are (B, T, F) with T >= 0. For utterances of at least one window, chunks of any size give the same
        features as `forward`. Raises ValueError if normalise is "utterance".
        """
        if self.normalise == "utterance":
            raise ValueError(
                'normalise "utterance" needs the whole utterance; streaming supports "fixed" and "running"'
            )
        with torch.autocast(audio.device.type, enabled=False):
            if state is None:
                sums = self.mean.new_zeros(2, len(audio), 1, self.num_mels)
                state = StreamState(audio[:, :0], sums, 0)
            audio = torch.cat([state.audio, audio], dim=1)
            num_frames = max(0, (audio.shape[1] - self.window_length) // self.hop + 1)
            rest = audio[:, num_frames * self.hop :]
            if num_frames == 0:
                return self.mean.new_zeros(len(audio), 0, self.num_mels), state._replace(audio=rest)
            features, sums = self._normalise_causally(self.log_mel(audio), state)
            return features, StreamState(rest, sums, state.num_frames + num_frames)

    def num_frames(self, num_samples: Tensor) -> Tensor:
        """Returns the number of frames of utterances that have num_samples samples, int64."""
        return ((num_samples - self.window_length) // self.hop + 1).clamp_min(1)

    def log_mel(self, audio: Tensor, warp: Tensor | None = None, noise: Tensor | None = None) -> Tensor:
        """Returns unnormalised features of all frames, including padding: audio (B, S) -> (B, T, F).

        noise: (B,), power of white noise to add, or None.
        """
        audio = functional.pad(audio.to(self.window.dtype), (0, max(0, self.window_length - audio.shape[1])))
        spectrum = torch.fft.rfft(audio.unfold(1, self.window_length, self.hop) * self.window, n=self.fft_length)
        power = spectrum.real.square() + spectrum.imag.square()
        if noise is not None:
            power = power + noise[:, None, None]
        filters = self.filters if warp is None else self._triangles(self._warped(warp.to(power.dtype)))
        return (power @ filters).clamp_min(FLOOR).log()

    def masking_noise(self, audio: Tensor, num_samples: Tensor, masking_db: Tensor | None) -> Tensor:
        """Returns the power of the noise for each utterance, (B,). masking_db: (B,), added to `self.masking_db`."""
        power = audio.to(self.window.dtype).square().sum(dim=1) / num_samples
        decibels = self.masking_db if masking_db is None else self.masking_db + masking_db
        return power * 10 ** (-0.1 * decibels)

    @torch.no_grad()
    def fit_statistics(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Sets `mean` and `std` to the statistics of all frames. batches: (audio, num_samples) for `forward`."""
        count, sums = 0, torch.zeros(2, self.num_mels, dtype=torch.float64)
        for audio, num_samples in batches:
            audio, num_samples = audio.to(self.mean.device), num_samples.to(self.mean.device)
            features = self.log_mel(audio).double()
            lengths = self.num_frames(num_samples)
            features = features[within_lengths(lengths, features.shape[1])]
            count += len(features)
            sums += torch.stack([features.sum(dim=0), features.square().sum(dim=0)]).cpu()
        mean, square = sums / count
        self.mean.copy_(mean)
        self.std.copy_((square - mean.square()).mean().clamp_min(VARIANCE_FLOOR).sqrt())

    def _triangles(self, hz: Tensor) -> Tensor:
        """Returns the weight of each frequency in each mel bin: hz (..., n) -> (..., n, F)."""
        position = (2595 * torch.log10(1 + hz / 700) - self._lowest_mel) / self._mel_spacing
        centres = torch.arange(1, self.num_mels + 1, dtype=hz.dtype, device=hz.device)
        return (1 - (position[..., None] - centres).abs()).clamp_min(0)

    def _warped(self, warp: Tensor) -> Tensor:
        """Applies the piecewise linear warp of Jaitly and Hinton (2013) to the FFT's frequencies: (B, n), in Hz."""
        factor, highest = warp[:, None], self.sample_rate / 2
        knee = WARP_KNEE * highest / factor.clamp_min(1)
        slope = (highest - knee * factor) / (highest - knee)
        return torch.where(self.bin_hz <= knee, self.bin_hz * factor, highest - slope * (highest - self.bin_hz))

    def _normalise_causally(self, features: Tensor, state: StreamState | None) -> tuple[Tensor, Tensor]:
        """Normalises features with fixed or running statistics. Returns the features and the new `StreamState.sums`."""
        features = (features - self.mean) / self.std
        num_before, sums = (0, features.new_zeros(2, 1, 1, 1)) if state is None else (state.num_frames, state.sums)
        if self.normalise == "fixed":
            return features, sums
        sums = sums + _causal_sums(torch.stack([features, features.square()]))
        frames = torch.arange(1, features.shape[1] + 1, dtype=features.dtype, device=features.device)
        count = (PRIOR_FRAMES + num_before + frames)[:, None]
        mean = sums[0] / count
        variance = ((PRIOR_FRAMES + sums[1]) / count - mean.square()).mean(dim=-1, keepdim=True)
        return (features - mean) / variance.clamp_min(VARIANCE_FLOOR).sqrt(), sums[:, :, -1:]


def _normalise_utterances(features: Tensor, is_padding: Tensor, lengths: Tensor) -> Tensor:
    centred = features - features.masked_fill(is_padding, 0.0).sum(dim=1, keepdim=True) / lengths
    variance = (
        centred.masked_fill(is_padding, 0.0).square().mean(dim=2, keepdim=True).sum(dim=1, keepdim=True) / lengths
    )
    return centred / (variance + VARIANCE_FLOOR).sqrt()


def _within(positions: Tensor, spans: Tensor) -> Tensor:
    """Returns a mask (B, n) that is True where positions (n,) are in any span. spans: (B, k, 2), (start, width)."""
    start, width = spans[..., None].unbind(dim=2)
    return ((positions >= start) & (positions < start + width)).any(dim=1)


def _causal_sums(x: Tensor) -> Tensor:
    """Returns the cumulative sums of x, (..., T, F), over time.

    Adds partial sums, shifted by 1, 2, 4, ... frames, because `cumsum` is nondeterministic on a GPU and has larger
    rounding errors. Compiled and exported programs use `cumsum`, because their number of operations must be fixed.
    """
    if torch.compiler.is_compiling():
        return x.double().cumsum(-2).to(x.dtype)
    shift = 1
    while shift < x.shape[-2]:
        x = x + functional.pad(x, (0, 0, shift, -shift))
        shift *= 2
    return x
