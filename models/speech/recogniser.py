"""Speech recogniser, which maps audio to log-probabilities of symbols for CTC."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.speech.encoders import AttentionLMU, ParallelLMUEncoder
from models.speech.encoders import StreamState as EncoderState
from models.speech.front_end import LogMel
from models.speech.front_end import StreamState as FrontEndState


class Recognised(NamedTuple):
    """Output of a recogniser for CTC decoding."""

    log_probs: Tensor
    """(B, T, num_symbols), float32 or float64; symbol 0 is the blank."""
    lengths: Tensor
    """(B,) int64, number of frames of each utterance, without padding."""


class StreamState(NamedTuple):
    """State of `SpeechRecogniser.stream` between chunks."""

    front_end: FrontEndState | None = None
    encoder: EncoderState | None = None


class SpeechRecogniser(nn.Module):
    """Computes log-probabilities of symbols with a front end, an encoder and a linear layer."""

    def __init__(self, front_end: LogMel, encoder: AttentionLMU | ParallelLMUEncoder, num_symbols: int) -> None:
        """num_symbols: number of symbols, including the blank."""
        super().__init__()
        self.front_end = front_end
        self.encoder = encoder
        self.head = nn.Linear(encoder.out_features, num_symbols)

    def forward(self, audio: Tensor, num_samples: Tensor, *distortions: Tensor | None) -> Recognised:
        """Computes log-probabilities of symbols. distortions: arguments of `LogMel.forward` that augment audio."""
        features, lengths = self.front_end(audio, num_samples, *distortions)
        states, lengths = self.encoder(features, lengths)
        return Recognised(self._log_probs(states), lengths)

    def stream(self, audio: Tensor, state: StreamState | None = None) -> tuple[Tensor, StreamState]:
        """Processes the next samples, (B, S); returns log-probabilities of completed frames and the new state.

        The log-probabilities are (B, T, num_symbols), T >= 0. state: returned by the previous call, or None at the
        start. In eval mode, chunks of any size give the same results as `forward`. The encoder must be unidirectional,
        and the front end must not normalise by utterance.
        """
        assert isinstance(self.encoder, ParallelLMUEncoder), "its attention needs the whole utterance"
        before = state or StreamState()
        features, of_front_end = self.front_end.stream(audio, before.front_end)
        states, of_encoder = self.encoder.stream(features, before.encoder)
        return self._log_probs(states), StreamState(of_front_end, of_encoder)

    @property
    def frame_s(self) -> float:
        """Returns the time between consecutive frames of log-probabilities, in seconds."""
        return self.encoder.subsampling * self.front_end.hop / self.front_end.sample_rate

    def num_frames(self, num_samples: Tensor) -> Tensor:
        """Returns the number of frames of log-probabilities for audio of num_samples samples, int64."""
        return -(-self.front_end.num_frames(num_samples) // self.encoder.subsampling)

    def _log_probs(self, states: Tensor) -> Tensor:
        """Returns log-probabilities in full precision, because CTC multiplies hundreds of probabilities."""
        logits: Tensor = self.head(states)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
