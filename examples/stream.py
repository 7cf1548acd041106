"""Transcribes a recording in chunks of 100 ms, like live audio, with a model that was trained with --streaming.

python main.py --task speech --streaming --save-dir checkpoints/streaming
python -m examples.stream checkpoints/streaming recording.wav
"""

import argparse
import time
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import lockstep


class Transcriber:
    """Transcribes audio chunk by chunk; outputs each symbol at the symbol's first frame."""

    def __init__(self, model: Any, symbols: list[str], separator: str = "") -> None:
        """symbols: all symbols but the blank. separator: text after each symbol."""
        self.model, self.symbols, self.separator = model, ["", *symbols], separator
        self.state: Any = None  # state after the last chunk
        self.last = 0

    @torch.inference_mode()
    def __call__(self, chunk: Tensor) -> str:
        """Returns the text of symbols that begin in the next chunk, (samples,) in [-1, 1], of any length."""
        log_probs, self.state = self.model.stream(chunk.unsqueeze(0), self.state)
        text = ""
        for symbol in log_probs[0].argmax(1).tolist():
            if symbol not in (0, self.last):
                text += self.symbols[symbol] + self.separator
            self.last = symbol
        return text

    @property
    def delay_s(self) -> float:
        """Returns the longest time from a sound to the end of the encoder's next frame, in seconds."""
        front_end, encoder = self.model.front_end, self.model.encoder
        skipped = (encoder.subsampling - 1) * front_end.hop
        return float((front_end.window_length + skipped) / front_end.sample_rate)


def load_transcriber(run: Path) -> Transcriber:
    model: Any = lockstep.load(run)
    if model.front_end.normalise == "utterance":
        raise lockstep.UserError(f"{run}: the model of this run needs whole utterances; train a model with --streaming")
    checkpoint = torch.load(run / "best.pth", weights_only=True)
    separator = " " if checkpoint["config"]["--units"] == "words" else ""
    return Transcriber(model, checkpoint["data_facts"]["alphabet"], separator)


def read_wav(path: Path, sample_rate: int) -> Tensor:
    """Reads a wav file as (samples,) in [-1, 1], averaging its channels. Raises UserError for an unsuitable file."""
    try:
        with wave.open(str(path)) as file:
            if (file.getsampwidth(), file.getframerate()) != (2, sample_rate):
                found = f"{8 * file.getsampwidth()} bits at {file.getframerate()} Hz"
                raise lockstep.UserError(
                    f"{path}: has {found}, but the run needs 16 bits at {sample_rate} Hz; convert the file"
                )
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, file.getnchannels())
    except (OSError, EOFError, wave.Error) as error:
        raise lockstep.UserError(f"{path}: {error}; give a wav file with 16 bits per sample") from None
    if len(samples) == 0:
        raise lockstep.UserError(f"{path}: contains no samples; give another recording")
    return torch.from_numpy(samples.mean(axis=1, dtype=np.float32) / 2**15)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("recording", type=Path, help="wav file with 16 bits per sample")
    parser.add_argument(
        "--chunk-ms", type=int, default=100, help="length of a chunk in milliseconds, at least 1 (default: 100)"
    )
    args = parser.parse_args()
    if args.chunk_ms < 1:
        parser.error(f"--chunk-ms {args.chunk_ms}: must be at least 1")
    torch.set_num_threads(1)
    try:
        transcriber = load_transcriber(args.run)
        sample_rate = transcriber.model.front_end.sample_rate
        audio = read_wav(args.recording, sample_rate)
    except lockstep.UserError as error:
        parser.error(str(error))
    times = []
    for chunk in audio.split(args.chunk_ms * sample_rate // 1000):
        start = time.perf_counter()
        text = transcriber(chunk)
        times.append(time.perf_counter() - start)
        print(text, end="", flush=True)
    seconds = len(audio) / sample_rate
    print(
        f"\nProcessed {seconds:.2f} s of audio in {sum(times):.3f} s on one thread (real-time factor "
        f"{sum(times) / seconds:.3f})."
    )
    latency_ms = args.chunk_ms + 1000 * (transcriber.delay_s + float(np.median(times)))
    print(
        f"The latency is at most {latency_ms:.0f} ms: {args.chunk_ms} ms to fill a chunk, "
        f"{1000 * transcriber.delay_s:.0f} ms to complete its frames, and {1000 * np.median(times):.1f} ms to "
        "compute. The model may output a symbol later."
    )


if __name__ == "__main__":
    main()
