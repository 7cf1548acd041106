"""Reads corpora of recorded speech, and recordings to recognise."""

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from data.files import ARCHIVE_ERRORS, is_visible
from data.speech.audio_files import FULL_SCALE, SUFFIXES, UnreadableAudio, decode, resample, to_int16, within_full_scale
from data.speech.corpus import Corpus, cached_corpus
from data.speech.layouts import Utterance, manifest_sound, utterances_of
from data.speech.sources import MOST_SOUND, Source, find, is_archive, opened
from data.speech.text import normalise
from data.table_files import LeftOut, OnBad, Reading
from trainer.common.errors import UserError
from trainer.common.files import read_whole, refusing_disk_errors, stamp
from trainer.loading.cache import key_of

Progress = Callable[[Iterable[Any], int], Iterable[Any]]
"""Function that shows the progress of an iteration: (items, number of items) -> the same items."""

_FORMAT_VERSION = 3
DROP = Reading(on_bad="drop")
_DURATION_TOLERANCE = 0.5
_ADVICE = "fix it, or skip unusable files with --on-bad drop"


def load_corpus(
    path: Path,
    cache_dir: Path,
    *,
    sample_rate: int | None = None,
    reading: Reading = DROP,
    progress: Progress = lambda things, _: things,
) -> Corpus:
    """Reads a corpus; the decoded audio is cached and takes 2 bytes per sample.

    path: a folder, .zip, .tar, .tar.gz or .tgz in a layout that `utterances_of` knows; a manifest; or a folder that
        contains one archive and no sound files.
    sample_rate: rate in Hz to which all files are resampled; None: the files' most frequent rate or, among equally
        frequent rates, the highest.
    reading: `on_bad` says whether to raise UserError at the first unusable utterance, or to drop and count them. An
        utterance is unusable if its file is missing, unreadable or empty, if it has no readable transcript, or if its
        duration differs from the manifest's by more than half.

    Raises UserError, with file, line and value, for an invalid corpus, for a recording that is listed twice, and if no
    utterance is usable.
    """
    path = find(path)
    key = key_of("speech", _FORMAT_VERSION, _stamps(path, cache_dir), sample_rate, reading)

    def build() -> Corpus:
        with opened(path, cache_dir, LeftOut(reading)) as source:
            return _read(source, cache_dir, sample_rate, progress)

    return cached_corpus(cache_dir, key, build)


def read_recordings(path: Path, sample_rate: int, on_bad: OnBad = "drop") -> Corpus:
    """Reads the recordings given by `--predict`, which have no transcripts.

    path: a sound file, or a folder with sound files at any depth; names are relative to the folder. sample_rate: rate
    in Hz to which all files are resampled. on_bad: whether to drop and count unusable files of a folder, or to refuse
    the first one. Raises UserError if a single file is unusable, or if a folder contains no usable file.
    """
    folder, names, advice = path.parent, [path.name], "give a readable recording"
    left_out = LeftOut()
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.name.lower().endswith(SUFFIXES))
        names = [name for file in found if is_visible(name := file.relative_to(path).as_posix())]
        folder, left_out, advice = path, LeftOut(Reading(on_bad=on_bad)), _ADVICE
    if not names:
        raise UserError(
            f"--predict {path}: contains no sound files ({', '.join(SUFFIXES)}); give a file or folder of recordings"
        )
    sound, loud = {}, []
    for name in names:
        try:
            sound[name], is_loud = _read_recording(folder / name, sample_rate)
            loud += [name] * is_loud
        except UnreadableAudio as error:
            left_out.add(name, f"--predict {folder / name}: {error}; {advice}", str(error))
    if not sound:
        raise UserError(f"--predict {path}: none of its {len(names)} recordings can be used: {_reasons(left_out)}")
    unknown = ("",) * len(sound)
    return Corpus(
        audio=np.concatenate(list(sound.values())),
        offsets=_offsets([len(samples) for samples in sound.values()]),
        sample_rate=sample_rate,
        transcripts=unknown,
        names=tuple(sound),
        speakers=unknown,
        splits=unknown,
        skipped=left_out.counts(),
        found=_too_loud(loud),
    )


def _too_loud(names: Sequence[str]) -> dict[str, str]:
    """Returns a row about scaled-down recordings for the table at the start of a run's output."""
    return (
        {"beyond full scale": f"{len(names)} file{'s' * (len(names) > 1)}, scaled down, such as {names[0]}"}
        if names
        else {}
    )


def _read_recording(file: Path, sample_rate: int) -> tuple[np.ndarray, bool]:
    """Returns a non-empty recording, (length,) int16, and whether it was scaled down. May raise UnreadableAudio."""
    try:
        samples, rate = decode(read_whole(file, MOST_SOUND), file.name)
    except OSError as error:
        raise UnreadableAudio(f"cannot be read: {error.strerror or error}") from None
    if not len(samples):
        raise UnreadableAudio("has no samples")
    samples, is_loud = within_full_scale(samples)
    return to_int16(resample(samples, rate, sample_rate)), is_loud


def _stamps(path: Path, cache_dir: Path) -> list[object]:
    """Returns values that change when a file changes, appears or disappears."""
    if is_archive(path):
        return [stamp(path)]
    with opened(path, cache_dir, LeftOut()) as source:
        return [_stamp(os.path.join(source.path, name)) for name in sorted({*source.names, *manifest_sound(source)})]


def _stamp(file: str) -> tuple[str, int, int] | None:
    """Returns path, size and modification time, like the slower `stamp`; returns None for a missing file."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return file, status.st_size, status.st_mtime_ns


def _read(source: Source, cache_dir: Path, sample_rate: int | None, progress: Progress) -> Corpus:
    what, utterances = utterances_of(source)
    if not utterances:
        raise UserError(f"{source.where()}: lists no utterances; add a line for each recording")
    _refuse_repeated(source, utterances)
    left_out = source.left_out
    # temporary files instead of memory, for corpora of any length
    with (
        refusing_disk_errors(f"--cache-dir {cache_dir}", "choose a folder with room for the decoded sound"),
        tempfile.TemporaryFile(dir=cache_dir) as decoded,
        tempfile.TemporaryFile(dir=cache_dir) as resampled,
    ):
        kept, lengths, rates, loud = [], [], [], []
        of_files: Counter[int] = Counter()
        for utterance in progress(utterances, len(utterances)):
            try:
                samples, rate = _decode(source, utterance)
            except UnreadableAudio as error:
                left_out.add(utterance.name, f"{source.where(utterance.name)}: {error}; {_ADVICE}", str(error))
                continue
            samples, is_loud = within_full_scale(samples)
            loud += [utterance.name] * is_loud
            of_files[rate] += 1
            if sample_rate is not None:
                samples, rate = resample(samples, rate, sample_rate), sample_rate
            decoded.write(to_int16(samples).tobytes())
            kept.append(utterance)
            lengths.append(len(samples))
            rates.append(rate)
        if not kept:
            raise UserError(
                f"{source.where()}: none of its {len(utterances)} utterances can be used: {_reasons(left_out)}"
            )
        audio, offsets, rate = _at_one_rate(decoded, lengths, rates, resampled)
        return Corpus(
            audio=audio,
            offsets=offsets,
            sample_rate=rate,
            transcripts=tuple(" ".join(utterance.transcript.split()) for utterance in kept),
            names=tuple(utterance.name for utterance in kept),
            speakers=tuple(utterance.speaker for utterance in kept),
            splits=tuple(utterance.split for utterance in kept),
            skipped=left_out.counts(),
            found={
                "transcripts": f"{what}, such as {' '.join(kept[0].transcript.split())!r}",
                "sample rate": ", ".join(f"{hz} Hz ({count} files)" for hz, count in of_files.most_common()),
                **_too_loud(loud),
                **({"encoding": left_out.note} if left_out.note else {}),
            },
        )


def _refuse_repeated(source: Source, utterances: Sequence[Utterance]) -> None:
    """Raises UserError for a recording that is listed twice, since it could be in two splits."""
    for name, count in Counter(utterance.name for utterance in utterances).items():
        if count > 1:
            raise UserError(f"{source.where(name)}: occurs {count} times; list each recording once")


def _decode(source: Source, utterance: Utterance) -> tuple[np.ndarray, int]:
    """Returns an utterance's samples and sample rate. Raises UnreadableAudio if the utterance is unusable."""
    if utterance.problem:
        raise UnreadableAudio("has an unreadable transcript")
    if not normalise(utterance.transcript):
        raise UnreadableAudio("has no transcript")
    try:
        samples, rate = decode(source.read(utterance.name), utterance.name)
    except KeyError:
        raise UnreadableAudio("is not in the archive") from None
    except ARCHIVE_ERRORS as error:
        # archive errors contain the file name, but equal reasons must count as one
        reason = getattr(error, "strerror", None) or "the archive is damaged"
        raise UnreadableAudio(f"cannot be read: {reason}") from None
    if not len(samples):
        raise UnreadableAudio("has no samples")
    said = utterance.duration
    if said is not None and abs(len(samples) / rate - said) > _DURATION_TOLERANCE * said:
        raise UnreadableAudio("does not have the duration given in the manifest")
    return samples, rate


def _reasons(left_out: LeftOut) -> str:
    return "; ".join(f"{reason} ({count})" for reason, count in left_out.counts().items())


def _at_one_rate(
    decoded: IO[bytes], lengths: Sequence[int], rates: Sequence[int], resampled: IO[bytes]
) -> tuple[np.ndarray, np.ndarray, int]:
    """Resamples to the most frequent rate; returns samples, offsets and this rate. resampled: file for the result."""
    audio, offsets, counts = _mapped(decoded), _offsets(lengths), Counter(rates)
    rate = max(counts, key=lambda rate: (counts[rate], rate))
    if len(counts) == 1:
        return audio, offsets, rate
    lengths = []
    for first, last, old_rate in zip(offsets[:-1], offsets[1:], rates, strict=True):
        samples = to_int16(resample(audio[first:last] / np.float32(FULL_SCALE), old_rate, rate))
        resampled.write(samples.tobytes())
        lengths.append(len(samples))
    return _mapped(resampled), _offsets(lengths), rate


def _mapped(file: IO[bytes]) -> np.ndarray:
    file.flush()
    return np.memmap(file, np.int16, mode="r")


def _offsets(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
