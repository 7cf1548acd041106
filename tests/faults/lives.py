"""Runs that are killed repeatedly until they finish, and are compared with uninterrupted runs."""

import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.conftest import WEIGHTED, assert_same_bits, largest_difference, load, read_metrics
from tests.faults.job import Job, wait_until
from tests.faults.samples import GlobalBatch, Part, assert_same_samples, global_batches, promised_step, resumed_step

FIRST_SEED = int(os.environ.get("LOCKSTEP_SEED", "0"))

StartJob = Callable[[Sequence[object], int, Path], Job]
"""Function that starts a job, given a command line without its program, a world size and a folder for the job."""


@dataclass(frozen=True)
class Recipe:
    """Command line, and the numbers with which `global_batches` reads the record of its samples."""

    argv: tuple[object, ...]
    global_batch_size: int
    num_samples: int
    epochs: int
    max_steps: int | None = None

    @property
    def num_steps(self) -> int:
        return self.max_steps or self.epochs * -(-self.num_samples // self.global_batch_size)


LENGTH = ("--epochs", 4, "--eval-every", 2)
# The recipe has gradient accumulation (2 samples per forward pass), a worker, augmentation (always on in this task),
# dropout, weight averaging, checkpoints within epochs, and epochs without validation.
HARD = Recipe(
    argv=(
        "--task", WEIGHTED, "--batch-size", 2, "--global-batch-size", 12, "--num-workers", 1,
        "--save-every-steps", 3, "--ema-decay", 0.9, "--lr", 0.01, "--log-interval", 2, "--keep-checkpoints", 2,
        "--num-threads", 1, "--eval-batch-size", 1, "--delay-s", 0.002, "--dropout", 0.2,
        *LENGTH,
    ),
    global_batch_size=12,
    num_samples=101,
    epochs=4,
)  # fmt: skip
# This run ends and evaluates within epochs, and also saves by the clock.
IN_STEPS = replace(
    HARD,
    argv=(*HARD.argv[: -len(LENGTH)], "--max-steps", 32, "--eval-every-steps", 5, "--save-every-minutes", 0.001),
    max_steps=32,
)
# This run gives the same bits with every world size.
IN_PARTS = replace(HARD, argv=(*HARD.argv, "--batch-size", 3, "--parts", 4))
DOUBLE = replace(HARD, argv=(*HARD.argv, "--dropout", 0, "--dtype", "float64"))


@dataclass
class Life:
    """Run directory, with what its attempts did and what the kills hit."""

    directory: Path
    recipe: Recipe
    parts: list[Part] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    rescued: set[int] = field(default_factory=set)
    """Optimizer steps whose state a failing job saved, possibly without the training metrics of lost ranks."""
    seconds: float = 0.0

    @property
    def batches(self) -> list[GlobalBatch]:
        return self.parts[0].batches

    def attempt(self, start: StartJob, world_size: int, disturb: Callable[[Job], None] = lambda job: None) -> Job:
        """Starts the command line, calls `disturb` once it trains, and waits for its end."""
        promised = promised_step(self.directory)
        folder = self.directory.parent / f"attempt{len(self.parts)}"
        job = start([*self.recipe.argv, "--save-dir", self.directory], world_size, folder)
        if wait_until(lambda: job.has_begun, job):
            began = time.monotonic()
            disturb(job)
            self.statuses = job.statuses()
            self.seconds = time.monotonic() - began
        else:
            self.statuses = job.statuses()
        part = Part(
            first_step=resumed_step(job.output),
            batches=global_batches(folder, world_size, self.recipe.global_batch_size, self.recipe.num_samples),
        )
        self.rescued |= rescued_steps(job.output)
        assert not part.batches or part.first_step >= promised, f"step {promised} was lost:\n{job.output}"
        self.parts.append(part)
        return job


def unbroken_life(base: Path, recipe: Recipe, start: StartJob, world_size: int) -> Life:
    life = Life(base / "run", recipe)
    job = life.attempt(start, world_size)
    assert set(life.statuses) == {0}, f"{life.statuses}:\n{job.output}"
    assert len(life.batches) == recipe.num_steps
    return life


def broken_life(
    base: Path, recipe: Recipe, start: StartJob, worlds: Sequence[int], draw: random.Random, seconds: float
) -> Life:
    """Runs a recipe until it finishes, and kills the whole job or one rank of each attempt at a random moment.

    worlds: world sizes of the attempts, repeated cyclically. seconds: maximum time of an attempt before the kill.
    """
    life = Life(base / "run", recipe)

    def strike(job: Job) -> None:
        time.sleep(draw.uniform(0, seconds))
        if not job.is_running():
            return
        one_rank = job.world_size > 1 and draw.random() < 0.5
        if one_rank:
            job.kill_rank(draw)
        else:
            job.kill()
        if list(life.directory.glob("*.tmp")):
            where = "while saving"
        else:
            where = "in evaluation or after it" if job.evaluates else "in training"
        life.kills["one rank" if one_rank else "whole job", where] += 1

    for i in range(100):
        world_size = worlds[i % len(worlds)]
        job = life.attempt(start, world_size, strike)
        if set(life.statuses) == {0}:
            return life
        assert life.kills.total() > 0, f"{life.statuses}:\n{job.output}"
    raise AssertionError(f"not through after {i} attempts")


def assert_as_unbroken(life: Life, unbroken: Life, same_bits: bool) -> None:
    """Asserts that two runs consumed the same samples and ended with the same bits or, in float64, close weights."""
    assert_same_samples(life.parts, unbroken.batches)
    assert not list(life.directory.glob("*.tmp"))
    final, expected = load(life.directory / "final.pth"), load(unbroken.directory / "final.pth")
    best, best_expected = load(life.directory / "best.pth"), load(unbroken.directory / "best.pth")
    if life.recipe is IN_PARTS:
        for state in (final, expected, best, best_expected):
            del state["environment"]
    if life.rescued:
        for state in (final, expected, best, best_expected):
            (state["scores"],) = without_training([state["scores"]])
    if not same_bits:
        assert largest_difference(expected, final) < 1e-8
        return
    assert_same_bits(expected, final)
    assert_same_bits(best_expected, best)
    for event in ("step", "epoch", "evaluation", "result"):
        records, others = (read_metrics(each.directory, event) for each in (life, unbroken))
        if life.rescued:
            records, others = without_training(records), without_training(others)
        if event == "step":  # rank 0 may have been killed before it wrote that step's record
            others = [record for record in others if record in records or record["step"] not in life.rescued]
        assert records == others, f"other {event} records in metrics.jsonl"


def rescued_steps(output: str) -> set[int]:
    """Returns the optimizer steps after which a failing job said that it saved."""
    return set(map(int, re.findall(r"The state after optimizer step (\d+) is saved", output)))


def without_training(records: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Removes the training metrics, which cover fewer samples if ranks were lost."""
    return [{name: value for name, value in record.items() if not name.startswith("train/")} for record in records]
