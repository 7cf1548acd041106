"""Measures word error rates of --task speech on generated utterances, strings of digits, and the yesno data set.

    python benchmarks/speech.py --save-dir checkpoints/speech --fsdd recordings.tar.gz --yesno waves_yesno.tar.gz

Each run is a command of main.py, which the script prints. A run uses one thread and a folder of its own. Running the
benchmark again resumes interrupted runs and reads finished runs. CPU seconds include data loading and evaluations. The
last printed line is a JSON object.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

STRINGS = "--strings 3-7 --units words --hop-ms 12.5 --warmup-epochs 2"
KNOWN = f"{STRINGS} --epochs 30 --eval-every 6"
UNSEEN = (
    f"{STRINGS} --epochs 32 --eval-every 32 --augmentation 1 --consistency 0.2 --masking-db 20 --ema-decay 0.998 "
    "--folds 6"
)
YESNO = (
    "--units words --hop-ms 12.5 --test-share 0.2 --augmentation 1.5 --masking-db 20 --dropout 0.2 --batch-size 4 "
    "--warmup-epochs 5 --epochs 120 --eval-every 10"
)
CPU_SECONDS = "cpu_seconds.txt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save-dir", type=Path, required=True, help="folder for all runs")
    parser.add_argument("--fsdd", help="folder, zip or tar of the Free Spoken Digit Dataset")
    parser.add_argument("--yesno", help="folder or tar of waves_yesno")
    parser.add_argument("--only", nargs="*", help="measure only runs whose names start with one of these prefixes")
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel runs")
    args = parser.parse_args()
    commands = runs(args.fsdd, args.yesno)
    if args.only:
        commands = {name: flags for name, flags in commands.items() if name.startswith(tuple(args.only))}
    with ThreadPoolExecutor(args.jobs) as pool:
        results = dict(zip(commands, pool.map(lambda job: run(args.save_dir, *job), commands.items()), strict=True))
    print("\n| run | WER | string errors | CPU s |\n| --- | --- | --- | --- |")
    for name, result in results.items():
        folds = ", ".join(f"{wer:.2%}" for wer in result.get("wer_of_folds", ()))
        wer = f"{result['wer']:.2%}" + (f", mean of {folds}" if folds else "")
        print(f"| {name} | {wer} | {result['string_error_rate']:.1%} | {result['cpu_seconds']:.0f} |")
    print(json.dumps(results))


def runs(fsdd: str | None, yesno: str | None) -> dict[str, str]:
    found = {"generated": ""}
    if fsdd is not None:
        found["known speakers"] = f"--data-dir {shlex.quote(fsdd)} {KNOWN}"
        found["known speakers, streaming"] = f"--data-dir {shlex.quote(fsdd)} {KNOWN} --streaming"
        found["unseen speakers"] = f"--data-dir {shlex.quote(fsdd)} {UNSEEN}"
    if yesno is not None:
        found["yesno"] = f"--data-dir {shlex.quote(yesno)} {YESNO}"
    return found


def run(save_dir: Path, name: str, flags: str) -> dict[str, Any]:
    """Runs a command unless it is finished, and returns its results; for folds, the mean and each fold's results."""
    own = save_dir / name.replace(", ", "-").replace(" ", "-")
    command = ["main.py", "--task", "speech", *shlex.split(flags), "--num-threads", "1", "--device", "cpu"]
    command += ["--save-dir", str(own), "--keep-checkpoints", "1"]
    path = own / ("summary.json" if "--folds" in command else "results.json")
    if not path.exists():
        print(shlex.join(["python", *command]), flush=True)
        process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        own.mkdir(parents=True, exist_ok=True)
        with open(own / CPU_SECONDS, "a") as file:  # one line for each start of the run
            file.write(f"{usage.ru_utime + usage.ru_stime:.1f}\n")
        if status != 0:
            raise SystemExit(f"{name}: ended with status {os.waitstatus_to_exitcode(status)}")
    results = json.loads(path.read_text())
    found = plain_names(results["mean" if "mean" in results else "metrics"])
    if "runs" in results:
        found["wer_of_folds"] = [plain_names(fold["metrics"])["wer"] for fold in results["runs"]]
    return found | {"cpu_seconds": sum(map(float, (own / CPU_SECONDS).read_text().split()))}


def plain_names(metrics: dict[str, float]) -> dict[str, Any]:
    return {name.rpartition("/")[2]: value for name, value in metrics.items()}


if __name__ == "__main__":
    main()
