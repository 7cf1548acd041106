"""Flags and results of the scripts for other libraries."""

import argparse
import json
from dataclasses import fields
from pathlib import Path

import torch

from benchmarks.peers.tagging import Settings

WEIGHTS, METRICS = "weights.pt", "metrics.json"


def peer_settings(description: str | None, *switches: str) -> tuple[Settings, Path, dict[str, bool]]:
    """Parses the command line to settings, the run's folder, and switches."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save-dir", type=Path, required=True)
    for field in fields(Settings):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    for name in switches:
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true")
    args = vars(parser.parse_args())
    settings = Settings(**{field.name: args[field.name] for field in fields(Settings)})
    args["save_dir"].mkdir(parents=True, exist_ok=True)
    return settings, args["save_dir"], {name: args[name] for name in switches}


def write_results(save_dir: Path, weights: dict[str, torch.Tensor], metrics: dict[str, float]) -> None:
    torch.save(weights, save_dir / WEIGHTS)
    (save_dir / METRICS).write_text(json.dumps(metrics))
