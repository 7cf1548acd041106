"""What a run imports: nothing that takes long and is of no use to it."""

import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT

RUN = """
import sys
from trainer.cli import main

status = main(sys.argv[1:], several_devices=False)
useless = ("torch._dynamo", "torch._inductor", "sympy", "models.sequential", "tqdm.auto", "trainer.api")
found = [name for name in useless if name in sys.modules]
sys.exit(f"status {status}, imported: {found}" if status or found else 0)
"""


OPTIMIZERS = [["adamw"], ["sgd", "--momentum", "0.9"]]
OPTIMIZERS += [["muon"]] if hasattr(torch.optim, "Muon") else []


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda its: its[0])
def test_a_run_imports_neither_a_compiler_nor_algebra(optimizer, environment, tmp_path):
    """To its end, with saves and all; each would take longer than all else between `import torch` and a step."""
    argv = ["--epochs", "1", "--batch-size", "512", "--save-every-steps", "2", "--save-dir", str(tmp_path / "run")]
    argv += ["--optimizer", *optimizer]
    command = [sys.executable, "-c", RUN, *argv]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # Resumed: moments are loaded.
    command[command.index("1")] = "2"
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Resuming after optimizer step" in done.stdout
