"""Which samples a run consumed, from what the forwards of all its ranks received."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

GlobalBatch = tuple[int, frozenset[int]]
"""The epoch, and the sample ids."""


@dataclass(frozen=True)
class Part:
    """What one attempt at a run did. first_step: the optimizer step of the checkpoint that it went on from, or 0."""

    first_step: int
    batches: list[GlobalBatch]


def promised_step(directory: Path) -> int:
    """The optimizer step of the newest checkpoint that has its name, 0 without one."""
    manifest = directory / "manifest.json"
    entries = json.loads(manifest.read_text())["checkpoints"] if manifest.exists() else []
    return max((entry["step"] for entry in entries if (directory / entry["file"]).exists()), default=0)


def resumed_step(output: str) -> int:
    """Where a run says that it goes on, 0 if it says nothing."""
    mark = re.search(r"Resuming after optimizer step (\d+):", output)
    return int(mark[1]) if mark else 0


def global_batches(folder: Path, world_size: int, global_batch_size: int, num_samples: int) -> list[GlobalBatch]:
    """Each global batch that all ranks have worked on, in order.

    Line L of every rank belongs to the same micro-batch of the same step. A kill may leave ranks with unequally many
    lines, the last one cut short; only complete steps count.
    """
    files = sorted(folder.glob("*.jsonl"))
    if len(files) < world_size:
        return []  # killed before every rank had begun
    ranks = [
        # A batch that does not count comes before the first step.
        list(map(json.loads, whole_lines(file)))[1:]
        for file in files
    ]
    batches: list[GlobalBatch] = []
    current: list[int] = []
    for micro_batch in zip(*ranks, strict=False):
        current += [i for line in micro_batch for i in line["index"]]
        # Forwards add up to an odd number of samples only at the end of an epoch.
        if len(current) in (global_batch_size, num_samples % global_batch_size):
            batches.append((micro_batch[0]["epoch"], frozenset(current)))
            current = []
    return batches


def whole_lines(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def assert_same_samples(parts: Sequence[Part], expected: Sequence[GlobalBatch]) -> None:
    """Every part consumed what the unbroken run did from its first step on, and together they left nothing out."""
    covered = 0
    for part in parts:
        assert part.first_step <= covered, f"the samples before optimizer step {part.first_step} were never consumed"
        own = expected[part.first_step : part.first_step + len(part.batches)]
        assert part.batches == own, f"other samples after optimizer step {part.first_step}"
        covered = max(covered, part.first_step + len(part.batches))
    assert covered == len(expected), f"the samples after optimizer step {covered} were not all consumed"
