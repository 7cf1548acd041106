"""Permuted sequential MNIST: classifies handwritten digits from their pixels in a fixed random order.

    python main.py --task examples/psmnist.py:PermutedPixels --data-dir mnist

A parallel Legendre Memory Unit reads all 784 pixels, and its last state is classified. Layer sizes are taken from
github.com/hrshtv/pytorch-lmu. Chilkuri and Eliasmith (ICML 2021) report an accuracy of 98.49 % for such a layer.
"""

import gzip
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import Batch, FlagGroup, Objective, SampleKeys, Sums, Task, UserError, flag
from models.speech.parallel_lmu import ParallelLMU

NUM_PIXELS, NUM_DIGITS = 784, 10
ORDER = np.random.default_rng(0).permutation(NUM_PIXELS)
ADDRESS = "https://ossci-datasets.s3.amazonaws.com/mnist/"


@dataclass
class PixelFlags(FlagGroup):
    """Task: permuted sequential MNIST"""

    data_dir: Path | None = flag(None, f"folder of MNIST's four files, compressed or not, from {ADDRESS}", local=True)
    num_val: int = flag(10_000, "training images held out for validation, from the end of the set", at_least=1)
    hidden_size: int = flag(346, "width of the LMU layer's hidden state", at_least=1)
    memory_size: int = flag(468, "size of the LMU layer's memory", at_least=1)
    dropout: float = flag(0.5, "dropout probability before the classifier", at_least=0, below=1)

    def problems(self) -> list[str]:
        if self.data_dir is None:
            return [f"--data-dir: give a folder with the four files of MNIST, which are available at {ADDRESS}"]
        return []


class Pixels:
    """Data set of images as permuted sequences, (n, 784) uint8, and their digits, (n,) int64."""

    def __init__(self, pictures: np.ndarray, digits: np.ndarray) -> None:
        self.pixels, self.digits = pictures.reshape(-1, NUM_PIXELS)[:, ORDER], digits.astype(np.int64)

    def __len__(self) -> int:
        return len(self.digits)

    def __getitems__(self, keys: SampleKeys) -> dict[str, np.ndarray]:
        return {"pixels": self.pixels[keys.index], "digit": self.digits[keys.index]}


def read_idx(folder: Path, name: str, num_axes: int) -> np.ndarray:
    """Reads a byte array in MNIST's format: bytes 0, 0, 8 and the number of axes, the size of each axis, the data."""
    found = [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
    if not found:
        raise UserError(f"--data-dir {folder}: has neither {name} nor {name}.gz; download the file from {ADDRESS}")
    try:
        data = gzip.decompress(found[0].read_bytes()) if found[0].suffix == ".gz" else found[0].read_bytes()
        shape = np.frombuffer(data, ">i4", num_axes, offset=4)
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"--data-dir: {found[0]} cannot be read ({error}); download it again from {ADDRESS}") from None
    start = 4 + 4 * num_axes
    if data[:4] != bytes([0, 0, 8, num_axes]) or len(data) - start != math.prod(shape.tolist()):
        raise UserError(
            f"--data-dir: {found[0]} is not the MNIST file of this name, or is incomplete; download it from {ADDRESS}"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


class PixelReader(nn.Module):
    """Computes logits, (B, 10), from pixels, (B, 784) in [0, 1]; has 166,092 parameters by default."""

    def __init__(self, hidden_size: int, memory_size: int, dropout: float) -> None:
        super().__init__()
        self.lmu = ParallelLMU(1, hidden_size, memory_size, theta=NUM_PIXELS)
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(hidden_size, NUM_DIGITS))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.classifier(self.lmu.last(pixels.unsqueeze(2)))


class PixelObjective(Objective):
    def forward(self, batch: Batch, phase: str = "train") -> Sums:
        logits = self.model(batch["pixels"].float() / 255)
        loss = F.cross_entropy(logits, batch["digit"], reduction="sum")
        return {"loss": loss, "correct": (logits.argmax(dim=1) == batch["digit"]).sum()}


class PermutedPixels(Task):
    Config = PixelFlags
    monitor = ("val/accuracy", "max")
    defaults = {"epochs": 15, "batch_size": 100, "lr": 1e-3, "weight_decay": 0.0, "eval_batch_size": 1000}

    def splits(self) -> Mapping[str, Pixels]:
        return self._splits

    @cached_property
    def _splits(self) -> Mapping[str, Pixels]:
        folder, num_val = self.config.data_dir, self.config.num_val
        train, test = (
            (read_idx(folder, f"{part}-images-idx3-ubyte", 3), read_idx(folder, f"{part}-labels-idx1-ubyte", 1))
            for part in ("train", "t10k")
        )
        if num_val >= len(train[0]):
            raise UserError(
                f"--num-val {num_val}: leaves none of the {len(train[0])} images for training; hold out fewer"
            )
        return {
            "train": Pixels(train[0][:-num_val], train[1][:-num_val]),
            "val": Pixels(train[0][-num_val:], train[1][-num_val:]),
            "test": Pixels(*test),
        }

    def build_objective(self) -> Objective:
        return PixelObjective(PixelReader(self.config.hidden_size, self.config.memory_size, self.config.dropout))

    def summarise(self, sums: dict[str, Tensor]) -> dict[str, float]:
        return {name: float(sums[key] / sums["weight"]) for name, key in (("loss", "loss"), ("accuracy", "correct"))}
