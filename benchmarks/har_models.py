"""Every HAR model of this project under one protocol: all training subjects, the same epochs, each seed scored once.

    python benchmarks/har_models.py --data-dir "UCI HAR Dataset.zip"

Each row is `python main.py --refit --epochs 20 --seeds N ...` in a folder of its own, so that an interrupted table
goes on where it was. Prints a Markdown table. Seconds are those of one seed's training on one thread, the median,
evaluation not counted.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EPOCHS = 20
ROWS: Sequence[tuple[str, Sequence[str]]] = (
    ("HarNet, four networks (the default)", ()),
    ("HarNet, one network", ("--num-members", "1")),
    ("HarNet, channels apart, flattened", ("--mode", "flatten")),
    ("HarNet, channels apart, averaged", ("--mode", "average")),
    ("HarNet, channels apart, the first alone", ("--mode", "first")),
    ("TinyHAR", ("--model", "tinyhar")),
    ("DeepConvLSTM", ("--model", "deepconvlstm")),
)


def main() -> None:
    """One table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="UCI HAR: its folder or zip")
    parser.add_argument("--save-dir", type=Path, default=Path("checkpoints/har_models"), help="folder for all runs")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each model")
    given = parser.parse_args()
    rows = []
    for name, flags in ROWS:
        folder = given.save_dir.resolve() / ("-".join(flags).strip("-") or "default")
        train(given.data_dir.resolve(), given.seeds, folder, flags)
        rows.append((name, flags, folder))
    print(table(rows))


def train(data_dir: Path, num_seeds: int, folder: Path, flags: Sequence[str]) -> None:
    """Trains the seeds that are not finished yet."""
    argv = ["--data-dir", str(data_dir), "--refit", "--epochs", str(EPOCHS), "--seeds", str(num_seeds), *flags]
    subprocess.run(
        [sys.executable, "main.py", *argv, "--device", "cpu", "--num-threads", "1", "--save-dir", str(folder)],
        check=True, stdout=sys.stderr, cwd=ROOT,
    )  # fmt: skip


def table(rows: Sequence[tuple[str, Sequence[str], Path]]) -> str:
    """Test scores in % over the seeds, and what each model costs."""
    lines = [
        "| model | flags | parameters | accuracy, mean (deviation) | macro-F1 | all seeds together | s a seed |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, flags, folder in rows:
        summary = json.loads((folder / "summary.json").read_text())
        parameters = json.loads((folder / "seed-0" / "results.json").read_text())["num_parameters"]
        mean, deviation = summary["mean"], summary["deviation"]
        seconds = sorted(run["train_seconds"] for run in summary["runs"])
        lines.append(
            f"| {name} | {f'`{chr(32).join(flags)}`' if flags else ''} | {parameters:,} "
            f"| {mean['test/accuracy']:.2%} ({deviation['test/accuracy']:.2%}) | {mean['test/macro_f1']:.2%} "
            f"| {summary['ensemble']['test/accuracy']:.2%} | {seconds[len(seconds) // 2]:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
