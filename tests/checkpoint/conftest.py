import os

import pytest
import torch

from tests.helpers.temporary_names import name_of
from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.manifest import Retention


@pytest.fixture
def opened(tmp_path):
    """Opens the run directory as a new start does; returns it with its messages.

    The directories are released at the end.
    """
    directories = []

    def open_directory(keep=3, keep_best=1, mode="max", name="run"):
        said = []
        directory = RunDirectory(tmp_path / name, Retention(keep, keep_best, mode), said.append)
        directory.acquire()
        directories.append(directory)
        return directory, said

    yield open_directory
    for directory in directories:
        directory.release()


class Crash(BaseException):
    """Imitates a kill, because no `except OSError` catches it."""


@pytest.fixture
def disk_operations(monkeypatch):
    """Records the real os.fsync and os.rename; `failures[n]` is raised before operation n.

    An operation is ("fsync", file name, its size) or ("rename", old name, new name).
    """
    operations = []
    failures = {}

    def wrap(name, describe):
        real = getattr(os, name)

        def call(*args, **kwargs):
            if describe(*args)[-1] == "lock":
                return real(*args, **kwargs)
            if len(operations) in failures:
                raise failures[len(operations)]
            operations.append(describe(*args))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    wrap("fsync", lambda fd: ("fsync", name_of(os.readlink(f"/proc/self/fd/{fd}")), os.fstat(fd).st_size))
    wrap("rename", lambda source, target: ("rename", name_of(source), name_of(target)))
    return operations, failures


def save(directory, epoch, best_epoch=1):
    """Saves a small checkpoint at the end of an epoch. `best_epoch` is the best one so far."""
    is_best = epoch == best_epoch
    return directory.save(
        state_at(epoch)
        | {
            "best": {"epoch": best_epoch, "step": 10 * best_epoch, "value": 0.5},
            "value": 0.5 if is_best else 0.25,
            "is_best": is_best,
        }
    )


def state_at(epoch, samples=0):
    """Returns the entries of a small checkpoint without scores."""
    return {
        "model": {"weight": torch.full((50,), float(epoch))},
        "optimizers": {},
        "scaler": {},
        "value": None,
        "is_best": False,
        "best": None,
        "evaluations_since_best": 0,
        "last_report": 0,
        "totals": {},
        "reported": {},
        "covered_samples": 0,
        "misses_samples": False,
        "skipped_steps": 0,
        "skipped_in_a_row": (0, 0),
        "rate_drops": 0,
        "task_state": {},
        "scores": {},
        "train_seconds": 1.0,
        "task": "har",
        "lr_factor": 1.0,
        "phase_sizes": [100],
        "batch_sizes": [10],
        "global_batch_sizes": [10],
        "data_facts": {},
        "environment": {"world_size": 1, "num_devices": 1},
        "code": {"commit": None, "changed": None, "task_file": None, "task_sha256": None},
        "run_id": "0123456789ab",
        "position": {"epoch": epoch, "phase": 0, "samples": samples, "turn": 0, "others": ()},
        "step": 10 * epoch + samples,
        "config": {
            "--epochs": None,
            "--max-steps": None,
            "--seed": 0,
            "--resume-from": None,
            "--optimizer": "adamw",
            "--dtype": "float32",
            "--drop-last": False,
        },
    }


def names(path, pattern="*.pth"):
    return {file.name for file in path.glob(pattern)}


def checkpoints(path):
    return names(path, "checkpoint_*.pth")
