"""Recordings of activities, as files for `--predict`."""

from pathlib import Path

import numpy as np

from data.har.synthetic import load_synthetic_har
from data.har.windows import SIGNALS


def windows_of_a_walk(cache_dir: Path) -> np.ndarray:
    """Returns windows (14, 9, 128) of a person outside the training set; each window overlaps the previous by half."""
    recordings = load_synthetic_har(cache_dir / "lockstep")
    return recordings.signals[recordings.is_test][:14]


def save_windows(path, windows):
    np.save(path, windows)
    return path


def joined(windows):
    """Returns the recording, (rows, 9), from which the windows were cut."""
    return np.concatenate([windows[0], *(window[:, 64:] for window in windows[1:])], axis=1).T


def save_recording(path, rows, header=SIGNALS):
    np.savetxt(path, rows, delimiter=",", header=",".join(header), comments="", fmt="%.9g")
    return path
