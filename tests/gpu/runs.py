"""Runs command lines and compares finished runs."""

import json
from pathlib import Path

import pytest

from tests.conftest import TINY, largest_difference, load
from trainer.cli import main

EXACT = ["--dtype", "float64"]
"""Flags for float64, in which a difference larger than rounding is a mistake."""


def run(cache_dir: Path, *argv: object, status: int = 0, several: bool = False) -> None:
    """Runs a command line and checks its exit status; uses no workers by default, because machines differ in cores."""
    workers = [] if "--num-workers" in argv else ["--num-workers", "0"]
    arguments = [*map(str, argv), "--cache-dir", str(cache_dir / "lockstep"), "--num-threads", "1", *workers]
    assert main(arguments, several_devices=several) == status


def tiny(cache_dir: Path, save_dir: Path, *more: object, **options) -> dict:
    """Trains `TINY` with additional flags; returns the last checkpoint."""
    run(cache_dir, *TINY, "--save-dir", save_dir, *more, **options)
    return load(save_dir / "last.pth")


def results(save_dir: Path) -> dict[str, float]:
    """Returns the metrics of a finished run, without times."""
    found = json.loads((save_dir / "results.json").read_text())["metrics"]
    return {name: value for name, value in found.items() if not name.endswith(("seconds", "per_second"))}


def assert_same(a: Path, b: Path, closeness: float = 1e-9) -> None:
    """Asserts that two finished runs have the same weights and metrics, up to rounding."""
    states = [load(directory / "last.pth") for directory in (a, b)]
    assert largest_difference(*states) < closeness
    if all("training_model" in state for state in states):
        assert largest_difference(*({"model": state["training_model"]} for state in states)) < closeness
    assert results(a) == pytest.approx(results(b), rel=1e-6, abs=1e-9)
