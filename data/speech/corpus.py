"""Recorded utterances with transcripts."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from trainer.loading.cache import Arrays, cached_arrays

_TEXTS = ("transcripts", "names", "speakers", "splits")


@dataclass(frozen=True)
class Corpus:
    """n mono utterances with the same sample rate.

    audio: (total,) int16, all utterances. offsets: (n + 1,) int64; utterance i is audio[offsets[i] : offsets[i + 1]]
        and not empty. sample_rate: samples per second.
    transcripts: as published, with normalised white space; all "" if unknown. names: distinct file names. speakers: ""
        if unknown. splits: "train", "val", "test", or "" if the source has no splits.
    skipped: number of dropped utterances by reason.
    found: rows of the table at the start of a run's output, such as where transcripts were found; {} if synthetic.
    """

    audio: np.ndarray
    offsets: np.ndarray
    sample_rate: int
    transcripts: tuple[str, ...]
    names: tuple[str, ...]
    speakers: tuple[str, ...]
    splits: tuple[str, ...]
    skipped: Mapping[str, int]
    found: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.names)

    def utterance(self, i: int) -> np.ndarray:
        """Returns the samples of utterance i, (length,) int16."""
        return self.audio[self.offsets[i] : self.offsets[i + 1]]


def cached_corpus(cache_dir: Path, key: str, build: Callable[[], Corpus]) -> Corpus:
    """Returns the corpus cached under a key, memory-mapped; builds and caches it if absent."""
    arrays = cached_arrays(cache_dir, key, lambda: _to_arrays(build()))
    facts = json.loads(arrays["facts"].tobytes())
    return Corpus(
        audio=arrays["audio"],
        offsets=arrays["offsets"],
        sample_rate=facts["sample_rate"],
        skipped=facts["skipped"],
        found=facts.get("found", {}),  # older caches of synthetic corpora lack this
        **{name: tuple(facts[name]) for name in _TEXTS},
    )


def _to_arrays(corpus: Corpus) -> Arrays:
    # JSON, since in an array of text every transcript would take the memory of the longest transcript
    facts = {name: getattr(corpus, name) for name in ("sample_rate", "skipped", "found", *_TEXTS)}
    text = json.dumps(facts).encode()
    return {"audio": corpus.audio, "offsets": corpus.offsets, "facts": np.frombuffer(text, np.uint8)}
