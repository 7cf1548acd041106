"""Tests that the exported form of a recogniser gives the same results."""

import pytest
import torch

from models.speech.any_length import RecogniserOfAnyLength
from models.speech.encoders import AttentionLMU, ParallelLMUEncoder
from models.speech.front_end import LogMel
from models.speech.recogniser import SpeechRecogniser

pytestmark = pytest.mark.usefixtures("double_precision")
SAMPLE_RATE = 8000


@pytest.mark.parametrize("num_samples", [150, 2000, 30_000])
@pytest.mark.parametrize(
    "encoder",
    [
        lambda: ParallelLMUEncoder(8, 16, 2, channels=3),
        lambda: ParallelLMUEncoder(8, 16, 2, memory_size=2, theta=60.0, subsampling=2),
        lambda: ParallelLMUEncoder(8, 16, 2, bidirectional=False),
        lambda: AttentionLMU(8, 16, 2, 2, memory_size=8, theta=10.0),
    ],
)
def test_the_exported_form_answers_as_the_recogniser(encoder, num_samples):
    model = SpeechRecogniser(LogMel(SAMPLE_RATE, 8), encoder(), num_symbols=7).eval()
    audio = torch.randn(3, num_samples)
    lengths = torch.tensor([num_samples, num_samples // 2, 90])
    audio = audio.masked_fill(torch.arange(num_samples) >= lengths[:, None], 0)
    with torch.no_grad():
        expected, answer = model(audio, lengths), RecogniserOfAnyLength(model)(audio, lengths)
    torch.testing.assert_close(answer, tuple(expected), rtol=0, atol=1e-7)
    assert expected.log_probs.std() > 0.1
