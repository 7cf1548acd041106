import pytest
import torch

from profiler import main as profile
from tests.conftest import RANK_VARIABLES, ROOT, WEIGHTED
from trainer.commands.parse import parse
from trainer.parallel.environment import RankEnvironment
from trainer.parallel.strategy import SingleDevice
from trainer.profiling.measure import opened

SLEEPY = f"{ROOT / 'tests' / 'helpers' / 'sleepy_task.py'}:Sleepy"
ANY_BATCH = ["--task", WEIGHTED, "--num-train", "40", "--num-threads", "1", "--device", "cpu"]
TINY = [*ANY_BATCH, "--batch-size", "8"]
SHORT = ["--steps", "4", "--settling-steps", "1"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def shell(monkeypatch):
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def profile_here(capsys, monkeypatch):
    """Runs profiler.py in this process; returns what it printed, (out, err)."""

    def run(*argv, status=0, environment=None):
        monkeypatch.setattr("sys.argv", ["profiler.py"])
        assert profile([str(arg) for arg in argv], environment) == status
        return capsys.readouterr()

    return run


@pytest.fixture
def alone(tmp_path):
    """Returns the environment of a single launched process."""
    return RankEnvironment(0, 1, 0, 1, f"file://{tmp_path}/meeting")


@pytest.fixture
def run():
    flags, problems = parse([*TINY, "--grad-accum-steps", "2"], False)
    assert not problems
    with opened(flags, TINY, SingleDevice(CPU), quiet=True) as run:
        yield run
