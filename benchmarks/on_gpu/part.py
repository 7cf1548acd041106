"""Settings, result reports and functions that the parts of benchmarks/gpu.py share."""

import gc
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from trainer.api import process_restored
from trainer.cli import main
from trainer.commands.parse import parse
from trainer.config import refuse
from trainer.loop.run import Run
from trainer.parallel.devices import pick_device
from trainer.parallel.strategy import SingleDevice
from trainer.profiling.measure import MeasuredRun, opened

ROOT = Path(__file__).resolve().parents[2]
HELPERS = ROOT / "tests" / "helpers"
CACHE = "cache"


@dataclass(frozen=True)
class Setting:
    """Settings of a part. folder: for files of the part. is_small: whether to do little work, only to test the part."""

    device: str
    folder: Path
    is_small: bool = False

    def pick(self, full: Any, small: Any) -> Any:
        return small if self.is_small else full

    @property
    def is_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def threads(self) -> list[str]:
        """Flags for one CPU thread with --small, because small tensors do not profit from a second thread."""
        return ["--num-threads", "1"] if self.is_small else []

    @property
    def where(self) -> list[object]:
        """Flags for the device, its threads and the cache, which all parts share."""
        return ["--device", self.device, "--cache-dir", self.folder.parent / CACHE, *self.threads]

    def synchronise(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()


class Report:
    """Report of a part's measurements and checks. tell: called with each result as soon as it is known."""

    def __init__(self, tell: Callable[[dict[str, Any]], None]) -> None:
        self.tell = tell

    def figure(self, name: str, value: Any) -> None:
        self.tell({"name": name, "value": value})

    def check(self, name: str, holds: bool, value: Any = None) -> None:
        """Reports whether a check succeeds. value: the measured value, if any."""
        self.tell({"name": name, "value": bool(holds) if value is None else value, "holds": bool(holds)})

    def attempt(self, name: str, work: Callable[[], None]) -> None:
        """Calls `work`, and reports an exception as a failed check, so that the part continues."""
        try:
            work()
        except Exception as error:
            self.check(name, False, f"{type(error).__name__}: {str(error).strip() or 'without a message'}"[:500])


class Ended(RuntimeError):
    """Raised if a command line ends with an unexpected status."""


def run(setting: Setting, name: str, *flags: object, status: int = 0, device: str | None = None) -> Path:
    """Runs a command line of main.py in this process, and returns its run directory.

    Restores torch's settings afterwards. Raises Ended if the exit status is not `status`.
    """
    directory = setting.folder / name
    argv = [
        "--device", device or setting.device, "--save-dir", directory, "--cache-dir", setting.folder.parent / CACHE,
        *setting.threads, *flags,
    ]  # fmt: skip
    print("main.py", *argv, flush=True)
    with process_restored():
        found = main(list(map(str, argv)), several_devices=False)
    if found != status:
        raise Ended(f"{name} ended with status {found}, not {status}; see its log")
    return directory


@contextmanager
def opened_model(setting: Setting, *flags: object) -> Iterator[Run]:
    """Context manager that opens the run of a main.py command line, to measure its steps in this process."""
    argv = list(map(str, [*flags, *setting.where, "--log-interval", 1000]))
    print("measured:", *argv, flush=True)
    parsed, problems = parse(argv, several_devices=False)
    refuse(problems)
    if setting.is_gpu:
        gc.collect()
        torch.cuda.empty_cache()
    with process_restored(), opened(parsed, argv, SingleDevice(pick_device(setting.device)), quiet=True) as run:
        yield run


def measured_steps(setting: Setting, num_steps: int, num_settling_steps: int, *flags: object) -> dict[str, Any]:
    """Returns the results of `MeasuredRun.measure` for a main.py command line.

    Tables are prepared by worker processes, which start only before a process uses CUDA: such a command line runs in a
    process of its own.
    """
    if "tabular" not in flags:
        with opened_model(setting, *flags) as run:
            return MeasuredRun(run).measure(num_steps, num_settling_steps)
    path = setting.folder / "step.json"
    steps = ["--steps", num_steps, "--settling-steps", num_settling_steps, "--json", path]
    argv = list(map(str, [sys.executable, "profiler.py", "step", *flags, *setting.where, *steps]))
    print("measured:", *argv, flush=True)
    subprocess.run(argv, cwd=ROOT, check=True)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@dataclass
class Graphs:
    """CUDA graphs of this process: number of captures, the replayed graphs, and the run's log lines about graphs."""

    num_captured: int = 0
    replayed: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


@contextmanager
def graphs_watched() -> Iterator[Graphs]:
    """Context manager that counts captures and replays of graphs, and collects the printed lines about graphs."""
    found, kind, printed = Graphs(), torch.cuda.CUDAGraph, io.StringIO()
    capture_end, replay = kind.capture_end, kind.replay

    def captured(graph: torch.cuda.CUDAGraph) -> None:
        capture_end(graph)
        found.num_captured += 1

    def replayed(graph: torch.cuda.CUDAGraph) -> None:
        found.replayed.append(graph)
        replay(graph)

    try:
        with patch.multiple(kind, capture_end=captured, replay=replayed), redirect_stdout(printed):
            yield found
    finally:
        print(printed.getvalue(), flush=True)
        found.lines = [line for line in printed.getvalue().splitlines() if "CUDA graphs: " in line]


def last(directory: Path) -> dict[str, Any]:
    """Loads the newest checkpoint of a run."""
    return torch.load(directory / "last.pth", weights_only=True, map_location="cpu")


def checkpoint_of_step(directory: Path, step: int) -> Path:
    entries = json.loads((directory / "manifest.json").read_text())["checkpoints"]
    return directory / next(entry["file"] for entry in entries if entry["step"] == step)


def metrics(directory: Path) -> dict[str, float]:
    """Returns the metrics of a run's last report."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    report = [record for record in map(json.loads, lines) if record["event"] != "step"][-1]
    return {name: value for name, value in report.items() if name.startswith(("train/", "val/", "test/"))}


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Returns the largest difference of any weight tensor, relative to the tensor's largest absolute value."""
    if found.keys() != expected.keys():
        raise ValueError(f"other weights: {sorted(found.keys() ^ expected.keys())}")
    return max(float((found[name] - w).abs().max() / w.abs().max().clamp(min=1e-300)) for name, w in expected.items())


LEARNT = ("model", "training_model", "optimizers", "scaler", "average_updates", "totals", "position", "step", "best")
"""Checkpoint entries that must be identical after identical training."""


def unlike(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Returns the names of the entries in which two checkpoints differ by any bit."""
    mine, theirs = (dict(leaves({key: state.get(key) for key in LEARNT})) for state in (found, expected))
    return sorted(name for name in mine.keys() | theirs.keys() if not _same(mine.get(name), theirs.get(name)))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every tensor and plain value of nested containers with its path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else None
    if items is None:
        yield path, value
        return
    for key, item in items:
        yield from leaves(item, f"{path}/{key}")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        is_alike = (one.shape, one.dtype) == (other.shape, other.dtype)
        return is_alike and torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (one, other)))
    return type(one) is type(other) and one == other
