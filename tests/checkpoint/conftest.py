import pytest
import torch

from trainer.checkpoint.directory import RunDirectory


@pytest.fixture
def opened(tmp_path):
    """Opens the run directory as a new start does, with what it says as a list; releases it at the end."""
    directories = []

    def open_directory(keep=3):
        said = []
        directory = RunDirectory(tmp_path / "run", keep, said.append)
        directory.acquire()
        directories.append(directory)
        return directory, said

    yield open_directory
    for directory in directories:
        directory.release()


def save(directory, epoch, best_epoch=1):
    """A small checkpoint at the end of an epoch; `best_epoch` is the best one so far."""
    is_best = epoch == best_epoch
    state = {
        "model": {"weight": torch.full((50,), float(epoch))},
        "optimizers": {},
        "totals": {},
        "environment": {},
        "position": {"epoch": epoch, "phase": 0, "samples": 0},
        "step": 10 * epoch,
        "best": {"epoch": best_epoch, "value": 0.5},
        "config": {"--resume-from": None},
    }
    return directory.save(state, 0.5 if is_best else 0.25, is_best)


def names(path, pattern="*.pth"):
    return {file.name for file in path.glob(pattern)}


def checkpoints(path):
    return names(path, "checkpoint_*.pth")
