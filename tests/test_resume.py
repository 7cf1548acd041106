"""Killed at any step and started again, a run goes on as if nothing had happened."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import (
    ROOT,
    WEIGHTED,
    assert_same_bits,
    largest_difference,
    launcher,
    load,
    read_metrics,
)

GLOBAL_BATCH_SIZE = 12
EPOCHS = 4
NUM_TRAIN = 101
STEPS_PER_EPOCH = -(-NUM_TRAIN // GLOBAL_BATCH_SIZE)
NUM_STEPS = EPOCHS * STEPS_PER_EPOCH
# Accumulation (2 samples a forward), a worker, augmentation (always on in this task), an average of the weights,
# epochs without validation.
HARD = [
    "--task", WEIGHTED, "--epochs", EPOCHS, "--batch-size", 2, "--global-batch-size", GLOBAL_BATCH_SIZE,
    "--num-workers", 1, "--save-every-steps", 3, "--ema-decay", 0.9, "--lr", 0.01, "--log-interval", 2,
    "--keep-checkpoints", 2, "--num-threads", 1, "--eval-every", 3, "--eval-batch-size", 5,
]  # fmt: skip


def whole_lines(file):
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def global_batches(folder, world_size):
    """(epoch, sample ids) of each global batch, in order, from what the forwards of all ranks received.

    Line L of every rank belongs to the same micro-batch of the same step. A kill may leave ranks with unequally many
    lines; only complete steps count.
    """
    files = sorted(folder.glob("*.jsonl"))
    if len(files) < world_size:
        return []  # killed before every rank had begun
    ranks = [
        # wrap() sends one batch that does not count through each rank before the first step.
        list(map(json.loads, whole_lines(file)))[1 if world_size > 1 else 0 :]
        for file in files
    ]
    batches, current = [], []
    for micro_batch in zip(*ranks, strict=False):
        current += [i for line in micro_batch for i in line["index"]]
        # Forwards add up to an odd number of samples only at the end of an epoch.
        if len(current) in (GLOBAL_BATCH_SIZE, NUM_TRAIN % GLOBAL_BATCH_SIZE):
            batches.append((micro_batch[0]["epoch"], frozenset(current)))
            current = []
    return batches


def start(directory, folder, world_size, environment, *more):
    folder.mkdir()
    return subprocess.Popen(
        [sys.executable, *map(str, launcher(world_size) + HARD), "--save-dir", str(directory), *map(str, more)],
        cwd=ROOT,
        env=environment | {"LOCKSTEP_RECORD": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def kill_after(process, folder, num_lines):
    """SIGKILL to the whole job once some rank has run so many forwards. False if it ended before."""
    while process.poll() is None:
        written = max((len(f.read_text().splitlines()) for f in folder.glob("*.jsonl")), default=0)
        if written >= num_lines:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return True
        time.sleep(0.001)
    return False


def resumed_step(output):
    marks = [line for line in output.splitlines() if line.startswith("Resuming after optimizer step ")]
    return int(marks[0].split()[4].rstrip(":")) if marks else 0


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, environment):
    """Runs a world without interruption, once: (run directory, global batches)."""
    known = {}

    def run(world_size, *more):
        if (world_size, more) not in known:
            base = tmp_path_factory.mktemp(f"unbroken{world_size}")
            process = start(base / "run", base / "record", world_size, environment, *more)
            output, _ = process.communicate(timeout=180)
            assert process.returncode == 0, output
            known[world_size, more] = base / "run", global_batches(base / "record", world_size)
        return known[world_size, more]

    return run


def newest_step(directory):
    """Where a run would go on: the step of its newest checkpoint, 0 without one."""
    manifest = directory / "manifest.json"
    entries = json.loads(manifest.read_text())["checkpoints"] if manifest.exists() else []
    return max((entry["step"] for entry in entries if (directory / entry["file"]).exists()), default=0)


def run_broken(base, worlds, environment, seed, *more):
    """A run killed in every world but the last: (run directory, for each part: first step, global batches)."""
    draw = random.Random(seed)
    parts = []
    for i, world_size in enumerate(worlds):
        folder = base / f"record{i}"
        first = newest_step(base / "run")
        process = start(base / "run", folder, world_size, environment, "--delay-s", 0.002, *more)
        if i < len(worlds) - 1:
            forwards_per_step = GLOBAL_BATCH_SIZE // (2 * world_size)
            kill_after(process, folder, draw.randrange(1, NUM_STEPS * forwards_per_step // len(worlds)))
        else:
            output, _ = process.communicate(timeout=180)
            assert process.returncode == 0, output
            assert f"Resuming after optimizer step {first}:" in output or first == 0
        parts.append((first, global_batches(folder, world_size)))
    return base / "run", parts


def assert_same_samples(parts, expected):
    """Every part consumed what the unbroken run did from its first step on, and together they left nothing out."""
    covered = 0
    for first, batches in parts:
        assert first <= covered
        assert batches == expected[first : first + len(batches)]
        covered = first + len(batches)
    assert covered == len(expected) == NUM_STEPS


@pytest.mark.parametrize("world_size", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3])
def test_killed_and_resumed_in_the_same_world_is_equal_to_the_bit(world_size, unbroken, tmp_path, environment):
    """Dropout, a worker, augmentation, accumulation and an average of the weights, all on."""
    directory, expected = unbroken(world_size, "--dropout", 0.2)
    broken, parts = run_broken(tmp_path, [world_size] * 2, environment, 10 + world_size, "--dropout", 0.2)
    assert_same_samples(parts, expected)
    assert_same_bits(load(directory / "final.pth"), load(broken / "final.pth"))
    assert_same_bits(load(directory / "best.pth"), load(broken / "best.pth"))
    for event in ("step", "epoch", "result"):
        assert read_metrics(directory, event) == read_metrics(broken, event)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_killed_twice_anywhere(world_size, seed, unbroken, tmp_path, environment):
    directory, expected = unbroken(world_size, "--dropout", 0.2)
    broken, parts = run_broken(tmp_path, [world_size] * 3, environment, 1000 * world_size + seed, "--dropout", 0.2)
    assert_same_samples(parts, expected)
    assert_same_bits(load(directory / "final.pth"), load(broken / "final.pth"))


def test_resumed_on_other_numbers_of_devices(unbroken, tmp_path, environment):
    """1 -> 2 -> 3 -> 1, in float64: the same samples, and weights equal up to rounding."""
    directory, expected = unbroken(1, "--dtype", "float64")
    broken, parts = run_broken(tmp_path, [1, 2, 3, 1], environment, 5, "--dtype", "float64")
    assert_same_samples(parts, expected)
    assert largest_difference(load(directory / "final.pth"), load(broken / "final.pth")) < 1e-9


@pytest.mark.slow
def test_all_worlds_learn_the_same(unbroken):
    """The step rule and the order of samples, through the real command lines."""
    directory, expected = unbroken(1, "--dtype", "float64")
    for world_size in (2, 3):
        other, batches = unbroken(world_size, "--dtype", "float64")
        assert batches == expected
        assert largest_difference(load(directory / "final.pth"), load(other / "final.pth")) < 1e-9
        for mine, theirs in zip(read_metrics(directory, "epoch"), read_metrics(other, "epoch"), strict=True):
            assert theirs.pop("event") == mine.pop("event")
            assert theirs == pytest.approx(mine, rel=1e-9)


def test_every_test_sample_is_scored_once(unbroken):
    """Two samples in a world of three: one rank has none."""
    for world_size in (1, 2, 3):
        directory, _ = unbroken(world_size, "--dtype", "float64")
        results = json.loads((directory / "results.json").read_text())
        assert results["metrics"]["test/num_samples"] == 2
        assert results["world_size"] == world_size


def test_stop_signal_saves_and_the_same_command_goes_on(tmp_path, environment, unbroken):
    directory, expected = unbroken(1, "--dropout", 0.2)
    process = start(tmp_path / "run", tmp_path / "record0", 1, environment, "--dropout", 0.2, "--delay-s", 0.01)
    while not list((tmp_path / "record0").glob("*.jsonl")):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert "everything is saved" in output
    again = start(tmp_path / "run", tmp_path / "record1", 1, environment, "--dropout", 0.2)
    output, _ = again.communicate(timeout=60)
    assert again.returncode == 0, output
    before, after = (global_batches(tmp_path / name, 1) for name in ("record0", "record1"))
    parts = [(0, before), (resumed_step(output), after)]
    assert_same_samples(parts, expected)
    assert largest_difference(load(directory / "final.pth"), load(tmp_path / "run" / "final.pth")) == 0
