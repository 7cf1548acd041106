"""Speech recognition with Legendre memory units and connectionist temporal classification (CTC)."""

import io
import os
import re
import sys
import wave
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from data.overview import overview
from data.speech.augmentation import Augmentation, Augmenter
from data.speech.corpus import Corpus
from data.speech.reader import load_corpus, read_recordings
from data.speech.splits import Split, hold_out, speaker_folds
from data.speech.synthetic import load_synthetic_corpus
from data.speech.text import Alphabet, Units, shortest_frames
from data.speech.utterances import Strings, Utterances
from data.table_files import ENCODING, Reading
from models.speech.any_length import RecogniserOfAnyLength
from models.speech.encoders import AttentionLMU, ParallelLMUEncoder
from models.speech.front_end import LogMel
from models.speech.recogniser import SpeechRecogniser
from tasks.speech_objective import Decoder, SpeechObjective
from tasks.speech_report import draw_utterances, error_counts, error_rates, timed_words, worst_utterances
from trainer.common.errors import UserError
from trainer.config import FlagGroup, flag, flag_name, given_flags
from trainer.loading.batch_orders import bucketed_batches, even_batches
from trainer.loading.batches import Batch, KeyedDataset
from trainer.loading.cache import digest_of
from trainer.loading.order import SampleKeys
from trainer.task import Exported, Objective, Picture, Task

_OF_PLMU, _OF_LMU, _OF_SPEAKERS = {"model": ("plmu",)}, {"model": ("lmu",)}, {"split": ("speaker",)}
_USUAL: dict[str, dict[str, float]] = {
    "plmu": {"num_mels": 40, "memory_size": 8, "theta": 16.0},
    "lmu": {"num_mels": 80, "memory_size": 256, "theta": 1000.0},
}
"""Flag defaults that depend on --model, by model and flag."""
_EVALUATION_STRINGS = 300
_EVALUATION_SEED = 0
"""Seed for joining recordings in evaluation, independent of --seed, so that all runs are scored on the same audio."""
_STATISTICS_UTTERANCES = 500
"""Approximate number of training utterances from which the mean spectrum is computed."""


@dataclass
class SpeechFlags(FlagGroup):
    """Task: speech recognition (--task speech)

    --predict takes a recording or a folder of recordings, and writes their transcripts with times and confidence.
    """

    data_dir: Path | None = flag(
        None, "recordings and transcripts; folder, zip or tar; LibriSpeech, Common Voice's TSV files, a manifest of "
        "JSON lines (audio_path, text, duration), an audio folder with metadata.csv, LJSpeech, VCTK, Speech Commands, "
        "or sound files with one .txt file each or with transcripts in their names (default: generated utterances; no "
        "download)", common=True, local=True,
    )  # fmt: skip
    sample_rate: int | None = flag(
        None, "resample recordings to this rate in Hz (default: the most common rate)", metavar="HZ", at_least=4000,
        needs={"data_dir": None},
    )  # fmt: skip
    encoding: str | None = flag(None, ENCODING, metavar="NAME", needs={"data_dir": None})
    on_bad: Literal["drop", "refuse"] = flag(
        "drop", "what to do with recordings that are unreadable, empty or too short for their transcript; drop: skip "
        "and report them; refuse: stop with an error; also applies to a --predict folder",
    )  # fmt: skip
    split: Split = flag(
        "utterance", "what to hold out; utterance: single recordings, unless the data define a split; speaker: all "
        "recordings of some speakers, even if the data define a split",
    )  # fmt: skip
    val_share: float = flag(
        0.1, "share of utterances or speakers (see --split) held out for validation; 0: use the last weights, without "
        "validation", at_least=0, below=1,
    )  # fmt: skip
    test_share: float = flag(
        0.1, "share of utterances or speakers (see --split) held out for testing; 0: score the validation set instead",
        at_least=0, below=1,
    )  # fmt: skip
    val_speakers: tuple[str, ...] | None = flag(
        None, "with --split speaker: names of the validation speakers", metavar="NAME", needs=_OF_SPEAKERS
    )
    test_speakers: tuple[str, ...] | None = flag(
        None, "with --split speaker: names of the test speakers", metavar="NAME", needs=_OF_SPEAKERS
    )
    strings: str | None = flag(
        None, "train and score on utterances joined from FEWEST to MOST recordings of one speaker; for example, 3-7 "
        "makes digit strings from digits", metavar="FEWEST-MOST",
    )  # fmt: skip
    num_strings: int = flag(
        2000, "with --strings: number of joined utterances per epoch", at_least=1, needs={"strings": None}
    )
    growing_epochs: int = flag(
        5, "with --strings: epochs over which joined utterances grow to full length; CTC learns each symbol's sound "
        "sooner from short utterances", metavar="EPOCHS", at_least=0, needs={"strings": None},
    )  # fmt: skip
    units: Units = flag("characters", "output symbols of the network", common=True)
    alphabet: Path | None = flag(
        None, "file of output symbols, one character or word per line (default: the symbols of the transcripts)"
    )
    batch_by: Literal["utterances", "seconds"] = flag(
        "utterances", "how to divide utterances among optimizer steps; utterances: the same number in each step; "
        "seconds: about the same duration of audio in each step",
    )  # fmt: skip
    num_mels: int | None = flag(
        None, "number of mel bands of the log-mel spectrogram (default: plmu 40, lmu 80)", at_least=1
    )
    hop_ms: float = flag(
        10.0, "milliseconds from the start of one spectrogram frame to the next", metavar="MS", above=0, at_most=25
    )
    masking_db: float = flag(
        40.0, "level of white noise added to all audio, in decibels below the audio; hides quieter sound such as room "
        "noise; 20 helps with unseen speakers and rooms", metavar="DB", at_least=0,
    )  # fmt: skip
    model: Literal["plmu", "lmu"] = flag(
        "plmu", "network; plmu: parallel Legendre Memory Unit (LMU), trained without a loop over time; lmu: recurrent "
        "LMU with attention, 7.16 million parameters", common=True,
    )  # fmt: skip
    streaming: bool = flag(
        False, "plmu: use no future audio; the model can transcribe while it listens", common=True, needs=_OF_PLMU
    )
    width: int = flag(96, "plmu: width of each block", at_least=1, needs=_OF_PLMU)
    num_blocks: int = flag(
        3, "plmu: number of blocks, each a memory layer plus a feed-forward layer", at_least=1, needs=_OF_PLMU
    )
    channels: int = flag(16, "plmu: number of LMU memories per block", at_least=1, needs=_OF_PLMU)
    memory_size: int | None = flag(
        None, "number of Legendre polynomials per LMU memory (default: plmu 8, lmu 256)", at_least=1
    )
    theta: float | None = flag(
        None, "length of the sliding window of an LMU memory, in frames after subsampling (default: plmu 16, lmu 1000)",
        metavar="FRAMES", above=0,
    )  # fmt: skip
    subsampling: int = flag(
        4,
        "plmu: factor by which convolutions reduce the number of spectrogram frames before the first block",
        at_least=1,
        needs=_OF_PLMU,
    )
    hidden_size: int = flag(512, "lmu: width of each layer", at_least=1, needs=_OF_LMU)
    num_layers: int = flag(4, "lmu: number of layers, each with attention and an LMU", at_least=1, needs=_OF_LMU)
    num_heads: int = flag(
        8, "lmu: number of attention heads; must evenly divide --hidden-size", at_least=1, needs=_OF_LMU
    )
    dropout: float = flag(0.1, "dropout probability on the outputs of layers", at_least=0, below=1)
    augmentation: float = flag(
        0.5, "strength of random changes to training utterances: speed, level, noise, vocal-tract length and masks; 1 "
        "helps with unseen speakers; 0: off", at_least=0, at_most=2,
    )  # fmt: skip
    consistency: float = flag(
        0.0, "weight of the CR-CTC loss, which compares two differently masked copies of an utterance; doubles the "
        "time of an optimizer step; 0.2 is usual; 0: off", at_least=0,
    )  # fmt: skip
    beam: int = flag(1, "beam width in decoding; 1: greedy, the best symbol of each frame", common=True, at_least=1)
    language_model: Path | None = flag(
        None, "ARPA file of an n-gram model of the output symbols; needs --beam of at least 2", common=True
    )
    lm_weight: float = flag(0.5, "with --language-model: weight of the language model's log-probabilities", at_least=0)
    length_bonus: float = flag(0.0, "with --language-model: log-probability added per output symbol, in nats")

    def problems(self) -> list[str]:
        found = []
        for name in ("data_dir", "alphabet", "language_model"):
            path = getattr(self, name)
            if path is not None and not path.exists():
                found.append(f"{flag_name(name)} {path}: no such file or folder; check the path")
        if self.strings is not None and self.string_lengths is None:
            found.append(f"--strings {self.strings}: must be a range of whole numbers from 1, such as 3-7")
        if self.hidden_size % self.num_heads:
            found.append(f"--num-heads {self.num_heads}: must evenly divide --hidden-size {self.hidden_size}")
        if self.subsampling not in (1, 2, 4):
            found.append(f"--subsampling {self.subsampling}: must be 1, 2 or 4")
        if self.streaming and self.masking_db != SpeechFlags.masking_db:
            found.append(
                f"--masking-db {self.masking_db:g}: needs the power of the whole utterance, which a streaming model "
                "does not have; leave out --streaming or --masking-db"
            )
        return sorted(found)

    def usual(self, name: str) -> Any:
        """Returns a flag's value or, if the flag was not given, its default for the chosen model."""
        value = getattr(self, name)
        return _USUAL[self.model][name] if value is None else value

    @property
    def string_lengths(self) -> tuple[int, int] | None:
        """Smallest and largest number of recordings per sample; None if `--strings` is missing or invalid."""
        match = re.fullmatch(r"(\d+)-(\d+)", self.strings or "")
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            return None
        return int(match[1]), int(match[2])


def _with_a_bar(things: Iterable[Any], number: int) -> Iterable[Any]:
    """Wraps an iterable in a progress bar, which is shown only on a terminal. number: length of the iterable."""
    return tqdm(things, "decoding", number, leave=False, dynamic_ncols=True, disable=not sys.stderr.isatty())


def _as_text(name: str) -> str:
    """Returns a file name as valid text, with undecodable bytes escaped."""
    return os.fsencode(name).decode(errors="backslashreplace")


class SpeechTask(Task):
    """Task that transcribes speech; the best epoch has the lowest word error rate on the validation set."""

    Config = SpeechFlags
    examples = (
        "--data-dir LibriSpeech --save-dir checkpoints/libri",
        "--save-dir checkpoints/libri --predict meeting.wav",
    )
    monitor = ("val/wer", "min")
    # beta2 0.98 instead of 0.999, since CTC's loss falls steeply at first
    defaults = {
        "lr": 3e-3, "betas": (0.9, 0.98), "batch_size": 8, "weight_decay": 0.02, "epochs": 15, "max_grad_norm": 5.0,
    }  # fmt: skip
    headline = ("loss", "wer", "cer")
    hold_out_flags = ("split", "val_share", "test_share", "val_speakers", "test_speakers")
    predict_flags = ("on_bad", "beam", "language_model", "lm_weight", "length_bonus")

    _new: Corpus | None = None
    """Recordings that `new_data` read for `--predict`."""

    # --- data ---------------------------------------------------------------------------------------------------

    @cached_property
    def corpus(self) -> Corpus:
        """Recordings with transcripts. Raises UserError if the data are unusable."""
        config: SpeechFlags = self.config
        if config.data_dir is None:
            return load_synthetic_corpus(self.cache_dir)
        return load_corpus(
            config.data_dir,
            self.cache_dir,
            sample_rate=config.sample_rate,
            reading=Reading(config.encoding, config.on_bad),
            progress=_with_a_bar,
        )

    @property
    def sample_rate(self) -> int:
        """Sample rate of the model's input, in Hz."""
        return self.corpus.sample_rate if self.data_facts is None else self.data_facts["sample_rate"]

    @cached_property
    def alphabet(self) -> Alphabet:
        config: SpeechFlags = self.config
        if self.data_facts is not None:
            return Alphabet(config.units, tuple(self.data_facts["alphabet"]))
        if config.alphabet is not None:
            return Alphabet.from_file(config.alphabet, config.units)
        transcripts = self.corpus.transcripts
        joined = [" ".join(transcripts[:2])] * (config.strings is not None)  # joined texts contain spaces
        return Alphabet.from_transcripts([*transcripts, *joined], config.units)

    def describe_data(self) -> Mapping[str, Any]:
        return {"alphabet": list(self.alphabet.symbols), "sample_rate": self.sample_rate}

    @cached_property
    def _left_out(self) -> dict[str, int]:
        """Number of dropped utterances for each reason."""
        return dict(self.corpus.skipped)

    def data_digest(self) -> str:
        """Returns a digest of the recordings' names, lengths, transcripts and split; the audio is not hashed."""
        corpus = self.corpus
        return digest_of(
            corpus.offsets,
            "\n".join(corpus.names),
            "\n".join(corpus.transcripts),
            *(part.indices for part in self._splits.values()),
        )

    @cached_property
    def _splits(self) -> Mapping[str, Utterances | Strings]:
        config: SpeechFlags = self.config
        own = {"val", "test"}.intersection(self.corpus.splits) if config.split == "utterance" else ()
        if given := given_flags(config, sorted(f"{part}_share" for part in own)):
            raise UserError(f"{' and '.join(given)}: must be left out, because the data define their own split")
        parts = hold_out(
            self.corpus,
            split=config.split,
            val_share=config.val_share,
            test_share=config.test_share,
            val_speakers=config.val_speakers or (),
            test_speakers=config.test_speakers or (),
        )
        if len(parts["test"]) == 0:
            parts["test"] = parts["val"]
        if len(parts["test"]) == 0:
            raise UserError(
                "--test-share 0 --val-share 0: leave no utterances to score; choose a share above 0 for at least "
                "one of the flags"
            )
        parts["train"] = self._long_enough(parts["train"])
        _ = self._decoder  # raises UserError for an unusable language model before the run writes any file
        return {name: self._dataset(name, part) for name, part in parts.items() if len(part) > 0}

    def _dataset(self, name: str, part: np.ndarray) -> Utterances | Strings:
        config: SpeechFlags = self.config
        is_training = name == "train"
        augmenter = None
        if is_training and config.augmentation > 0:
            num_views = 2 if config.consistency > 0 else 1
            augmenter = Augmenter(self._augmentation, config.usual("num_mels"), self.seed, num_views)
        if config.string_lengths is None:
            by_length = np.argsort(np.diff(self.corpus.offsets)[part], kind="stable")  # reduces padding in evaluation
            return Utterances(self.corpus, part[by_length], self.alphabet, augmenter)
        return Strings(
            self.corpus,
            part,
            self.alphabet,
            augmenter,
            num_words=config.string_lengths,
            num_strings=config.num_strings if is_training else _EVALUATION_STRINGS,
            growing_epochs=config.growing_epochs if is_training else 0,
            seed=self.seed if is_training else _EVALUATION_SEED,
        )

    @property
    def _augmentation(self) -> Augmentation:
        return Augmentation().times(self.config.augmentation)

    def _long_enough(self, part: np.ndarray) -> np.ndarray:
        """Returns the training utterances that have enough frames for CTC even at the highest augmented speed.

        Validation and test sets keep short utterances. Raises UserError if all training utterances are too short, or if
        any is too short and --on-bad is refuse.
        """
        corpus, model = self.corpus, self._build_model()
        needed = np.array([shortest_frames(self.alphabet.encode(text)) for text in corpus.transcripts])
        num_samples = np.diff(corpus.offsets) * (100 - self._augmentation.speed_percent) // 100
        if self.config.string_lengths is not None:
            num_samples = num_samples * (100 - self._augmentation.word_speed_percent) // 100
        num_frames = model.num_frames(torch.from_numpy(num_samples)).numpy()
        too_short = part[num_frames[part] < needed[part]]
        if len(too_short) == 0:
            return part
        first = too_short[0]
        example = f"{corpus.names[first]}, which has {num_frames[first]} frames but needs {needed[first]}"
        advice = "reduce --subsampling or --hop-ms, or use --units words"
        if len(too_short) == len(part):
            raise UserError(
                f"--data-dir: all {len(part)} training utterances are too short for their transcripts "
                f"({example}); {advice}"
            )
        if self.config.on_bad == "refuse":
            raise UserError(
                f"--data-dir: {len(too_short)} training utterances are too short for their transcripts ({example}); "
                f"fix them, {advice}, or add --on-bad drop"
            )
        self._left_out[f"is too short for its transcript, such as {example}"] = len(too_short)
        return np.setdiff1d(part, too_short)

    def splits(self) -> Mapping[str, KeyedDataset]:
        return self._splits

    def remarks(self) -> Sequence[str]:
        """Returns a summary table of the training or new recordings, and the reasons for dropping utterances."""
        if self._new is not None:
            rows, left_out = list(self._new.found.items()), self._new.skipped
        elif self.data_facts is not None or self.config.data_dir is None:
            rows, left_out = [], {}
        else:
            rows, left_out = self._found(), self._left_out
        notes = [note for name, note in rows if name == "encoding"]  # too long for a cell of the table
        rows = [row for row in rows if row[0] != "encoding"]
        table = overview(("recordings", "found"), rows) if rows else []
        notes += [f"Left out: {count} recording(s), each of which {reason}." for reason, count in left_out.items()]
        return [*table, *notes]

    def _found(self) -> list[tuple[str, str]]:
        corpus, symbols = self.corpus, self.alphabet.symbols
        num_speakers = len({*corpus.speakers} - {""})
        shown = " ".join("<space>" if symbol == " " else symbol for symbol in symbols)
        return [
            ("files", f"{len(corpus)}, {len(corpus.audio) / corpus.sample_rate / 3600:.3g} hours"),
            *corpus.found.items(),
            ("speakers", f"{num_speakers}" if num_speakers else "not known"),
            ("alphabet", f"{len(symbols)} {self.config.units}: {shown}"),
        ]

    def order(self, phase: str, epoch: int, global_batch_size: int) -> Sequence[np.ndarray]:
        """Returns batches of utterances with similar lengths."""
        make = even_batches if self.config.batch_by == "seconds" else bucketed_batches
        return make(self._splits["train"].lengths(epoch), global_batch_size, self.seed, epoch)

    def largest_samples(self, phase: str, epoch: int, count: int) -> np.ndarray:
        """Returns the indices of the longest training utterances."""
        return np.argsort(-self._splits["train"].lengths(epoch), kind="stable")[:count]

    def fold_flags(self, num_folds: int) -> list[list[str]]:
        """Returns the flags of each cross-validation fold, which hold out all utterances of the fold's speakers."""
        folds = speaker_folds(self.corpus, num_folds)
        return [["--split", "speaker", "--test-share", "0", "--val-speakers", *fold] for fold in folds]

    # --- model --------------------------------------------------------------------------------------------------

    def build_objective(self) -> SpeechObjective:
        model = self._build_model()
        longest = self._longest_text(model) if self.data_facts is None else 0
        return SpeechObjective(model, lambda found: self._decoder(found), longest, self.config.consistency)

    def _build_model(self) -> SpeechRecogniser:
        config: SpeechFlags = self.config
        num_mels = config.usual("num_mels")
        memory = {name: config.usual(name) for name in ("memory_size", "theta")} | {"dropout": config.dropout}
        try:
            front_end = LogMel(
                self.sample_rate,
                num_mels,
                hop_s=config.hop_ms / 1000,
                normalise="running" if config.streaming else "utterance",
                masking_db=config.masking_db,
            )
        except ValueError as error:
            raise UserError(f"--num-mels {num_mels}, --hop-ms {config.hop_ms:g}: {error}") from None
        encoder: AttentionLMU | ParallelLMUEncoder
        if config.model == "lmu":
            encoder = AttentionLMU(num_mels, config.hidden_size, config.num_layers, config.num_heads, **memory)
        else:
            encoder = ParallelLMUEncoder(
                num_mels,
                config.width,
                config.num_blocks,
                channels=config.channels,
                subsampling=config.subsampling,
                bidirectional=not config.streaming,
                **memory,
            )
        return SpeechRecogniser(front_end, encoder, len(self.alphabet))

    @cached_property
    def _decoder(self) -> Decoder:
        config: SpeechFlags = self.config
        return Decoder(self.alphabet, config.beam, config.language_model, config.lm_weight, config.length_bonus)

    def _longest_text(self, model: SpeechRecogniser) -> int:
        """Returns an upper bound on the number of symbols of any reference or decoded text in evaluation."""
        evaluated = [dataset for name, dataset in self._splits.items() if name != "train"]
        num_samples = torch.tensor(max(int(dataset.lengths(0).max()) for dataset in evaluated))
        texts = {text for dataset in evaluated for text in dataset.transcripts(np.arange(len(dataset)))}
        return max(int(model.num_frames(num_samples)), *(len(self.alphabet.encode(text)) for text in texts))

    def initialise(self, objective: Objective) -> None:
        """Computes the mean and standard deviation of training features, with which streaming models normalise."""
        assert isinstance(objective, SpeechObjective)
        front_end, train = objective.model.front_end, self._splits["train"]
        if front_end.normalise != "utterance":
            front_end.fit_statistics(self._training_audio(train))

    def _training_audio(self, train: Utterances | Strings) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the audio (1, S) and the number of audio samples (1,) of evenly spaced training utterances."""
        for i in range(0, len(train), max(1, len(train) // _STATISTICS_UTTERANCES)):
            samples = train.__getitems__(SampleKeys(np.array([i]), epoch=0))
            yield torch.from_numpy(samples["audio"]), torch.from_numpy(samples["num_samples"])

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        assert isinstance(model, SpeechRecogniser)
        return list(model.encoder.blocks)

    # --- results ------------------------------------------------------------------------------------------------

    def summarise(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Returns the mean loss per utterance in nats and, in evaluation, the metrics of `error_rates`."""
        metrics = {"loss": float(sums["loss"] / sums["weight"])}
        return metrics if "said" not in sums else metrics | error_rates(*self._texts(sums))

    def _texts(self, sums: dict[str, Tensor]) -> tuple[list[str], list[str]]:
        return self._read(sums["said"]), self._read(sums["decoded"])

    def _read(self, ids: Tensor) -> list[str]:
        return [self.alphabet.decode(row) for row in ids.tolist()]

    def details(self, sums: dict[str, Tensor]) -> dict[str, Any]:
        """Returns error counts, the ten worst utterances with aligned words, and counts of dropped utterances."""
        texts = self._texts(sums)
        worst = worst_utterances(*texts)
        for found in worst:
            numbers = sums["recordings"][found.pop("index")].long().tolist()
            found["recordings"] = [self.corpus.names[number] for number in numbers if number >= 0]
        return {"errors": error_counts(*texts), "worst": worst, "left_out": self._left_out}

    def example_pictures(self, objective: Objective, batch: Batch) -> Mapping[str, Picture]:
        """Draws each utterance of a batch as a spectrogram above the probabilities of symbols."""
        assert isinstance(objective, SpeechObjective)
        front_end = objective.model.front_end
        features, num_frames = front_end(batch["audio"], batch["num_samples"])
        found = objective.recognise(batch)
        said, decoded = (self._read(ids) for ids in (batch["targets"], objective.decode(found)))
        return {
            "utterances": draw_utterances(
                features,
                num_frames,
                *found,
                self.alphabet.symbols,
                said=said,
                decoded=decoded,
                frames_per_second=self.sample_rate / front_end.hop,
            )
        }

    def exported(self, objective: Objective, batch: Batch) -> Exported:
        """Exports the model, which maps audio of any length to log-probabilities and each utterance's frame count."""
        assert isinstance(objective, SpeechObjective)
        inputs = {name: batch[name] for name in ("audio", "num_samples")}
        expected = objective.model(*inputs.values())
        return Exported(RecogniserOfAnyLength(objective.model), inputs, expected, {"audio": (1,)})

    # --- recognising --------------------------------------------------------------------------------------------

    def new_data(self, path: Path) -> KeyedDataset:
        """Reads a recording, or all recordings in a folder and its subfolders."""
        self._new = read_recordings(path, self.sample_rate, self.config.on_bad)
        return Utterances(self._new, np.arange(len(self._new)), None)

    def sample(self) -> bytes:
        """Returns the first test recording as a WAV file."""
        audio = self.corpus.utterance(int(self._splits["test"].indices[0]))
        with io.BytesIO() as file:
            with wave.open(file, "wb") as out:
                out.setparams((1, audio.itemsize, self.corpus.sample_rate, len(audio), "NONE", ""))
                out.writeframes(audio.tobytes())
            return file.getvalue()

    def predictions(self, objective: Objective, batch: Batch) -> Mapping[str, Sequence[Any]]:
        """Returns each recording's transcript, its words with times in seconds, and confidences in [0, 1].

        The confidence of a recording is the lowest confidence of its words, or "" if it has no words.
        """
        assert isinstance(objective, SpeechObjective) and self._new is not None
        texts = self._decoder.aligned(objective.recognise(batch))
        seconds = (batch["num_samples"] / self.sample_rate).tolist()
        words = [
            timed_words(text, self.alphabet, objective.model.frame_s, duration_s)
            for text, duration_s in zip(texts, seconds, strict=True)
        ]
        return {
            "file": [_as_text(self._new.names[i]) for i in batch["index"].tolist()],
            "seconds": [f"{duration:.2f}" for duration in seconds],
            "text": [" ".join(self.alphabet.decode(text.ids).split()) for text in texts],
            "confidence": [f"{min(word.confidence for word in own):.4f}" if own else "" for own in words],
            "words": ["; ".join(map(str, own)) for own in words],
        }
