"""Memory, descriptors, threads and files do not grow in 24,000 steps with evaluations and saves."""

import json

import pytest

from tests.conftest import ROOT
from tests.faults.job import Forks
from tests.helpers.measured_task import EVERY

NUM_STEPS = 24_000
SETTLED = 8_000
"""Optimizer step by which every kind of work has occurred several times."""
GROWTH_BYTES = 4 << 20
ARGV = [
    "--task", f"{ROOT / 'tests' / 'helpers' / 'measured_task.py'}:Measured", "--num-train", 8000, "--num-val", 4,
    "--width", 4, "--global-batch-size", 4, "--max-steps", NUM_STEPS, "--eval-every-steps", 1000,
    "--save-every-steps", 500, "--log-interval", 100, "--num-threads", 1, "--device", "cpu",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_memory_and_open_files_do_not_grow_with_steps(world_size, environment, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.faults.job.GIVE_UP_S", 1800)
    measured = tmp_path / "measured"
    measured.mkdir()
    variables = environment | {"LOCKSTEP_MEASURED": str(measured)}
    job = Forks([*ARGV, "--save-dir", tmp_path / "run"], world_size, tmp_path / "job", variables)
    assert job.statuses() == [0] * world_size, job.output
    processes = [[*map(json.loads, file.read_text().splitlines())] for file in measured.iterdir()]
    assert len(processes) == world_size
    for notes in processes:
        print("\n".join(map(str, notes)))
        settled = [note for note in notes if note["step"] >= SETTLED]
        assert len(settled) == (NUM_STEPS - SETTLED) // EVERY + 1
        assert settled[-1]["resident"] - settled[0]["resident"] < GROWTH_BYTES
        for name in ("descriptors", "threads"):
            # A save in progress uses a thread and descriptors.
            assert min(note[name] for note in settled[-4:]) <= min(note[name] for note in settled[:4])
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    print(len(files), "files", (tmp_path / "job" / "rendezvous").stat().st_size if world_size > 1 else 0, "bytes")
    assert len(files) < 20
