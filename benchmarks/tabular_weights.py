"""Makes the weights that come with --task tabular of a run: its best ones, and what was trained, without moments.

python benchmarks/tabular_weights.py checkpoints/tables tasks/tabular_nano.pth
"""

import argparse
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trainer.checkpoint.weights import load_best_weights

KEPT = ("model", "task", "config", "data_facts", "step", "train_seconds")
PLACES = ("--save-dir", "--cache-dir", "--logger", "--resume-from", "--init-from", "--init-from-partial")
"""Flags that say where files lay, which is nobody's business."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="its --save-dir")
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    state = load_best_weights(args.run, print)
    config = {name: value for name, value in state["config"].items() if name not in PLACES}
    torch.save({name: state[name] for name in KEPT} | {"config": config}, args.file)
    print(f"{args.file}: {args.file.stat().st_size / 2**20:.2f} MiB, after {state['train_seconds'] / 60:.1f} minutes")


if __name__ == "__main__":
    main()
