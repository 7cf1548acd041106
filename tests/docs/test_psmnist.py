"""Trains examples/psmnist.py on bright and dark pictures in MNIST's format."""

import gzip
import json

import numpy as np
import pytest

from examples.psmnist import PixelReader, read_idx
from trainer.common.errors import UserError

TASK = ["--task", "examples/psmnist.py:PermutedPixels", "--num-threads", 1]


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()


@pytest.fixture
def mnist(tmp_path):
    """Writes bright pictures (digit 3) and dark ones (digit 7). The test set is compressed."""
    for part, size in (("train", 240), ("t10k", 60)):
        rng = np.random.default_rng(size)
        is_bright = rng.integers(2, size=size)
        pictures = (rng.integers(100, size=(size, 28, 28)) + 120 * is_bright[:, None, None]).astype(np.uint8)
        digits = np.where(is_bright, 3, 7).astype(np.uint8)
        for name, array in (("images-idx3", pictures), ("labels-idx1", digits)):
            path = tmp_path / f"{part}-{name}-ubyte"
            if part == "train":
                path.write_bytes(idx(array))
            else:
                path.with_name(path.name + ".gz").write_bytes(gzip.compress(idx(array)))
    return tmp_path


def train(run_here, mnist, *flags):
    sizes = ("--num-val", 40, "--hidden-size", 16, "--memory-size", 12, "--dropout", 0, "--epochs", 6)
    run_here(*TASK, "--data-dir", mnist, *sizes, "--batch-size", 10, "--lr", 0.01, "--save-dir", mnist / "run", *flags)
    return json.loads((mnist / "run" / "results.json").read_text())["metrics"]


def test_learns_to_distinguish_two_classes(run_here, mnist):
    assert train(run_here, mnist)["test/accuracy"] > 0.95


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda path: path.unlink(), "has neither t10k-labels-idx1-ubyte nor"),
        (lambda path: path.write_bytes(path.read_bytes()[:-20]), "cannot be read"),
        (lambda path: path.write_bytes(gzip.compress(b"\0\0")), "cannot be read"),
        (lambda path: path.write_bytes(gzip.compress(idx(np.zeros((3, 2), np.uint8)))), "is not the MNIST file of"),
        (lambda path: path.write_bytes(gzip.compress(idx(np.zeros(9, np.uint8))[:-1])), "or is incomplete"),
    ],
)
def test_damaged_files_are_named(mnist, break_it, reason):
    break_it(mnist / "t10k-labels-idx1-ubyte.gz")
    with pytest.raises(UserError, match=reason) as caught:
        read_idx(mnist, "t10k-labels-idx1-ubyte", 1)
    assert "https://" in str(caught.value)


def test_missing_data_are_refused_with_their_url(run_here):
    assert "four files of MNIST, which are available at https://" in run_here(*TASK, status=2).err


def test_a_validation_set_of_all_pictures_is_refused(run_here, mnist):
    printed = run_here(*TASK, "--data-dir", mnist, "--num-val", 240, "--save-dir", mnist / "run", status=2)
    assert "--num-val 240: leaves none of the 240" in printed.err


def test_the_model_has_the_published_size():
    assert sum(parameter.numel() for parameter in PixelReader(346, 468, 0.5).parameters()) == 166_092
