"""Recorded utterances with what was said: decoded once, kept on disk, mapped into memory."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from trainer.loading.cache import Arrays, cached_arrays

_TEXTS = ("transcripts", "names", "speakers", "splits")


@dataclass(frozen=True)
class Corpus:
    """n utterances, one channel each, all at one rate.

    audio: (total,) int16, one utterance after another; offsets: (n + 1,) int64, utterance i is audio[offsets[i] :
        offsets[i + 1]], never empty. sample_rate: samples per second.
    transcripts: as published, runs of white space made one space; "" only where none are known. names: of the files,
        different from each other.
    speakers: "" where unknown. splits: "train", "val", "test", or "" where the source does not say.
    skipped: why utterances were left out, in words -> how many.
    found: what was found, for the table that a run begins with: where the transcripts are, which rates, what is too
        loud. Empty where nobody asks.
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
        """The samples of one utterance, (length,) int16."""
        return self.audio[self.offsets[i] : self.offsets[i + 1]]


def cached_corpus(cache_dir: Path, key: str, build: Callable[[], Corpus]) -> Corpus:
    """The corpus stored under the key, memory-mapped; built first where there is none. As `cached_arrays`."""
    arrays = cached_arrays(cache_dir, key, lambda: _to_arrays(build()))
    facts = json.loads(arrays["facts"].tobytes())
    return Corpus(
        audio=arrays["audio"],
        offsets=arrays["offsets"],
        sample_rate=facts["sample_rate"],
        skipped=facts["skipped"],
        found=facts.get("found", {}),  # not kept of generated ones by older versions
        **{name: tuple(facts[name]) for name in _TEXTS},
    )


def _to_arrays(corpus: Corpus) -> Arrays:
    # Not arrays of text, in which each transcript would take the memory of the longest.
    facts = {name: getattr(corpus, name) for name in ("sample_rate", "skipped", "found", *_TEXTS)}
    text = json.dumps(facts).encode()
    return {"audio": corpus.audio, "offsets": corpus.offsets, "facts": np.frombuffer(text, np.uint8)}
