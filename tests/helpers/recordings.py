"""Recordings to label, as files."""

from pathlib import Path

import numpy as np

from data.har.synthetic import load_synthetic_har
from data.har.windows import SIGNALS


def windows_of_a_walk(cache_dir: Path) -> np.ndarray:
    """Of one person, who was not trained on: (14, 9, 128); each begins in the middle of the one before."""
    recordings = load_synthetic_har(cache_dir / "lockstep")
    return recordings.signals[recordings.is_test][:14]


def save_windows(path, windows):
    np.save(path, windows)
    return path


def joined(windows):
    """The recording that the windows were cut from: (rows, 9)."""
    return np.concatenate([windows[0], *(window[:, 64:] for window in windows[1:])], axis=1).T


def save_recording(path, rows, header=SIGNALS):
    np.savetxt(path, rows, delimiter=",", header=",".join(header), comments="", fmt="%.9g")
    return path
