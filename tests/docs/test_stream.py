"""examples/stream.py writes what the model would write for the whole recording at once."""

import subprocess
import sys
import wave

import numpy as np
import pytest
import torch

from examples.stream import Transcriber, read_wav
from models.speech.ctc import greedy
from models.speech.encoders import ParallelLMUEncoder
from models.speech.front_end import LogMel
from models.speech.recogniser import SpeechRecogniser
from trainer import UserError

SAMPLE_RATE = 8000
SYMBOLS = list("abcdefg")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    encoder = ParallelLMUEncoder(10, width=16, num_blocks=1, memory_size=4, theta=8, channels=4, bidirectional=False)
    recogniser = SpeechRecogniser(LogMel(SAMPLE_RATE, 10, normalise="running"), encoder, 1 + len(SYMBOLS)).eval()
    recogniser.head.weight.data *= 20
    return recogniser


@pytest.mark.parametrize("chunk", [1, 80, 800, 5001, 8000])
def test_chunks_of_any_length_give_the_whole_transcript(model, chunk):
    audio = torch.randn(8000, generator=torch.Generator().manual_seed(1)).cumsum(0) / 100
    if chunk == 1:
        audio = audio[:1000]
    with torch.inference_mode():
        found = model(audio.unsqueeze(0), torch.tensor([len(audio)]))
    ids = greedy(found.log_probs, found.lengths)
    expected = "".join(SYMBOLS[symbol - 1] for symbol in ids.ids[0, : ids.sizes[0]].tolist())
    transcriber = Transcriber(model, SYMBOLS)
    assert "".join(transcriber(part) for part in audio.split(chunk)) == expected != ""


def test_streaming_waits_for_full_windows_and_skipped_frames(model):
    assert Transcriber(model, SYMBOLS).delay_s == pytest.approx(0.025 + 3 * 0.010)


def write_wav(path, samples, sample_rate=SAMPLE_RATE):
    with wave.open(str(path), "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        file.writeframes(samples.astype("<i2").tobytes())


def test_channels_are_averaged_and_other_rates_are_refused(tmp_path):
    path = tmp_path / "a.wav"
    write_wav(path, np.array([[16384, 0], [-32768, -32768]]))
    assert read_wav(path, SAMPLE_RATE).tolist() == [0.25, -1]
    with pytest.raises(UserError, match="has 16 bits at 8000 Hz, but the run needs 16 bits at 16000 Hz"):
        read_wav(path, 16000)


@pytest.mark.slow
def test_a_trained_run_transcribes_a_recording(run_here, tmp_path):
    run = tmp_path / "run"
    run_here("--task", "speech", "--streaming", "--max-steps", 3, "--save-dir", run, "--num-threads", 1)
    write_wav(tmp_path / "a.wav", 3000 * np.random.default_rng(0).normal(size=(8000, 1)))
    command = [sys.executable, "-m", "examples.stream", run, tmp_path / "a.wav"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "1.00 s of audio in" in said and "100 ms to fill a chunk, 55 ms to complete its frames" in said
    mistake = subprocess.run([*command[:-1], tmp_path], capture_output=True, text=True)
    assert mistake.returncode == 2 and "give a wav file with 16 bits per sample" in mistake.stderr
