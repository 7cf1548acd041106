"""What a rank costs in groups of several sizes, and what it would cost among 1,000.

    python benchmarks/ranks.py

A tiny model trains 20 steps in 2, 8 and 32 processes of this machine, which are forked from one that has imported
torch. Looked at from outside, when the last step is done: open descriptors, threads, memory of its own and CPU time
of rank 0 and of the others, files, and, where a network of its own may be made (Linux, as root), what a step sends.
The straight line through the last two sizes gives what each of 1,000 ranks would take.
"""

import argparse
import ctypes
import json
import os
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from fcntl import ioctl
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.helpers import forks
from trainer.parallel.environment import RankEnvironment

TASK = f"{ROOT / 'tests' / 'helpers' / 'weighted_task.py'}:Weighted"
STEPS, FIRST = 20, 10
"""Steps of a run, and that from which what a step sends is counted."""
MANY = 1000
GIVE_UP_S = 1800
CLONE_NEWNET, SIOCSIFFLAGS, IFF_UP = 0x40000000, 0x8914, 1


def own_network() -> bool:
    """Gives this process, and those that it starts, a loopback interface of their own; whether that is allowed."""
    if ctypes.CDLL(None).unshare(CLONE_NEWNET):
        return False
    with socket.socket() as any_socket:
        ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP))
    return True


def sent() -> tuple[int, int]:
    """(bytes, packets) that the loopback interface has carried."""
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    numbers = line.split(":")[1].split()
    return int(numbers[0]), int(numbers[1])


def cost_of(process: int) -> dict[str, float]:
    folder = Path(f"/proc/{process}")
    rollup = dict(line.split(":") for line in (folder / "smaps_rollup").read_text().splitlines()[1:])
    private_kib = sum(int(rollup[name].split()[0]) for name in ("Private_Clean", "Private_Dirty"))
    ticks = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
    return {
        "descriptors": len(list((folder / "fd").iterdir())),
        "threads": len(list((folder / "task").iterdir())),
        "own MiB": private_kib / 1024,
        "CPU s": sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"),
    }


def start_server(output: Path) -> None:
    """So that the first group does not wait for the imports of the process that all are forked from."""
    first = forks.start(["--help"], {**os.environ, "XDG_CACHE_HOME": str(output)}, output, output)
    first.join()


def wait_for_step(step: int, run: Path, processes: Sequence[BaseProcess], output: Path) -> float:
    """When it was done, on the monotonic clock."""
    metrics, deadline = run / "metrics.jsonl", time.monotonic() + GIVE_UP_S
    while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
        if time.monotonic() > deadline or not all(process.is_alive() for process in processes):
            raise SystemExit(output.read_text())
        time.sleep(0.01)
    return time.monotonic()


def measure(world_size: int, folder: Path, counts_network: bool) -> dict[str, float]:
    run, output, meeting = folder / "run", folder / "output", folder / "meeting"
    meeting.mkdir(parents=True)
    # More steps than are measured, so that nobody ends meanwhile.
    argv = ["--multi-gpu", "ddp", "--task", TASK, "--num-train", 3 * world_size * (STEPS + 40), "--batch-size", 3,
            "--epochs", 1, "--num-threads", 1, "--log-interval", 1, "--delay-s", 0.5, "--device", "cpu",
            "--save-dir", run]  # fmt: skip
    variables = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "XDG_CACHE_HOME": str(folder)}
    place = f"file://{meeting}/rendezvous"
    began = time.monotonic()
    processes = [
        forks.start(argv, variables, output, output, RankEnvironment(rank, world_size, rank, world_size, place))
        for rank in range(world_size)
    ]
    try:
        started = wait_for_step(1, run, processes, output)
        wait_for_step(FIRST, run, processes, output)
        before = sent()
        wait_for_step(STEPS, run, processes, output)
        after = sent()
        costs = [cost_of(process.pid) for process in processes if process.pid is not None]
    finally:
        for process in processes:
            process.kill()
            process.join()
    found = {f"rank 0: {name}": value for name, value in costs[0].items()}
    found |= {f"others: {name}": statistics.median(cost[name] for cost in costs[1:]) for name in costs[0]}
    found["s to start, all on these cores"] = started - began
    found["files of the run"] = sum(path.is_file() for path in run.rglob("*"))
    found["KiB of a rank where they met"] = (meeting / "rendezvous").stat().st_size / 1024 / world_size
    if counts_network:
        steps = (STEPS - FIRST) * world_size
        found["KiB that a rank sends a step"] = (after[0] - before[0]) / steps / 1024
        found["packets that a rank sends a step"] = (after[1] - before[1]) / steps
    return {name: round(value, 2) for name, value in found.items()}


def extrapolated(found: Mapping[int, Mapping[str, float]], world_size: int) -> dict[str, float]:
    """By the straight line through the two largest sizes."""
    small, large = sorted(found)[-2:]
    return {
        name: round(value + (value - found[small][name]) / (large - small) * (world_size - large), 1)
        for name, value in found[large].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 8, 32])
    args = parser.parse_args()
    counts_network = own_network()
    found: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        start_server(Path(folder) / "warm-up")
        for world_size in args.worlds:
            found[world_size] = measure(world_size, Path(folder) / str(world_size), counts_network)
            print(world_size, json.dumps(found[world_size]), flush=True)
    print(json.dumps({"ranks": found, f"{MANY} ranks": extrapolated(found, MANY)}))


if __name__ == "__main__":
    main()
