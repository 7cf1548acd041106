"""Runs the parts of benchmarks/gpu.py that check results, on a real GPU."""

import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and -m cuda")]
RIGHT_OR_WRONG = ("exact", "graphed", "poisoned", "snapshot", "resumed", "scarce", "ranks", "profiled")


def run(part, folder, *more):
    command = [sys.executable, "benchmarks/gpu.py", "--parts", part, "--json", folder / "gpu.json", *more]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("part", RIGHT_OR_WRONG)
def test_a_benchmark_parts_checks_hold_for_small_work(part, tmp_path):
    run(part, tmp_path, "--small")


@pytest.mark.slow
@pytest.mark.parametrize("part", RIGHT_OR_WRONG)
def test_a_benchmark_parts_checks_hold(part, tmp_path):
    run(part, tmp_path)
