"""Reads which samples a run consumed from the records of the forward passes of all its ranks."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

GlobalBatch = tuple[int, frozenset[int]]
"""Epoch and sample indices."""


@dataclass(frozen=True)
class Part:
    """Attempt at a run. first_step: optimizer step of the checkpoint from which it resumed, or 0."""

    first_step: int
    batches: list[GlobalBatch]


def promised_step(directory: Path) -> int:
    """Returns the optimizer step of the newest checkpoint that is in the manifest and exists, or 0."""
    manifest = directory / "manifest.json"
    entries = json.loads(manifest.read_text())["checkpoints"] if manifest.exists() else []
    return max((entry["step"] for entry in entries if (directory / entry["file"]).exists()), default=0)


def resumed_step(output: str) -> int:
    """Returns the optimizer step after which a run says that it resumes, or 0."""
    mark = re.search(r"Resuming after optimizer step (\d+):", output)
    return int(mark[1]) if mark else 0


def global_batches(folder: Path, world_size: int, global_batch_size: int, num_samples: int) -> list[GlobalBatch]:
    """Returns the global batches that all ranks have processed, in order.

    Line L of every rank belongs to the same micro-batch. A kill may leave different numbers of lines, and may truncate
    the last line; only complete steps count.
    """
    files = sorted(folder.glob("*.jsonl"))
    if len(files) < world_size:
        return []  # killed before every rank had begun
    ranks = [
        # The first forward pass is on a placeholder batch.
        list(map(json.loads, whole_lines(file)))[1:]
        for file in files
    ]
    batches: list[GlobalBatch] = []
    current: list[int] = []
    for micro_batch in zip(*ranks, strict=False):
        current += [i for line in micro_batch for i in line["index"]]
        # Micro-batches add up to the remainder only at the end of an epoch.
        if len(current) in (global_batch_size, num_samples % global_batch_size):
            batches.append((micro_batch[0]["epoch"], frozenset(current)))
            current = []
    return batches


def whole_lines(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def assert_same_samples(parts: Sequence[Part], expected: Sequence[GlobalBatch]) -> None:
    """Asserts that each part consumed the expected batches from its first step, and that all batches are covered."""
    covered = 0
    for part in parts:
        assert part.first_step <= covered, f"the samples before optimizer step {part.first_step} were never consumed"
        own = expected[part.first_step : part.first_step + len(part.batches)]
        assert part.batches == own, f"other samples after optimizer step {part.first_step}"
        covered = max(covered, part.first_step + len(part.batches))
    assert covered == len(expected), f"the samples after optimizer step {covered} were not all consumed"
