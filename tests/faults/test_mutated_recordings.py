"""Damaged recordings of motion and speech are read, skipped, or refused with a message of one line."""

import json
import time
import warnings
from io import BytesIO

import numpy as np
import pytest

from data.har.own_recordings import OwnFormat, load_own_recordings
from data.har.recording import read_new_windows
from data.har.windows import WindowFormat
from data.speech.reader import load_corpus, read_recordings
from tests.data.speech.conftest import riff
from tests.helpers.mutations import mutations
from trainer.common.errors import UserError

LONGEST_S = 5.0
"""Seconds that reading one file may take on a busy machine."""
OWN = OwnFormat(subject_column=None, label_column=None, channels=None, length=8, hop=4)
LABELLED = WindowFormat(("acc_x", "acc_y"), ("sit", "walk"), length=8, hop=4, rate_hz=50)


def csv_of_people() -> bytes:
    lines = ["time,acc_x,acc_y,battery,subject,activity"]
    for k in range(60):
        clock = f"31/05/2024 18:30:{k / 50:06.3f}" if k >= 30 else f"2024-05-31T18:29:{k / 50:06.3f}"
        lines.append(f"{clock},{k * 7 % 5 / 4},{k * 3 % 7},{99 - k // 9},{1 + k // 30},{('walk', 'sit')[k // 15 % 2]}")
    return "\n".join(lines).encode()


def npy_of_windows() -> bytes:
    file = BytesIO()
    np.save(file, np.random.default_rng(0).normal(size=(2, 2, 8)).astype(np.float32))
    return file.getvalue()


def wav_of_noise() -> bytes:
    return riff(3, 32, 2, np.random.default_rng(0).normal(size=60).astype("<f4").tobytes())


def manifest_of_two() -> bytes:
    entries = [{"audio_path": f"{k}.wav", "text": "a b", "duration": 0.004, "speaker": "x"} for k in range(2)]
    return "".join(f"{json.dumps(entry)}\n" for entry in entries).encode()


def read_or_refused(read, path, content) -> bool:
    """Returns whether a file with this content is read; otherwise it must be refused."""
    path.write_bytes(content)
    began = time.monotonic()
    try:
        read(path)
        return True
    except UserError as refused:
        assert "\n" not in str(refused), refused
        return False
    finally:
        assert time.monotonic() - began < LONGEST_S


KINDS = {
    "recordings.csv": (csv_of_people(), 300, lambda path: load_own_recordings(path, path.parent / "cache", OWN)),
    "new.csv": (csv_of_people(), 200, lambda path: read_new_windows(path, LABELLED)),
    "new.npy": (npy_of_windows(), 100, lambda path: read_new_windows(path, LABELLED)),
    "0.wav": (wav_of_noise(), 200, lambda path: read_recordings(path, 8000)),
    "train.jsonl": (manifest_of_two(), 200, lambda path: load_corpus(path, path.parent / "cache")),
}


@pytest.mark.parametrize("name", KINDS)
def test_damaged_files_are_read_skipped_or_refused(name, tmp_path, monkeypatch):
    for module in ("data.har.own_recordings", "data.speech.corpus"):  # writing the cache takes most of the time
        monkeypatch.setattr(f"{module}.cached_arrays", lambda cache_dir, key, build: build())
    content, count, read = KINDS[name]
    folder = tmp_path / "data"
    (folder / "cache").mkdir(parents=True)
    if name == "train.jsonl":
        for k in range(2):
            (folder / f"{k}.wav").write_bytes(wav_of_noise())
    assert read_or_refused(read, folder / name, content)
    there = {path.name for path in folder.iterdir()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        num_read = sum(read_or_refused(read, folder / name, damaged) for damaged in mutations(content, count, seed=0))
    assert 0 < num_read < count
    assert {path.name for path in folder.iterdir()} == there and [path.name for path in tmp_path.iterdir()] == ["data"]
