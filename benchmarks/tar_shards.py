"""How quickly samples come out of tar shards: examples/tar_shards.py beside the webdataset library.

    pip install -r benchmarks/tar_shards.txt
    python benchmarks/tar_shards.py

Both read the same shards in one process, decode the same arrays and labels, shuffle, and put batches together. They
take turns, an epoch each; the files are in the operating system's memory. Ours reads every sample of a shard from its
place, in an order that a seed fixes; webdataset reads a shard from start to end, and shuffles what lies in a buffer.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import webdataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples.tar_shards import FIELDS, TarFlags, TarShards, decoded, write_shard
from trainer.loading.order import SampleKeys

BATCH_SIZE = 64
BUFFER = 1000
"""Samples among which webdataset shuffles, its documentation's example."""


def ours(folder: Path) -> Callable[[int], int]:
    task = TarShards(TarFlags(folder), seed=0, cache_dir=folder / "cache")
    train = task.splits()["train"]

    def epoch(number: int) -> int:
        batches = (train.__getitems__(SampleKeys(index, number)) for index in task.order("train", number, BATCH_SIZE))
        return sum(len(batch["label"]) for batch in batches)

    return epoch


def theirs(folder: Path) -> Callable[[int], int]:
    def sample(fields: dict) -> tuple[np.ndarray, int]:
        return decoded(*(fields[field] for field in FIELDS))

    def collated(samples: list) -> dict[str, np.ndarray]:
        pictures, labels = zip(*samples, strict=True)
        return {"picture": np.stack(pictures), "label": np.array(labels)}

    def epoch(number: int) -> int:
        urls = [str(path) for path in sorted(folder.glob("train-*.tar"))]
        data = webdataset.WebDataset(urls, shardshuffle=len(urls), seed=number, empty_check=False)
        batches = data.shuffle(BUFFER).map(sample).batched(BATCH_SIZE, collation_fn=collated)
        return sum(len(batch["label"]) for batch in batches)

    return epoch


def seconds(epoch: Callable[[int], int], number: int, num_samples: int) -> float:
    started = time.process_time()
    assert epoch(number) == num_samples
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="epochs of each")
    parser.add_argument("--num-shards", type=int, default=10)
    parser.add_argument("--num-samples", type=int, default=2000, help="in each shard")
    args = parser.parse_args()
    num_samples = args.num_shards * args.num_samples
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(args.num_shards):
            write_shard(folder / f"train-{number:06}.tar", args.num_samples, number)
        for split in ("val", "test"):
            write_shard(folder / f"{split}-000000.tar", 1, 0)
        started = time.process_time()
        kinds = {"ours": ours(folder), "webdataset": theirs(folder)}
        index_s = time.process_time() - started
        times = [[seconds(epoch, number, num_samples) for epoch in kinds.values()] for number in range(args.rounds)]
    result = {
        "samples_per_cpu_second": {
            name: round(num_samples / statistics.median(own))
            for name, own in zip(kinds, zip(*times, strict=True), strict=True)
        },
        "ours_over_webdataset": round(statistics.median(other / own for own, other in times), 2),
        "looking_through_once_samples_per_cpu_second": round(num_samples / index_s),
        "webdataset_version": webdataset.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
