"""Recorded utterances with transcripts: decoded once, cached on disk, memory-mapped."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from trainer.loading.cache import Arrays, cached_arrays

_TEXTS = ("transcripts", "names", "speakers", "splits")


@dataclass(frozen=True)
class Corpus:
    """n utterances, mono, all at one rate.

    audio: (total,) int16, concatenated; offsets: (n + 1,) int64, utterance i is audio[offsets[i] : offsets[i + 1]],
        never empty. sample_rate: samples per second.
    transcripts: as published, white space collapsed; "" only if all are unknown. names: distinct file names.
    speakers: "" if unknown. splits: "train", "val", "test", or "" if the source does not say.
    skipped: reasons for dropped utterances -> their number.
    found: shown in the table at the start of a run: location of transcripts, sample rates, excessive loudness. Empty
        otherwise.
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
        """Returns the samples of one utterance, (length,) int16."""
        return self.audio[self.offsets[i] : self.offsets[i + 1]]


def cached_corpus(cache_dir: Path, key: str, build: Callable[[], Corpus]) -> Corpus:
    """Returns the corpus cached under a key, memory-mapped; builds it if absent. Like `cached_arrays`."""
    arrays = cached_arrays(cache_dir, key, lambda: _to_arrays(build()))
    facts = json.loads(arrays["facts"].tobytes())
    return Corpus(
        audio=arrays["audio"],
        offsets=arrays["offsets"],
        sample_rate=facts["sample_rate"],
        skipped=facts["skipped"],
        found=facts.get("found", {}),  # older versions did not store it for synthetic corpora
        **{name: tuple(facts[name]) for name in _TEXTS},
    )


def _to_arrays(corpus: Corpus) -> Arrays:
    # arrays of text would give each transcript the size of the longest
    facts = {name: getattr(corpus, name) for name in ("sample_rate", "skipped", "found", *_TEXTS)}
    text = json.dumps(facts).encode()
    return {"audio": corpus.audio, "offsets": corpus.offsets, "facts": np.frombuffer(text, np.uint8)}
