"""Small version of the published UCI HAR files: nine windows of six subjects."""

import io
import zipfile
from pathlib import Path

import numpy as np

from data.har.windows import SIGNALS, HarRecordings

# Subjects and labels of the windows of each part.
LAYOUT = {"train": ([1, 1, 3, 3, 5, 6], [1, 2, 3, 4, 5, 6]), "test": ([2, 2, 4], [6, 1, 2])}


def raw_windows(part: str) -> np.ndarray:
    num_windows = len(LAYOUT[part][0])
    rng = np.random.default_rng(num_windows)
    return rng.normal(size=(num_windows, 9, 128)) * np.arange(1, 10)[:, None] + np.arange(9)[:, None]


def write_layout(root: Path) -> Path:
    """Writes the official layout, with its fixed-width numbers and line endings."""
    for part, (subjects, labels) in LAYOUT.items():
        folder = root / part / "Inertial Signals"
        folder.mkdir(parents=True)
        (root / part / f"y_{part}.txt").write_text("".join(f"{label}\n" for label in labels))
        (root / part / f"subject_{part}.txt").write_text("".join(f"{subject}\n" for subject in subjects))
        for channel, signal in enumerate(SIGNALS):
            lines = ["".join(f"{x:16.7e}" for x in row) + "\r\n" for row in raw_windows(part)[:, channel]]
            (folder / f"{signal}_{part}.txt").write_bytes("".join(lines).encode())
    return root


def zip_folder(folder: Path, top: str) -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"__MACOSX/{top}train/._y_train.txt", b"shadow file of a Mac")
        for file in sorted(folder.rglob("*.txt")):
            archive.write(file, top + file.relative_to(folder).as_posix())
    return memory.getvalue()


def zip_in_zip(inner: bytes) -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        archive.writestr("UCI HAR Dataset.names", "about")
        archive.writestr("UCI HAR Dataset.zip", inner)
    return memory.getvalue()


def assert_is_the_layout(recordings: HarRecordings) -> None:
    signals = np.concatenate([raw_windows("train"), raw_windows("test")])
    assert recordings.signals.dtype == np.float32 and recordings.signals.shape == signals.shape
    np.testing.assert_allclose(recordings.signals, signals, rtol=1e-6)
    assert recordings.labels.tolist() == [label - 1 for part in LAYOUT.values() for label in part[1]]
    assert recordings.subjects.tolist() == [subject for part in LAYOUT.values() for subject in part[0]]
    assert recordings.is_test.tolist() == [False] * 6 + [True] * 3
    assert recordings.labels.dtype == recordings.subjects.dtype == np.int64
