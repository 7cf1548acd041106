"""Compares the models of --task har under one protocol: all training subjects, 20 epochs, one test score per seed.

    python benchmarks/har_models.py --data-dir "UCI HAR Dataset.zip"

For each row of the printed Markdown table, `python main.py --refit --epochs 20 --seeds N ...` runs in a folder of its
own, so an interrupted benchmark resumes. The last column is the median training time of a seed, in seconds on one
thread, without evaluation.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median, stdev

ROOT = Path(__file__).resolve().parent.parent
EPOCHS = 20
ROWS: Mapping[str, Sequence[str]] = {
    "HarNet, four networks": (),
    "HarNet, one network": ("--num-members", "1"),
    "HarNet, flattened": ("--mode", "flatten"),
    "HarNet, averaged": ("--mode", "average"),
    "HarNet, the first channel": ("--mode", "first"),
    "TinyHAR": ("--model", "tinyhar"),
    "DeepConvLSTM": ("--model", "deepconvlstm"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder or zip of UCI HAR")
    parser.add_argument("--save-dir", type=Path, default=Path("checkpoints/har_models"), help="folder for all runs")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds per model")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=ROWS, metavar="ROW", help="rows to measure")
    given = parser.parse_args()
    print("| model | flags | parameters | accuracy, mean (deviation) | macro-F1 | all seeds together | s a seed |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in given.rows:
        folder = given.save_dir.resolve() / ("-".join(ROWS[name]).strip("-") or "default")
        train(given.data_dir.resolve(), given.seeds, folder, ROWS[name])
        print(line(name, given.seeds, folder), flush=True)


def train(data_dir: Path, num_seeds: int, folder: Path, flags: Sequence[str]) -> None:
    """Trains the seeds whose runs are not finished."""
    argv = ["--data-dir", str(data_dir), "--refit", "--epochs", str(EPOCHS), *flags]
    several = ["--seeds", str(num_seeds), "--save-dir", str(folder)]
    where = several if num_seeds > 1 else ["--save-dir", str(folder / "seed-0")]
    subprocess.run(
        [sys.executable, "main.py", *argv, "--device", "cpu", "--num-threads", "1", *where],
        check=True, stdout=sys.stderr, cwd=ROOT,
    )  # fmt: skip


def line(name: str, num_seeds: int, folder: Path) -> str:
    """Returns a row of the table: test scores in % over the seeds, number of parameters, and training time."""
    runs = [json.loads((folder / f"seed-{seed}" / "results.json").read_text()) for seed in range(num_seeds)]
    accuracy, f1 = ([run["metrics"][f"test/{metric}"] for run in runs] for metric in ("accuracy", "macro_f1"))
    deviation = f" ({stdev(accuracy):.2%})" if num_seeds > 1 else ""
    together = ""
    if num_seeds > 1:
        together = f"{json.loads((folder / 'summary.json').read_text())['ensemble']['test/accuracy']:.2%}"
    seconds = median(run["train_seconds"] for run in runs)
    flags = f"`{' '.join(ROWS[name])}`" if ROWS[name] else ""
    return (
        f"| {name} | {flags} | {runs[0]['num_parameters']:,} | {mean(accuracy):.2%}{deviation} | {mean(f1):.2%} "
        f"| {together} | {seconds:.0f} |"
    )


if __name__ == "__main__":
    main()
