"""Data sets of utterances: single recordings, or strings (concatenations) of recordings.

A batch from `__getitems__` has
    audio: (B, S) float32 in about [-1, 1], padded with zeros. num_samples: (B,) int64.
    recordings: (B, W) int64, indices of each sample's recordings in the corpus, padded with -1.
    targets: (B, U) int64, symbols, padded with 0, and target_length: (B,) int64, if there is an alphabet.
    warp, freq_masks, time_masks, masking_db: result of `Augmenter.for_front_end`, if there is augmentation.

Audio and targets are padded to `SampleKeys.padded_length`.

Random draws depend only on seed, epoch and sample, and are computed on the CPU. For data on a GPU, the GPU computes
the audio of a whole batch (see `waves`).
"""

from typing import Any, NamedTuple

import numpy as np

from data.speech import waves
from data.speech.augmentation import Augmenter, Noise, add_noise, at_duration, from_db, length_at, noise_tables
from data.speech.corpus import Corpus
from data.speech.text import Alphabet
from trainer.loading.arrays import Array, Ragged, cast
from trainer.loading.cache import Arrays
from trainer.loading.counter_random import uniform
from trainer.loading.on_device import Movable
from trainer.loading.order import SampleKeys

MOST_GAP_S = 0.4
"""Largest silence, in seconds, before, between and after a string's recordings; each length is uniformly random."""
LEVEL_DB = 3.0
"""Largest change, up or down, of the loudness of a string's recordings, in dB; each change is uniformly random."""
STRING_SNR_DB = (25.0, 40.0)
"""Limits of the signal-to-noise ratio, in dB, of white noise in a string."""

_FULL_SCALE = np.float32(2.0**-15)
_STEPS_PER_SECOND, _TARGET_STEP = 4, 32
"""On a GPU, audio is padded to multiples of 1 / _STEPS_PER_SECOND s, and targets to multiples of _TARGET_STEP."""
_STRING_STREAM = 16  # augmentation draws from other streams of the same seed


class _OfCorpus(Movable):
    """Base class of the data sets: reads recordings of a corpus and augments their audio."""

    stays = frozenset({"indices", "_durations", "_first", "_count"})

    def __init__(self, corpus: Corpus, alphabet: Alphabet | None, augmenter: Augmenter | None) -> None:
        self.corpus = corpus
        self._alphabet = alphabet
        self._augmenter = augmenter
        self._durations = np.diff(corpus.offsets)
        self._audio: Array = corpus.audio
        self._noise_tables: Array = noise_tables()

    def _recordings(self, which: np.ndarray, factors: np.ndarray) -> Array:
        """Returns recordings on the device: (m, longest), zero-padded. which: (m,), indices. factors: (m,), gains."""
        start, length = self.here(np.stack([self.corpus.offsets[which], self._durations[which]]))
        rows = Ragged(start, length, int(self._durations[which].max()))
        return cast(rows.of(self._audio), "float32") * self.here(factors * _FULL_SCALE)[:, None]

    def _batch(
        self, audio: Any, lengths: np.ndarray, recordings: np.ndarray, transcripts: list[str], keys: SampleKeys
    ) -> dict[str, Array]:
        """Builds a batch. audio: float32 arrays (length,) or, on a device, one array (B, S), padded with zeros."""
        augmenter, step = self._augmenter, self.corpus.sample_rate // _STEPS_PER_SECOND
        batch: Arrays = {"recordings": recordings}
        if self._alphabet is not None:
            symbols = [self._alphabet.encode(text) for text in transcripts]
            batch["targets"], batch["target_length"] = _padded(symbols, np.dtype(np.int64), keys, _TARGET_STEP)
        if augmenter is not None:
            batch |= augmenter.for_front_end(keys.epoch, keys.index)
        if self.device is None:
            audio = audio if augmenter is None else augmenter.audio(audio, keys.epoch, keys.index)
            batch["audio"], batch["num_samples"] = _padded(audio, np.dtype(np.float32), keys, step)
            return batch
        changes = None if augmenter is None else augmenter.changes(keys.epoch, keys.index)
        batch["num_samples"] = lengths if changes is None else length_at(lengths, changes[0])
        width = keys.padded_length(batch["num_samples"].max(), step)
        audio = waves.changed(audio, lengths, changes, width, self._noise_tables, self.here)
        return {name: self.here(values) for name, values in batch.items()} | {"audio": audio}


class Utterances(_OfCorpus):
    """Data set of utterances of a corpus, one per sample."""

    def __init__(
        self, corpus: Corpus, indices: np.ndarray, alphabet: Alphabet | None, augmenter: Augmenter | None = None
    ) -> None:
        """Creates the data set. indices: (n,) int64, utterances to use. alphabet: None means no targets."""
        super().__init__(corpus, alphabet, augmenter)
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def lengths(self, epoch: int) -> np.ndarray:
        """Returns the lengths of all utterances in an epoch, in samples: (n,) int64."""
        lengths = self._durations[self.indices]
        return lengths if self._augmenter is None else self._augmenter.lengths(lengths, epoch, np.arange(len(self)))

    def transcripts(self, index: np.ndarray) -> list[str]:
        return [self.corpus.transcripts[i] for i in self.indices[index]]

    def __getitems__(self, keys: SampleKeys) -> dict[str, Array]:
        which = self.indices[keys.index]
        if self.device is None:
            audio = [self.corpus.utterance(i) * _FULL_SCALE for i in which]
        else:
            audio = self._recordings(which, np.ones(len(which), np.float32))
        return self._batch(audio, self._durations[which], which[:, None], self.transcripts(keys.index), keys)


class _Plan(NamedTuple):
    """Composition of n strings; W is the largest number of recordings in a string.

    recordings: (n, W) int64, indices in the corpus. is_word: (n, W) bool, False for padding.
    percent: (n, W) int64, new duration of each recording in percent.
    gaps: (n, W + 1) int64, samples of silence before each recording and after the last one.
    level: (n, W) float32, factors on the amplitude. noise: (n,), noise in strings.
    room: (n, W), noise in recordings, or None.
    """

    recordings: np.ndarray
    is_word: np.ndarray
    percent: np.ndarray
    gaps: np.ndarray
    level: np.ndarray
    noise: Noise
    room: Noise | None


class Strings(_OfCorpus):
    """Data set of strings: joined recordings of one speaker with gaps and light noise, drawn again in each epoch.

    Evaluation always uses epoch 0, so evaluation strings depend only on the seed.
    """

    def __init__(
        self,
        corpus: Corpus,
        indices: np.ndarray,
        alphabet: Alphabet | None,
        augmenter: Augmenter | None = None,
        *,
        num_words: tuple[int, int] = (3, 7),
        num_strings: int,
        seed: int,
        growing_epochs: int = 0,
    ) -> None:
        """Creates the data set. indices: (n,) int64, at least one, recordings of the corpus to use.

        alphabet: None means no targets. num_words: smallest and largest number of recordings per string, at least 1.
        num_strings: samples per epoch. growing_epochs: number of epochs in which strings grow from single recordings to
        their full length.
        """
        super().__init__(corpus, alphabet, augmenter)
        self._num_words = num_words
        self._num_strings = num_strings
        self._seed = seed
        self._growing_epochs = growing_epochs
        # sorts recordings by speaker, and finds where each speaker's recordings begin and how many there are
        speakers = np.array([corpus.speakers[i] for i in indices])
        order = np.argsort(speakers, kind="stable")
        _, first, inverse, counts = np.unique(
            speakers[order], return_index=True, return_inverse=True, return_counts=True
        )
        self.indices = indices[order]
        self._first, self._count = first[inverse], counts[inverse]

    def __len__(self) -> int:
        return self._num_strings

    def lengths(self, epoch: int) -> np.ndarray:
        """Returns the lengths of all strings in an epoch, in samples: (n,) int64."""
        index = np.arange(len(self))
        lengths = self._lengths(self._plan(epoch, index))
        return lengths if self._augmenter is None else self._augmenter.lengths(lengths, epoch, index)

    def transcripts(self, index: np.ndarray, epoch: int = 0) -> list[str]:
        return self._joined(self._plan(epoch, index))

    def __getitems__(self, keys: SampleKeys) -> dict[str, Array]:
        plan = self._plan(keys.epoch, keys.index)
        if self.device is None:
            audio: Any = [self._string(plan, row) for row in range(len(keys.index))]
        else:
            audio = self._strings(plan)
        recordings = np.where(plan.is_word, plan.recordings, -1)
        return self._batch(audio, self._lengths(plan), recordings, self._joined(plan), keys)

    def _lengths_of_words(self, plan: _Plan) -> np.ndarray:
        """Returns the lengths of recordings in samples, (n, W) int64; 0 where the string has no recording."""
        return length_at(self._durations[plan.recordings], plan.percent) * plan.is_word

    def _lengths(self, plan: _Plan) -> np.ndarray:
        """Returns the lengths of strings in samples, before augmentation: (n,) int64."""
        return self._lengths_of_words(plan).sum(axis=1) + plan.gaps.sum(axis=1)

    def _plan(self, epoch: int, index: np.ndarray) -> _Plan:
        width = self._num_words[1]
        draws = uniform(self._seed, epoch, index, (3 * width + 4,), _STRING_STREAM).astype(np.float64)
        number, noise, which, gap, level = np.split(draws, [1, 3, 3 + width, 4 + 2 * width], axis=1)
        grown = min(1.0, epoch / self._growing_epochs) if self._growing_epochs else 1.0
        fewest, most = (1 + round(grown * (limit - 1)) for limit in self._num_words)
        num_words = fewest + np.floor((most - fewest + 1) * number).astype(np.int64)
        word = np.arange(width + 1)
        # The first recording is uniform among all and determines the speaker, so the probability of a speaker is
        # proportional to the number of the speaker's recordings.
        leader = (which[:, :1] * len(self.indices)).astype(np.int64)
        others = self._first[leader] + (which[:, 1:] * self._count[leader]).astype(np.int64)
        percent, room = np.full((len(index), width), 100), None
        if self._augmenter is not None:
            percent = self._augmenter.word_percent(epoch, index, width)
            room = self._augmenter.rooms(epoch, index, width)
        gaps = (gap * (MOST_GAP_S * self.corpus.sample_rate)).astype(np.int64)
        return _Plan(
            self.indices[np.concatenate([leader, others], axis=1)],
            word[:-1] < num_words,
            percent,
            np.where(word <= num_words, gaps, 0),
            from_db(LEVEL_DB * (2 * level - 1)),
            Noise.drawn(STRING_SNR_DB, noise[:, 0], noise[:, 1], np.zeros(len(index))),
            room,
        )

    def _string(self, plan: _Plan, row: int) -> np.ndarray:
        is_word, gaps = plan.is_word[row], plan.gaps[row]
        words = [
            at_duration(self.corpus.utterance(i) * (factor * _FULL_SCALE), percent)
            for i, percent, factor in zip(
                plan.recordings[row, is_word], plan.percent[row], plan.level[row], strict=False
            )
        ]
        if plan.room is not None and np.isfinite(plan.room.snr_db[row, 0]):
            for word, noise in zip(words, zip(*(part[row] for part in plan.room), strict=True), strict=False):
                add_noise(word, *noise)
        audio = np.zeros(sum(map(len, words)) + gaps.sum(), np.float32)
        end = 0
        for word, gap in zip(words, gaps, strict=False):
            start = end + gap
            end = start + len(word)
            audio[start:end] = word
        add_noise(audio, *(part[row] for part in plan.noise))
        return audio

    def _strings(self, plan: _Plan) -> Array:
        """Computes the audio of all strings on the device: (n, longest) float32."""
        is_word, tables, here = plan.is_word, self._noise_tables, self.here
        which, of_words, lengths = plan.recordings[is_word], self._lengths_of_words(plan), self._lengths(plan)
        before, after, width = self._durations[which], of_words[is_word], int(lengths.max())
        words = self._recordings(which, plan.level[is_word])
        words = waves.at_durations(words, before, plan.percent[is_word], int(after.max()), here)
        if plan.room is not None:
            words = waves.noisy(words, after, Noise(*(part[is_word] for part in plan.room)), tables, here)
        begin = width * np.arange(len(lengths))[:, None] + np.cumsum(plan.gaps[:, :-1] + of_words, axis=1) - of_words
        strings = waves.joined(words, after, begin[is_word], (len(lengths), width), here)
        return waves.noisy(strings, lengths, plan.noise, tables, here)

    def _joined(self, plan: _Plan) -> list[str]:
        return [
            " ".join(self.corpus.transcripts[i] for i in row[is_word])
            for row, is_word in zip(plan.recordings, plan.is_word, strict=True)
        ]


def _padded(rows: list[np.ndarray], dtype: np.dtype, keys: SampleKeys, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Stacks rows (length,), padded with zeros, to (n, padded length); also returns their lengths, (n,) int64."""
    lengths = np.array([len(row) for row in rows])
    padded = np.zeros((len(rows), keys.padded_length(lengths.max(initial=0), step)), dtype)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded, lengths
