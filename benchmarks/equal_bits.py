"""Repeats a training run with `--parts` on 1, 2 and 4 devices, and prints SHA-256 checksums of each result.

    python benchmarks/equal_bits.py --task har --max-steps 40 --device cpu

The script takes the trainer's flags. With `--parts`, by default 8, results must not depend on the number of devices.
`--worlds` sets the numbers of devices. The exit status is 1 if a checksum differs. The checksum of metrics.jsonl covers
all entries except times.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
TIMES = ("samples_per_second", "epoch_seconds")


def pieces(value: Any) -> Iterator[bytes]:
    """Yields the bytes of all tensors and plain values in nested containers."""
    if isinstance(value, torch.Tensor):
        yield value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, dict | list | tuple):
        for each in value.items() if isinstance(value, dict) else value:
            yield from pieces(each)
    else:
        yield repr(value).encode()


def sha256_of(value: Any) -> str:
    return hashlib.sha256(b"\0".join(pieces(value))).hexdigest()


def learnt(folder: Path) -> dict[str, str]:
    """Returns SHA-256 checksums of a finished run's weights, optimizer state, scores and metrics, by name."""
    state = torch.load(folder / "last.pth", weights_only=True)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    logged = [{name: value for name, value in record.items() if name not in TIMES} for record in records]
    results = json.loads((folder / "results.json").read_text())["metrics"]
    found = {"model": state["model"], "optimizers": state["optimizers"], "scores": results, "metrics.jsonl": logged}
    return {name: sha256_of(value) for name, value in found.items()}


def trained(num_devices: int, argv: list[str], folder: Path) -> dict[str, str]:
    command = [sys.executable, "main_multi_gpu.py", "--multi-gpu", "ddp", "--nproc", str(num_devices), *argv]
    if num_devices == 1:
        command = [sys.executable, "main.py", *argv]
    done = subprocess.run([*command, "--save-dir", str(folder)], cwd=ROOT, stdout=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(f"on {num_devices} device(s) the run failed with status {done.returncode}; see its message above")
    return learnt(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="1,2,4", help="numbers of devices, separated by commas")
    parser.add_argument("--parts", default="8", help="number of parts into which each global batch is split")
    args, argv = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        found = {
            int(world): trained(int(world), ["--parts", args.parts, *argv], Path(name) / world)
            for world in args.worlds.split(",")
        }
    names = [*next(iter(found.values()))]
    print("devices", *(f"{name:16}" for name in names), sep="  ")
    for world, digests in found.items():
        print(f"{world:7}", *(f"{digests[name][:16]:16}" for name in names), sep="  ")
    is_equal = all(digests == found[min(found)] for digests in found.values())
    print(json.dumps({"equal": is_equal, "sha256": found}))
    sys.exit(not is_equal)


if __name__ == "__main__":
    main()
