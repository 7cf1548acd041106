"""Compares DistributedDataParallel on 2 CPU processes of one thread with 1 process, and with 2 independent processes.

    python benchmarks/scaling.py

Two independent processes are an upper bound: they share memory bandwidth and caches like two ranks, but exchange
nothing. The configurations alternate; each trains the default task from the command line, with the same batch size per
process. Results are medians over rounds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DDP = ["main_multi_gpu.py", "--multi-gpu", "ddp", "--nproc", "2"]


def command(launcher: list[str], folder: Path, epochs: int) -> list[str]:
    return [
        sys.executable, *launcher, "--save-dir", str(folder), "--epochs", str(epochs), "--num-threads", "1",
        "--device", "cpu", "--seed", "0",
    ]  # fmt: skip


def samples_per_second(folder: Path) -> float:
    """Returns the median samples per second in training over all epochs but the first, which is a warm-up."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return statistics.median([r["samples_per_second"] for r in records if r["event"] == "epoch"][1:])


def throughput(launchers: list[list[str]], base: Path, epochs: int) -> float:
    """Runs command lines at the same time; returns the sum of their samples per second."""
    folders = [base / str(i) for i in range(len(launchers))]
    processes = [
        subprocess.Popen(command(launcher, folder, epochs), cwd=ROOT, stdout=subprocess.DEVNULL)
        for launcher, folder in zip(launchers, folders, strict=True)
    ]
    for process in processes:
        if process.wait() != 0:
            sys.exit("a run failed; see its message above")
    return sum(samples_per_second(folder) for folder in folders)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="number of runs of each configuration")
    parser.add_argument("--epochs", type=int, default=6, help="epochs per run; the first is a warm-up")
    args = parser.parse_args()
    kinds = {"one": [["main.py"]], "ddp": [DDP], "two_independent": [["main.py"], ["main.py"]]}
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for round_ in range(args.rounds):
        for kind, launchers in kinds.items():
            with tempfile.TemporaryDirectory() as folder:
                found[kind].append(throughput(launchers, Path(folder), args.epochs))
            print(f"round {round_ + 1}/{args.rounds}  {kind}: {found[kind][-1]:.0f} samples/s", flush=True)
    pairs = list(zip(found["one"], found["ddp"], found["two_independent"], strict=True))
    result = {
        "speedup_over_one_process": round(statistics.median(ddp / one for one, ddp, _ in pairs), 3),
        "efficiency_relative_to_two_independent": round(statistics.median(ddp / two for _, ddp, two in pairs), 3),
        "samples_per_second": {kind: round(statistics.median(values), 1) for kind, values in found.items()},
        "rounds": args.rounds,
    }
    print(
        f"2 ranks train {result['speedup_over_one_process']} times as fast as one process, and at "
        f"{result['efficiency_relative_to_two_independent']} of the speed of two independent processes"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
