"""Images in tar shards, as the webdataset library writes them; all shards together may exceed the memory.

python -m examples.tar_shards shards
python main.py --task examples/tar_shards.py:TarShards --shards shards --epochs 2

A sample consists of consecutive members of an uncompressed tar with equal KEYs: KEY.npy, here (32, 32) uint8, and
KEY.cls, the class as digits. The positions of all members are indexed once and kept in --cache-dir. A sample is read
from its position when a step needs it, without unpacking the tar, and `order` chooses the samples of each step.
"""

import argparse
import io
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from hashlib import blake2b
from itertools import groupby
from pathlib import Path, PurePosixPath

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import (
    Batch,
    FlagGroup,
    Objective,
    SampleKeys,
    Sums,
    Task,
    UserError,
    cached_arrays,
    flag,
    sharded_batches,
)

SHAPE = (32, 32)
NUM_CLASSES = 4
FIELDS = ("npy", "cls")
MOST_MEMBER = 64 << 20
"""Largest size of a member, in bytes."""
MOST_HEADER = 1 << 20
END = bytes(2 * tarfile.BLOCKSIZE)
"""Last bytes of a complete tar."""


# --- positions of the samples in a shard -------------------------------------------------------------------------


class Headers(io.BufferedReader):
    """Tar file whose headers are read and whose data are skipped; refuses headers of an implausible size."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= MOST_HEADER:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return super().read(size)


def members(file: Headers) -> Iterator[tuple[str, str, int, int]]:
    """Yields key, extension, first byte and size of each file in a tar. Raises tarfile.ReadError for a damaged tar."""
    length = os.fstat(file.fileno()).st_size
    with tarfile.open(fileobj=file, mode="r:") as archive:
        for member in archive:
            if not member.isreg() or member.issparse():
                continue
            if member.size > min(MOST_MEMBER, length - member.offset_data):
                raise tarfile.ReadError(f"{member.name} of {member.size} bytes")
            path = PurePosixPath(member.name)
            stem, _, field = path.name.partition(".")
            yield str(path.with_name(stem or ".")), field, member.offset_data, member.size
    file.seek(archive.offset)  # where tarfile stopped, at the end or at bytes that it could not read
    if file.read(len(END)) != END:
        raise tarfile.ReadError(f"no member and no end at byte {archive.offset}")


def index_of(path: Path) -> dict[str, np.ndarray]:
    """Returns "spans", (n, 2, 2) int64: first byte and size of each sample's files. Raises UserError for a bad tar."""
    spans = []
    try:
        with Headers(io.FileIO(path), tarfile.BLOCKSIZE) as file:
            for key, group in groupby(members(file), key=lambda member: member[0]):
                found = {field: span for _, field, *span in group}
                if missing := [field for field in FIELDS if field not in found]:
                    raise tarfile.ReadError(f"{key} has no .{missing[0]}")
                spans.append([found[field] for field in FIELDS])
    except (OSError, tarfile.TarError) as error:
        raise UserError(f"--shards: {path} cannot be read or is damaged ({error}); download it again") from None
    return {"spans": np.array(spans, dtype=np.int64).reshape(-1, len(FIELDS), 2)}


# --- the data set ------------------------------------------------------------------------------------------------


class Shard:
    """Open shard, whose samples are read by number. spans: (n, 2, 2), result of `index_of`."""

    def __init__(self, path: Path, spans: np.ndarray) -> None:
        self.path, self.spans = path, spans
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed with the last reference)

    def sample(self, number: int) -> tuple[np.ndarray, int]:
        """Reads and decodes a sample; raises UserError if it is damaged."""
        try:
            picture, label = (self._read(*span) for span in self.spans[number].tolist())
            return decoded(picture, label)
        except Exception as error:  # a decoder may raise anything for damaged bytes
            raise UserError(
                f"--shards: sample {number} of {self.path} is damaged ({error}); download the file again"
            ) from None

    def _read(self, start: int, size: int) -> bytes:
        content = os.pread(self._file.fileno(), size, start)
        if len(content) < size:
            raise EOFError("the file has become shorter")
        return content


def decoded(picture: bytes, label: bytes) -> tuple[np.ndarray, int]:
    """Decodes a sample. Replace this function with your own decoder, which may raise any exception."""
    array, number = np.lib.format.read_array(io.BytesIO(picture), allow_pickle=False), int(label)
    if array.shape != SHAPE or array.dtype != np.uint8 or not 0 <= number < NUM_CLASSES:
        raise ValueError(f"{array.dtype} of shape {array.shape}, class {number}")
    return array, number


class TarSamples:
    """Data set of all samples of the shards, in order. Keeps two shards open, because a batch may need two."""

    def __init__(self, paths: Sequence[Path], cache_dir: Path) -> None:
        self._cache_dir = cache_dir
        self.sizes = np.array([len(self._spans(path)) for path in paths], dtype=np.int64)
        self._starts = np.cumsum(self.sizes) - self.sizes
        self._opened = lru_cache(maxsize=2)(lambda shard: Shard(paths[shard], self._spans(paths[shard])))

    def _spans(self, path: Path) -> np.ndarray:
        status = path.stat()
        stamp = f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
        key = f"tar-{blake2b(stamp.encode(), digest_size=16).hexdigest()}"
        return cached_arrays(self._cache_dir, key, partial(index_of, path))["spans"]

    def __len__(self) -> int:
        return int(self.sizes.sum())

    def __getitems__(self, keys: SampleKeys) -> dict[str, np.ndarray]:
        shards = np.searchsorted(self._starts, keys.index, side="right") - 1
        numbers = keys.index - self._starts[shards]
        samples = [self._opened(shard).sample(i) for shard, i in zip(shards.tolist(), numbers.tolist(), strict=True)]
        pictures, labels = zip(*samples, strict=True)
        return {"picture": np.stack(pictures), "label": np.array(labels)}


# --- the task ----------------------------------------------------------------------------------------------------


@dataclass
class TarFlags(FlagGroup):
    """Task: pictures in tar shards"""

    shards: Path = flag(Path("shards"), "folder with train-*.tar, val-*.tar and test-*.tar", local=True)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 16, 5, stride=2)
        self.head = nn.Linear(64, NUM_CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        """Returns logits, (B, NUM_CLASSES), for pictures, (B, 32, 32) uint8."""
        x = ((pictures.unsqueeze(1) - 128.0) / 50).to(self.head.weight.dtype)
        # The maximum of each quarter of 14 x 14 positions; torch's pooling layers are nondeterministic on a GPU.
        quarters = F.gelu(self.convolution(x)).unflatten(3, (2, 7)).unflatten(2, (2, 7))
        return self.head(quarters.amax((3, 5)).flatten(1))


class PictureObjective(Objective):
    def forward(self, batch: Batch, phase: str = "train") -> Sums:
        logits = self.model(batch["picture"])
        loss = F.cross_entropy(logits, batch["label"], reduction="sum")
        return {"loss": loss, "correct": (logits.argmax(dim=1) == batch["label"]).sum()}


class TarShards(Task):
    Config = TarFlags
    monitor = ("val/accuracy", "max")

    def splits(self) -> Mapping[str, TarSamples]:
        return self._splits

    @cached_property
    def _splits(self) -> Mapping[str, TarSamples]:
        found = {name: sorted(self.config.shards.glob(f"{name}-*.tar")) for name in ("train", "val", "test")}
        for name, paths in found.items():
            if not paths:
                raise UserError(
                    f"--shards {self.config.shards}: contains no {name}-*.tar; give a folder with train-*.tar, "
                    "val-*.tar and test-*.tar"
                )
        return {name: TarSamples(paths, self.cache_dir) for name, paths in found.items()}

    def order(self, phase: str, epoch: int, global_batch_size: int) -> Sequence[np.ndarray]:
        return sharded_batches(self.splits()["train"].sizes, global_batch_size, self.seed, epoch)

    def build_objective(self) -> Objective:
        return PictureObjective(Network())

    def summarise(self, sums: dict[str, Tensor]) -> dict[str, float]:
        return {name: float(sums[key] / sums["weight"]) for name, key in (("loss", "loss"), ("accuracy", "correct"))}


# --- generated shards --------------------------------------------------------------------------------------------


def stripes(label: int, rng: np.random.Generator) -> np.ndarray:
    """Draws a noisy image of stripes, whose direction shows the class."""
    angle, phase = np.pi * label / NUM_CLASSES, rng.uniform(0, 2 * np.pi)
    y, x = np.mgrid[: SHAPE[0], : SHAPE[1]]
    waves = np.sin(x * np.cos(angle) + y * np.sin(angle) + phase) + rng.normal(size=SHAPE)
    return np.clip(128 + 50 * waves, 0, 255).astype(np.uint8)


def write_shard(path: Path, num_samples: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with tarfile.open(path, "w") as archive:
        for number in range(num_samples):
            label, picture = number % NUM_CLASSES, io.BytesIO()
            np.save(picture, stripes(label, rng), allow_pickle=False)
            for field, content in zip(FIELDS, (picture.getvalue(), str(label).encode()), strict=True):
                member = tarfile.TarInfo(f"{number:06}.{field}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to write shards to")
    parser.add_argument("--num-shards", type=int, default=8, help="number of training shards (default: 8)")
    parser.add_argument("--num-samples", type=int, default=500, help="samples per shard (default: 500)")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    names = [f"train-{number:06}.tar" for number in range(args.num_shards)]
    for seed, name in enumerate(["val-000000.tar", "test-000000.tar", *names]):
        write_shard(args.folder / name, args.num_samples, seed)


if __name__ == "__main__":
    main()
