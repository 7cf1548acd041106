"""Splits utterances into training, validation and test sets."""

import hashlib
from collections.abc import Collection, Sequence
from pathlib import PurePosixPath
from typing import Literal

import numpy as np

from data.speech.corpus import Corpus
from trainer.common.errors import UserError

Split = Literal["utterance", "speaker"]


def hold_out(
    corpus: Corpus,
    *,
    split: Split,
    val_share: float,
    test_share: float,
    val_speakers: Collection[str] = (),
    test_speakers: Collection[str] = (),
) -> dict[str, np.ndarray]:
    """Returns {"train", "val", "test"}: disjoint, ascending indices of utterances, (n,) int64 each.

    split: "utterance" uses the corpus's own splits; a missing "val" or "test" is a share of the training utterances,
    chosen by hashes of names. "speaker" ignores the corpus's splits and holds out all utterances of the given
    speakers or, if none are given, of a share of speakers, chosen by hashes of names.

    val_share, test_share: 0 <= share < 1; a share above 0 holds out at least one utterance or speaker.

    Raises UserError if a speaker is unknown or held out twice, or if no utterance is left for training.
    """
    if split == "utterance":
        parts = _by_utterance(corpus, val_share, test_share)
    else:
        parts = _by_speaker(corpus, val_share, test_share, val_speakers, test_speakers)
    chosen = {part: np.flatnonzero(parts == part).astype(np.int64) for part in ("train", "val", "test")}
    if not len(chosen["train"]):
        raise UserError(
            f"--split {split}: holds out all {len(corpus)} utterances ({len(chosen['val'])} for validation, "
            f"{len(chosen['test'])} for testing), so none are left for training; hold out fewer"
        )
    return chosen


def speaker_folds(corpus: Corpus, num_folds: int) -> list[list[str]]:
    """Assigns the sorted speakers to folds in rotation. Raises UserError for more folds than speakers."""
    speakers = _speakers(corpus, f"--folds {num_folds}", "leave the flag out")
    if not 2 <= num_folds <= len(speakers):
        raise UserError(f"--folds {num_folds}: must be from 2 to {len(speakers)}, the number of speakers")
    return [speakers[i::num_folds] for i in range(num_folds)]


def _by_utterance(corpus: Corpus, val_share: float, test_share: float) -> np.ndarray:
    parts = np.array([split or "train" for split in corpus.splits])
    order = sorted(np.flatnonzero(parts == "train").tolist(), key=lambda i: _utterance_rank(corpus.names[i]))
    shares = {"test": test_share, "val": val_share}
    first = 0
    for part, share in shares.items():
        if part not in corpus.splits:
            last = first + _num_of(share, len(order))
            parts[order[first:last]] = part
            first = last
    return parts


def _utterance_rank(name: str) -> tuple[bytes, bytes]:
    # the hash of the bare name comes first, since it is equal in a folder and in an archive of the folder
    return _hash(PurePosixPath(name).stem), _hash(name)


def _by_speaker(
    corpus: Corpus, val_share: float, test_share: float, val_speakers: Collection[str], test_speakers: Collection[str]
) -> np.ndarray:
    known = _speakers(corpus, "--split speaker", "use --split utterance")
    named = {"test": test_speakers, "val": val_speakers}
    for part, speakers in named.items():
        for stranger in sorted(set(speakers) - set(known)):
            raise UserError(f"--{part}-speakers {stranger}: no such speaker; the speakers are {', '.join(known)}")
    for speaker in sorted(set(test_speakers) & set(val_speakers)):
        raise UserError(
            f"--val-speakers {speaker}: is also in --test-speakers; name each speaker in only one of the flags"
        )
    free = sorted(set(known) - set(test_speakers) - set(val_speakers), key=_hash)
    part_of = dict.fromkeys(known, "train")
    for part, share in {"test": test_share, "val": val_share}.items():
        chosen: Sequence[str] = list(named[part]) or free[: _num_of(share, len(known))]
        free = free if named[part] else free[len(chosen) :]
        part_of.update(dict.fromkeys(chosen, part))
    return np.array([part_of[speaker] for speaker in corpus.speakers])


def _speakers(corpus: Corpus, given: str, advice: str) -> list[str]:
    """Returns the speakers, sorted. Raises UserError if an utterance has no speaker."""
    if "" in corpus.speakers:
        nameless = corpus.names[corpus.speakers.index("")]
        raise UserError(f"{given}: the speaker of {nameless} is unknown; {advice}")
    return sorted(set(corpus.speakers))


def _num_of(share: float, total: int) -> int:
    return max(1, round(share * total)) if share > 0 else 0


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()
