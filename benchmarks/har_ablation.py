"""Which parts of the HAR recipe help: subject-wise cross-validation of the training part, one row per change.

The test subjects are never looked at. Each row is `python main.py --folds K ...` in a folder of its own, so an
interrupted table goes on where it was. Prints a Markdown table; --write puts it into a document, between its markers.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from data.har.windows import SIGNALS
from tasks.har import HarObjective, HarTask
from tasks.har_objective import harnet_of

ROWS: Sequence[tuple[str, Sequence[str]]] = (
    ("the default", ()),
    ("one network instead of four", ("--num-members", "1")),
    ("small movements not shown", ("--task", "benchmarks/har_ablation.py:WithoutSmallMovements")),
    ("no augmentation", ("--no-augmentation",)),
    ("no rotation", ("--rotation-deg", "0")),
    ("no change of tempo", ("--tempo-spread", "0")),
    ("white noise", ("--jitter-std", "0.05")),
    ("no label smoothing", ("--label-smoothing", "0")),
    ("averaged weights", ("--ema-decay", "0.998")),
    ("20 epochs", ("--epochs", "20")),
)
MARKERS = ("<!-- har_ablation begins -->", "<!-- har_ablation ends -->")


class WithoutSmallMovements(HarTask):
    """The default task, whose network sees nothing in place of its second view of the channels."""

    def build_objective(self) -> HarObjective:
        """With a hook before the first convolution."""
        objective = super().build_objective()
        harnet_of(objective.model).encoder.layers[0].register_forward_pre_hook(_hide_small_movements)
        return objective


def _hide_small_movements(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    views = inputs[0].clone()
    views[:, len(SIGNALS) :] = 0
    return views


def main() -> None:
    """One table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="UCI HAR: its folder or zip")
    parser.add_argument("--save-dir", type=Path, default=Path("checkpoints/har_ablation"), help="folder for all runs")
    parser.add_argument("--folds", type=int, default=3, help="parts that the training subjects are dealt out to")
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace what FILE holds between the markers")
    given = parser.parse_args()
    rows = []
    for number, (name, flags) in enumerate(ROWS):
        folder = given.save_dir.resolve() / f"row-{number}"
        cross_validate(given.data_dir.resolve(), given.folds, folder, flags)
        rows.append((name, flags, json.loads((folder / "summary.json").read_text())))
    text = table(rows)
    print(text)
    if given.write is not None:
        put_between_markers(given.write, text)


def cross_validate(data_dir: Path, num_folds: int, folder: Path, flags: Sequence[str]) -> None:
    """Trains the folds that are not finished yet."""
    argv = ["--data-dir", str(data_dir), "--folds", str(num_folds), "--save-dir", str(folder), *flags]
    subprocess.run([sys.executable, "main.py", *argv], check=True, stdout=sys.stderr, cwd=ROOT)


def table(rows: Sequence[tuple[str, Sequence[str], dict]]) -> str:
    """Accuracy and macro-F1 in %, over the folds, and what each change does to the accuracy."""
    reference = rows[0][2]["mean"]["val/accuracy"]
    lines = [
        "| change | flags | accuracy, mean (deviation) over folds | difference | worst fold | macro-F1 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, flags, summary in rows:
        mean, deviation = summary["mean"], summary["deviation"]
        worst = min(run["metrics"]["val/accuracy"] for run in summary["runs"])
        lines.append(
            f"| {name} | {f'`{chr(32).join(flags)}`' if flags else ''} "
            f"| {mean['val/accuracy']:.2%} ({deviation['val/accuracy']:.2%}) "
            f"| {100 * (mean['val/accuracy'] - reference):+.2f} | {worst:.2%} | {mean['val/macro_f1']:.2%} |"
        )
    return "\n".join(lines)


def put_between_markers(path: Path, text: str) -> None:
    """Replaces what stands between the markers of a document."""
    before, _, rest = path.read_text().partition(MARKERS[0])
    _, _, after = rest.partition(MARKERS[1])
    path.write_text(f"{before}{MARKERS[0]}\n{text}\n{MARKERS[1]}{after}")


if __name__ == "__main__":
    main()
