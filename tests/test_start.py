"""A run imports no slow module that it does not use."""

import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT, WEIGHTED
from tests.helpers import small_seqrec

RUNS = """
import sys
from trainer.cli import main
from trainer.parallel.environment import RankEnvironment

if "tensorboard" in sys.modules:  # which the main process alone needs, and only to train
    sys.exit("the command line has imported tensorboard")
for run in sys.argv[1].split(","):
    for epochs in "12":  # the second time it is resumed: moments are loaded
        folder = f"{sys.argv[2]}/{run[-4:]}"
        argv = ["--epochs", epochs, "--save-every-steps", "2", *run.split(), "--save-dir", folder]
        rank = RankEnvironment(0, 1, init_method=f"file://{folder}-{epochs}") if "--multi-gpu" in run else None
        status = main(argv, several_devices=rank is not None, environment=rank)
        useless = {"torch._dynamo", "torch._inductor", "sympy", "models.sequential", "tqdm.auto", "trainer.api"}
        found = useless & sys.modules.keys() - ({"models.sequential"} if "seqrec" in run else set())
        if status or found:
            sys.exit(f"{run}, {epochs} epochs: status {status}, imported: {found}")
"""


def test_a_run_imports_neither_a_compiler_nor_algebra(environment, tmp_path):
    """Importing a compiler or sympy takes longer than everything else between `import torch` and the first step."""
    small = f"--task {WEIGHTED} --optimizer"
    data = small_seqrec.write_interactions(tmp_path / "data")
    runs = [
        "--batch-size 512 --num-threads 1",
        f"{small} sgd --momentum 0.9",
        *[f"{small} muon"] * hasattr(torch.optim, "Muon"),
        f"--multi-gpu ddp --device cpu {small} adamw",
        " ".join(["--task seqrec --k-core 0 --data-dir", str(data), *small_seqrec.SMALL, "--time-span 90"]),
    ]
    command = [sys.executable, "-c", RUNS, ",".join(runs), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Resuming after optimizer step") == len(runs)


IMPORTED_MEANWHILE = """
import sys
import torch
from trainer.common.torch_private import default_settings_of_compiler

with default_settings_of_compiler():
    assert torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer" and "torch._dynamo" not in sys.modules
assert "torch._dynamo" not in sys.modules
with default_settings_of_compiler():
    import torch._dynamo
assert torch._dynamo is sys.modules["torch._dynamo"]
assert torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2
"""


@pytest.mark.slow
def test_importing_the_compiler_while_wrapping_a_model_works(environment):
    """Another thread may import the compiler meanwhile. The module that stands for it has torch's default settings."""
    subprocess.run([sys.executable, "-c", IMPORTED_MEANWHILE], cwd=ROOT, env=environment, check=True, timeout=180)
