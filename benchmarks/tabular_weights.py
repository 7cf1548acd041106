"""Writes the weights shipped with --task tabular: the best weights of a run in bfloat16, and the run's flags.

python benchmarks/tabular_weights.py checkpoints/tables tasks/tabular_nano.pth
"""

import argparse
import hashlib
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trainer.checkpoint.weights import load_best_weights

KEPT = ("model", "task", "config", "data_facts", "step", "train_seconds")
PLACES = ("--save-dir", "--cache-dir", "--logger", "--resume-from", "--init-from", "--init-from-partial")
"""Flags that are left out, because they contain paths of the training machine."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="--save-dir of the run")
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    state = load_best_weights(args.run, print)
    config = {name: value for name, value in state["config"].items() if name not in PLACES}
    model = {name: values.bfloat16() for name, values in state["model"].items()}
    torch.save({name: state[name] for name in KEPT} | {"config": config, "model": model}, args.file)
    digest = hashlib.sha256(args.file.read_bytes()).hexdigest()
    size, minutes = args.file.stat().st_size / 2**20, state["train_seconds"] / 60
    print(f"{args.file}: {size:.2f} MiB, after {minutes:.1f} minutes, sha256 {digest}")


if __name__ == "__main__":
    main()
